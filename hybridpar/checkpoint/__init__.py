"""Checkpoints: saved by any grid, resumed on any other; weights for new runs; and exchange with
Hugging Face."""

from hybridpar.checkpoint.compatible import check_compatible
from hybridpar.checkpoint.finding import find, hold_found, newest, read_held
from hybridpar.checkpoint.folders import best_steps, saved_steps
from hybridpar.checkpoint.format.manifest import Manifest, read_manifest
from hybridpar.checkpoint.load import FullWeights, load_full, resume
from hybridpar.checkpoint.save import Saver, save, save_weights
from hybridpar.checkpoint.start import check_tokens, find_start, hold_start, start_from

__all__ = [
    "FullWeights",
    "Manifest",
    "Saver",
    "best_steps",
    "check_compatible",
    "check_tokens",
    "find",
    "find_start",
    "hold_found",
    "hold_start",
    "load_full",
    "newest",
    "read_held",
    "read_manifest",
    "resume",
    "save",
    "save_weights",
    "saved_steps",
    "start_from",
]
