"""Ghost memory that is allocated and released, and counted while it is resident: chunks of ZeRO-2
and 3, and activations."""

from __future__ import annotations

import sys

from torch import Tensor

from hybridpar.prediction.ghost import Ghost
from hybridpar.state.residency.shares import WholeChunk, WholeChunks


class _GhostChunk(WholeChunk):
    """A chunk whose block has no bytes while it is not resident."""

    @property
    def is_here(self) -> bool:
        return _ghost(self.tensor).block.num_bytes > 0

    def _resize(self, num_bytes: int) -> None:
        _ghost(self.tensor).block.resize(num_bytes)


class GhostChunks(WholeChunks):
    """Unsharded chunks for the ghosts of a tracker."""

    chunk = _GhostChunk

    def _storage(self, view: Tensor) -> object:
        return id(_ghost(view).block)


def _ghost(tensor: Tensor) -> Ghost:
    assert isinstance(tensor, Ghost), "made while a Tracker is active"
    return tensor


class _GhostBlocks:
    """Memory of ghosts, as an ActivationOffloader sees it."""

    def key(self, tensor: Tensor) -> object:
        return id(tensor.block) if isinstance(tensor, Ghost) else None

    def num_holders(self, tensor: Tensor) -> int:
        assert isinstance(tensor, Ghost)
        return sys.getrefcount(tensor.block) - 1  # without this call's reference

    def num_bytes(self, tensor: Tensor) -> int:
        return tensor.block.num_bytes if isinstance(tensor, Ghost) else 0

    def content(self, tensor: Tensor) -> Tensor:
        return tensor

    def resize(self, content: Tensor, num_bytes: int) -> None:
        assert isinstance(content, Ghost)
        content.block.resize(num_bytes)


GHOSTS = _GhostBlocks()
