"""The files of a checkpoint: manifest, tensors, and how they are written."""
