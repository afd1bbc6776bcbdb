"""A reducer of gradients that are not compressed."""

from __future__ import annotations

from hybridpar.config import Config
from hybridpar.state import GradientReducer, Partition, StatePolicy
from hybridpar.state.compression import Compression
from hybridpar.state.residency.chunks import Memory


def plain_reducer(partition: Partition) -> GradientReducer:
    """Reduce all buckets of a partition uncompressed."""
    nothing = Compression(partition, {}, StatePolicy(Config(), 1, 1), Memory())
    return GradientReducer(partition, nothing)
