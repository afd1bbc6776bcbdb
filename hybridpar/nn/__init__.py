"""Layers that split over the tensor-parallel axis they are given, and the placements that type
their parameters.

GPT and BERT are built from these; so can your model be. A layer with parameters is given its sizes,
the axis, then options by name, `device` and `dtype` last of them. Its parameters are not
initialised (`nn.init.initialize` does it), each knows its global shape, and each layer states its
shapes and the collectives it makes.
"""

from hybridpar.nn.attention import HeadLayout, ParallelAttention
from hybridpar.nn.cache import KeyValueCache
from hybridpar.nn.cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from hybridpar.nn.dropout import Dropout
from hybridpar.nn.embedding import LearnedPositionEmbedding, VocabParallelEmbedding
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from hybridpar.nn.mlp import ParallelMLP
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

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "HeadLayout",
    "Init",
    "KeyValueCache",
    "LayerNorm",
    "LearnedPositionEmbedding",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "Placement",
    "RMSNorm",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "column_linear",
    "named_placements",
    "reduce_shared_gradients",
    "split_ranges",
    "split_sizes",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
