"""Import of GPT checkpoints of Megatron-LM, of any tensor and pipeline split, without Megatron-LM."""

from hybridpar.checkpoint.megatron.files import is_megatron
from hybridpar.checkpoint.megatron.load import import_megatron

__all__ = ["import_megatron", "is_megatron"]
