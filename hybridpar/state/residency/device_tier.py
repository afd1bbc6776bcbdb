"""The two tiers of a GPU's state: its memory, and pinned host memory. Items move as on a CPU
(tiered.py).

An item's memory is its tensor's storage, which is empty while the item is offloaded, so views stay
valid. An item leaves once the launch thread's stream has passed its release. Each copy direction
has a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.state.host import host_work
from hybridpar.state.policy import StatePolicy
from hybridpar.state.residency.chunks import Chunk, HostMemory
from hybridpar.state.residency.pages import Spare
from hybridpar.state.residency.region import TensorRegion, on, taken
from hybridpar.state.residency.shares import ShardedMemory
from hybridpar.state.residency.store import Store, padded
from hybridpar.state.residency.tiered import TieredMemory, slow_folder
from hybridpar.state.residency.tiers import Tiers


def state_memory(policy: StatePolicy, device: torch.device) -> ShardedMemory:
    """Create the configured memory of a rank's state."""
    config = policy.config
    if not config.memory.is_limited:
        return ShardedMemory(device, policy.moved_kinds)
    _, budget = config.memory.limiting
    if device.type == "cpu":
        return TieredMemory(budget, slow_folder(config), sharded=policy.moved_kinds)
    return DeviceTieredMemory(budget, device, policy.moved_kinds)


def _is_late(device: torch.device) -> bool:
    """Return whether calls on a device return before their work is complete."""
    return device.type == "cuda"


class HostStore(Store):
    """Host memory for items of these sizes (bytes), allocated once; pinned for a GPU."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        sizes = [padded(size) for size in sizes]
        self._memory = HostMemory(device)
        self._work = host_work(device)
        self._items = self._memory.zeros("tier", Chunk(0, sum(sizes)), torch.uint8).split(sizes)

    def read(self, item: int, into: Tensor) -> None:
        self._copy("in", into, self._items[item])

    def write(self, item: int, content: Tensor) -> None:
        self._copy("out", self._items[item], content)

    def item(self, number: int) -> Tensor:
        """Return the memory of an item."""
        return self._items[number]

    @torch.no_grad()
    def _copy(self, way: str, target: Tensor, source: Tensor) -> None:
        with self._work.reach(None, way):
            self._work.copy([(target, source)])


class _Passed:
    """A marker that is done once the launch thread's stream has reached its creation."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class DeviceTieredMemory(TieredMemory):
    """State in at most `budget` bytes of a device's memory, and the rest in host memory."""

    def __init__(self, budget: int, device: torch.device, sharded: tuple[str, ...] = ()):
        super().__init__(budget, Path(), device, sharded)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _region(self, num_bytes: int) -> TensorRegion:
        with on(self._stream):
            found = TensorRegion(
                torch.empty(padded(max(num_bytes, 1)), dtype=torch.uint8, device=self.device),
                self._stream,
            )
        found.give_back()
        return found

    def _make_tiers(self, pinned: frozenset[int], budget: int, sizes: Sequence[int]) -> Tiers:
        mark = (lambda: _Passed(self.device)) if _is_late(self.device) else None
        spare = Spare()  # the device's allocator keeps freed memory
        store = HostStore(sizes, self.device)
        tiers = Tiers(self._regions, pinned, budget, store, spare, mark)
        for number in pinned:
            tiers.items[number].region.clear()
        return tiers

    def viewing(self, chunk: Tensor) -> AbstractContextManager[object]:
        """Return a context to make views of a chunk. Before `seal` it then loses its content."""
        if (number := self.number_of(chunk)) is None:
            return super().viewing(chunk)
        region = self._regions[number]
        assert isinstance(region, TensorRegion)
        return taken([region])
