"""Chunks of ghosts that come and go (ZeRO-2 and 3): their memory is counted while they are here."""

from __future__ import annotations

from torch import Tensor

from hybridpar.memory.ghost import Ghost
from hybridpar.state.shares import WholeChunk, WholeChunks


class _GhostChunk(WholeChunk):
    """A chunk whose block has no bytes while it is not here."""

    @property
    def is_here(self) -> bool:
        return _ghost(self.tensor).block.num_bytes > 0

    def _resize(self, num_bytes: int) -> None:
        _ghost(self.tensor).block.resize(num_bytes)


class GhostChunks(WholeChunks):
    """WholeChunks of the ghosts of a tracker."""

    chunk = _GhostChunk

    def _storage(self, view: Tensor) -> object:
        return id(_ghost(view).block)


def _ghost(tensor: Tensor) -> Ghost:
    assert isinstance(tensor, Ghost), "made while a Tracker is active"
    return tensor
