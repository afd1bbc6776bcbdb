"""Text from a trained GPT, and its weights by their global names."""
