"""Inference: text from a trained GPT, and weights by their global names."""
