"""Checkpoints: plain save and exact resume on one grid, weights for any grid, and exchange with Hugging Face."""

from hybridpar.checkpoint.load import FullWeights, find, load_full, newest, resume
from hybridpar.checkpoint.manifest import Manifest, check_compatible, read_manifest, saved_steps
from hybridpar.checkpoint.save import save, save_weights
from hybridpar.checkpoint.start import find_start, start_from

__all__ = [
    "FullWeights", "Manifest", "check_compatible", "find", "find_start", "load_full", "newest", "read_manifest",
    "resume", "save", "save_weights", "saved_steps", "start_from",
]
