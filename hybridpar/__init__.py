"""Train GPT, BERT and models of your own with any mix of tensor, pipeline and data parallelism.

Names of the public interface are imported when they are first used.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# An installed package holds hybridpar/kernels; a plain checkout keeps them at its top level.
_checkout = Path(__file__).parent.parent
if not Path(__file__).with_name("kernels").is_dir() and (_checkout / "csrc").is_dir():
    __path__.append(str(_checkout))

_NAMES = {
    "config": ("Config", "ModelConfig", "ModelSpec", "load_toml"),
    "grid": ("Axis", "ProcessGrid"),
    "models.build": ("Build",),
    "nn": ("ColumnParallelLinear", "Dropout", "Init", "LayerNorm", "LearnedPositionEmbedding", "ParallelAttention",
           "ParallelMLP", "ParallelModule", "Placement", "RMSNorm", "RowParallelLinear", "Shard",
           "VocabParallelEmbedding", "vocab_parallel_cross_entropy"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from hybridpar.config import Config, ModelConfig, ModelSpec, load_toml
    from hybridpar.grid import Axis, ProcessGrid
    from hybridpar.models.build import Build
    from hybridpar.nn import (
        ColumnParallelLinear,
        Dropout,
        Init,
        LayerNorm,
        LearnedPositionEmbedding,
        ParallelAttention,
        ParallelMLP,
        ParallelModule,
        Placement,
        RMSNorm,
        RowParallelLinear,
        Shard,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hybridpar' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridpar.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
