"""Train GPT, BERT and custom models with any mix of tensor, pipeline and data parallelism.

`__all__` is the public interface. Its names are imported when they are first used.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridpar.config import (
        Config,
        ModelConfig,
        ModelSpec,
        RoutedExperts,
        UpdateRule,
        load_toml,
    )
    from hybridpar.data import Tokenizer
    from hybridpar.errors import ConfigError, HybridparError
    from hybridpar.grid import Axis, ProcessGrid
    from hybridpar.models.blocks import sequence_shares
    from hybridpar.models.custom_blocks import Build
    from hybridpar.models.sequential import SequentialSpec
    from hybridpar.nn import (
        ColumnParallelLinear,
        Dropout,
        ExpertOptions,
        Init,
        LayerNorm,
        LearnedPositionEmbedding,
        MixtureOfExperts,
        ParallelAttention,
        ParallelMLP,
        ParallelModule,
        Placement,
        RMSNorm,
        RouterOptions,
        RowParallelLinear,
        SequencePart,
        Shard,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from hybridpar.train.faults.errors import CallbackError
    from hybridpar.train.stop import STOP
    from hybridpar.trainer import Trainer

__all__ = [
    "STOP",
    "Axis",
    "Build",
    "CallbackError",
    "ColumnParallelLinear",
    "Config",
    "ConfigError",
    "Dropout",
    "ExpertOptions",
    "HybridparError",
    "Init",
    "LayerNorm",
    "LearnedPositionEmbedding",
    "MixtureOfExperts",
    "ModelConfig",
    "ModelSpec",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "Placement",
    "ProcessGrid",
    "RMSNorm",
    "RoutedExperts",
    "RouterOptions",
    "RowParallelLinear",
    "SequencePart",
    "SequentialSpec",
    "Shard",
    "Tokenizer",
    "Trainer",
    "UpdateRule",
    "VocabParallelEmbedding",
    "load_toml",
    "sequence_shares",
    "vocab_parallel_cross_entropy",
]
__version__ = "0.1.0"

_MODULES = (
    "config",
    "errors",
    "grid",
    "models.custom_blocks",
    "models.sequential",
    "nn",
    "trainer",
    "data",
    "train.faults.errors",
    "train.stop",
    "models.blocks",
)
"""Modules that define the public names, in the order in which they are searched."""

# An installed package holds hybridpar/kernels; a plain checkout keeps them at its top level.
_checkout = Path(__file__).parent.parent
if not Path(__file__).with_name("kernels").is_dir() and (_checkout / "csrc").is_dir():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if hasattr(home := importlib.import_module(f"hybridpar.{module}"), name):
                return getattr(home, name)
    raise AttributeError(f"module 'hybridpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
