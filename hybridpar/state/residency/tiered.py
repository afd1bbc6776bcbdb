"""State in limited memory: chunks of all kinds are items that move between memory and a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.cpu import zeros
from hybridpar.optim import ParameterSlot
from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import BufferUsage, Chunk, StateItem
from hybridpar.state.residency.pages import Region, SparePages
from hybridpar.state.residency.shares import SHARES, ShardedMemory
from hybridpar.state.residency.store import DiskStore, padded
from hybridpar.state.residency.tiers import AnyRegion, Tiers

FOLDER = "state"
"""Subfolder of a run for the file, if the configuration names none."""


def slow_folder(config: Config) -> Path:
    """Return the folder of the slow tier."""
    return Path(config.memory.folder or config.run.folder / FOLDER)


def folder_to_measure(config: Config) -> Path:
    """Return the folder of the slow tier, or its nearest existing parent."""
    folder = Path(config.memory.folder or config.run.folder).absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


class ItemMemory(ShardedMemory):
    """Memory that lists its chunks in `items`, in the order in which they are allocated. If
    replicas shard them, their items are this rank's shards.

    An item has whole pages, which `padding` counts.
    """

    padding: int
    _uses: Callable[[str], BufferUsage]

    @property
    def is_of_host(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if self._moves(kind, chunk.use) or self._is_on_host(chunk):
            return super().zeros(kind, chunk, dtype)
        return self._add(kind.removeprefix(SHARES), chunk.use, chunk.stop - chunk.start, dtype)

    def for_optimizer(self, uses: Callable[[str], BufferUsage]) -> ItemMemory:
        self._uses = uses
        return self

    def state(self, what: str, slots: Sequence[ParameterSlot], dtype: torch.dtype) -> list[Tensor]:
        """Return zeros of the slots' shapes, an item for each use. what: name of the state."""
        found: dict[str, Tensor] = {}
        for use in dict.fromkeys(self._uses(slot.name) for slot in slots):
            own = {slot.name: slot.shape for slot in slots if self._uses(slot.name) == use}
            layout = FlatLayout(own, dtype)
            flat = self._add(f"optimizer/{what}", use, layout.numel, dtype)
            with self.viewing(flat):
                found |= layout.views(flat)
        return [found[slot.name] for slot in slots]

    def seal(self, allocate: Callable[[], object], unsharded: int) -> None:
        allocate()

    def _add(self, kind: str, use: BufferUsage, numel: int, dtype: torch.dtype) -> Tensor:
        item = StateItem(kind, use, padded(max(numel, 1) * dtype.itemsize))
        self.items.append(item)
        self.padding += item.num_bytes - numel * dtype.itemsize
        return self._take(numel, dtype)

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return zeros(numel, dtype, self.device)


class TieredMemory(ItemMemory):
    """State in at most `budget` bytes of a CPU's memory, and the rest in a file in `folder`.

    From `seal` on, `tiers` moves the items, within the part of the budget that unsharded chunks
    leave.
    """

    def __init__(
        self,
        budget: int,
        folder: Path,
        device: torch.device | str = "cpu",
        sharded: tuple[str, ...] = (),
    ):
        super().__init__(device, sharded)
        self.budget = budget
        self.folder = folder
        self.tiers: Tiers
        self._regions: list[AnyRegion] = []
        self._numbers: dict[int, int] = {}  # of items, by their storage
        self._copy: tuple[int, Tensor] | None = None

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        region = self._region(numel * dtype.itemsize)
        self._numbers[region.tensor.untyped_storage()._cdata] = len(self._regions)
        self._regions.append(region)
        with self.viewing(region.tensor):
            return region.tensor[: numel * dtype.itemsize].view(dtype)

    def _region(self, num_bytes: int) -> AnyRegion:
        return Region(num_bytes)

    def seal(self, allocate: Callable[[], object], unsharded: int) -> None:
        """Create the slow tier.

        Raises:
            HybridparError: There is no space for it.
        """
        super().seal(allocate, unsharded)
        pinned = frozenset(i for i, item in enumerate(self.items) if item.use.stays)
        sizes = [0 if item.use.stays else item.num_bytes for item in self.items]
        self.tiers = self._make_tiers(pinned, self.budget - unsharded, sizes)

    def _make_tiers(self, pinned: frozenset[int], budget: int, sizes: Sequence[int]) -> Tiers:
        """Create the tiers; sizes: in the slow one; pinned: items that are always resident."""
        return Tiers(self._regions, pinned, budget, DiskStore(self.folder, sizes), SparePages())

    def close(self) -> None:
        self.tiers.close()

    def number_of(self, view: Tensor) -> int | None:
        """Return the item that a tensor is a view of, if any."""
        return self._numbers.get(view.untyped_storage()._cdata)

    @contextmanager
    def writing(self, *views: Tensor) -> Iterator[None]:
        self._copy = None
        own = {number for number in map(self.number_of, views) if number is not None}
        with self.tiers.changing(sorted(own)), super().writing(*views):
            yield

    def read(self, view: Tensor) -> Tensor:
        number = self.number_of(view)
        if number is None or self.tiers.is_here(number):
            return view
        if self._copy is None or self._copy[0] != number:
            self._copy = None  # frees the old copy first, so that only one exists at a time
            self._copy = number, self.tiers.content(number)
        content = self._copy[1].view(view.dtype)
        return content.as_strided(view.shape, view.stride(), view.storage_offset())

    def forget(self) -> None:
        self._copy = None
