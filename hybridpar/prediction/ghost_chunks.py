"""Ghost memory that is allocated and released, and counted while it is resident: chunks of ZeRO-2
and 3, and activations."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from hybridpar.prediction.ghost import Ghost
from hybridpar.runtime.activation_offloader import Storages
from hybridpar.state import StatePolicy
from hybridpar.state.residency.shares import ShardedMemory, WholeChunk
from hybridpar.state.residency.tiered import ItemMemory


class _GhostChunk(WholeChunk):
    """A chunk whose block has no bytes while it is not resident."""

    @property
    def is_here(self) -> bool:
        return _ghost(self.tensor).block.num_bytes > 0

    def holds(self, view: Tensor) -> bool:
        return _ghost(view).block is _ghost(self.tensor).block

    def _resize(self, num_bytes: int) -> None:
        _ghost(self.tensor).block.resize(num_bytes)


class _ResidentItems(ItemMemory):
    """Memory of items that all stay."""

    def seal(self, allocate: Callable[[], object], unsharded: int) -> None:
        super().seal(allocate, unsharded)
        self.items.clear()


def ghost_memory(
    policy: StatePolicy, device: torch.device, *, stays: bool = False
) -> ShardedMemory:
    """Create the memory of a rank's state for ghosts. stays: nothing moves between tiers."""
    of_policy: type[ShardedMemory] = ShardedMemory
    if policy.config.memory.is_limited:
        of_policy = _ResidentItems if stays else ItemMemory
    return of_policy(device, policy.moved_kinds, _GhostChunk)


def _ghost(tensor: Tensor) -> Ghost:
    assert isinstance(tensor, Ghost), "made while a Tracker is active"
    return tensor


class _GhostBlocks(Storages):
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
