"""Checkpoints: plain save and exact resume on one grid, and shards put together into whole tensors."""

from hybridpar.checkpoint.load import load_full, newest, resume
from hybridpar.checkpoint.manifest import Manifest, check_compatible, read_manifest, saved_steps
from hybridpar.checkpoint.save import save

__all__ = ["Manifest", "check_compatible", "load_full", "newest", "read_manifest", "resume", "save", "saved_steps"]
