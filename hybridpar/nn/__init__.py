"""Layers that split over the tensor-parallel axis they are given, and placements of their
parameters.

GPT and BERT are built from these, and custom models can be. A layer with parameters takes its
sizes, the axis, then options by name, `device` and `dtype` last. Its parameters are not initialised
(`nn.init.initialize` does that) and know their global shape. Each layer states its shapes and the
collectives it makes.
"""

from hybridpar.nn.attention import HeadLayout, ParallelAttention
from hybridpar.nn.cache import KeyValueCache
from hybridpar.nn.context import Context
from hybridpar.nn.cross_entropy import (
    CrossEntropySpec,
    VocabProjection,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from hybridpar.nn.dropout import Dropout
from hybridpar.nn.embedding import LearnedPositionEmbedding, VocabParallelEmbedding
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from hybridpar.nn.mlp import ParallelMLP
from hybridpar.nn.moe import ExpertOptions, MixtureOfExperts, RouterOptions
from hybridpar.nn.norm import LayerNorm, RMSNorm
from hybridpar.nn.placement import (
    Init,
    ParallelModule,
    Placement,
    Shard,
    named_placements,
    reduce_shared_gradients,
    split_ranges,
    split_sizes,
)
from hybridpar.nn.sequence import SequencePart

__all__ = [
    "ColumnParallelLinear",
    "Context",
    "CrossEntropySpec",
    "Dropout",
    "ExpertOptions",
    "HeadLayout",
    "Init",
    "KeyValueCache",
    "LayerNorm",
    "LearnedPositionEmbedding",
    "MixtureOfExperts",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "Placement",
    "RMSNorm",
    "RouterOptions",
    "RowParallelLinear",
    "SequencePart",
    "Shard",
    "VocabParallelEmbedding",
    "VocabProjection",
    "column_linear",
    "named_placements",
    "reduce_shared_gradients",
    "split_ranges",
    "split_sizes",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
