"""Import GPT checkpoints of Megatron-LM with any tensor and pipeline split, without Megatron-LM."""

from hybridpar.checkpoint.megatron.files import is_megatron
from hybridpar.checkpoint.megatron.import_model import import_megatron
from hybridpar.checkpoint.megatron.verify import compare_megatron

__all__ = ["compare_megatron", "import_megatron", "is_megatron"]
