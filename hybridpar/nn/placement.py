"""What a parameter is, globally, and which part of it this rank holds.

From a Placement alone follow: the values a shard starts from, how its gradient is synchronised, how it is counted in
the global gradient norm, whether it decays, how checkpoints store and reassemble it, and which replicas must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from hybridpar.comm import all_reduce
from hybridpar.grid import Axis

Range = tuple[int, int]  # half open
Matrices = tuple[tuple[Range, ...], ...]


def split_sizes(size: int, parts: int) -> tuple[int, ...]:
    """`size` items in `parts` shares that differ by at most one, the larger ones first. Shares may be empty."""
    return tuple(size // parts + (i < size % parts) for i in range(parts))


def split_ranges(size: int, parts: int) -> tuple[Range, ...]:
    """The half-open ranges of `split_sizes`."""
    ends = tuple(accumulate(split_sizes(size, parts)))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


@dataclass(frozen=True, slots=True)
class Init:
    """How the global parameter starts: 'normal' (mean 0, standard deviation `std`), 'zeros' or 'ones'."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along `dim` over the tp axis.

    `ranges[r]` are the half-open ranges of the global dimension that tp rank r holds, in the order of its local
    tensor. Ranges of different ranks may overlap (grouped KV heads shared by several ranks): the gradients of
    rows held more than once are partial and must be summed over their holders.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    def even(dim: int, size: int, parts: int) -> Shard:
        """A contiguous range for each rank, as `split_ranges` cuts `size`."""
        return Shard(dim, tuple((r,) for r in split_ranges(size, parts)))

    def local_size(self, rank: int) -> int:
        """The extent along `dim` that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def index(self, rank: int) -> Tensor:
        """Global indices along `dim` of the local tensor's slices; int64 [local_size]."""
        return torch.cat([torch.arange(a, b) for a, b in self.ranges[rank]] or [torch.arange(0)])

    def holders(self, size: int) -> Tensor:
        """How many ranks hold each global index along `dim`; int64 [size]."""
        count = torch.zeros(size, dtype=torch.int64)
        for rank in range(len(self.ranges)):
            count.index_add_(0, i := self.index(rank), torch.ones_like(i))
        return count

    def owned(self, rank: int, size: int) -> Tensor:
        """True where `rank` is the first holder of its local slice; bool [local_size]. Every index has one owner."""
        first = torch.full((size,), len(self.ranges), dtype=torch.int64)
        for r in reversed(range(len(self.ranges))):
            first[self.index(r)] = r
        return first[self.index(rank)] == rank


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter: its global shape, how it is split over tp (None: replicated), how it starts, whether it decays.

    `tied`: parameters that carry the same non-empty name are one parameter held by the first and last pipeline stage;
    their gradients are summed over the `ends` axis and it is counted once.
    `matrices`: the hidden matrices that a 2-D parameter is made of, each as the ranges of global rows that make it up,
    in order; together they are all rows. Empty for what is no hidden matrix: embeddings, output heads, vectors.
    """

    shape: tuple[int, ...]
    init: Init
    shard: Shard | None = None
    weight_decay: bool = True
    tied: str = ""
    matrices: Matrices = ()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that tp rank `rank` holds."""
        if self.shard is None:
            return self.shape
        d = self.shard.dim
        return (*self.shape[:d], self.shard.local_size(rank), *self.shape[d + 1 :])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """The part of the global tensor that tp rank `rank` holds."""
        assert tuple(full.shape) == self.shape, f"expected {self.shape}, got {tuple(full.shape)}"
        return full if self.shard is None else full.index_select(self.shard.dim, self.shard.index(rank).to(full.device))

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The global tensor from the parts of all tp ranks in order. Replicated: the first part."""
        if self.shard is None:
            return parts[0]
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            full.index_copy_(self.shard.dim, self.shard.index(rank).to(part.device), part)
        return full

    def shared_index(self) -> Tensor:
        """Global indices along the split dimension held by more than one rank; int64, empty where none."""
        if self.shard is None:
            return torch.arange(0)
        return (self.shard.holders(self.shape[self.shard.dim]) > 1).nonzero().flatten()


def has_shared_rows(placement: Placement) -> bool:
    """Whether several tp ranks hold some of its rows."""
    return placement.shared_index().numel() > 0


class ParallelModule(nn.Module):
    """A module that states the placement of every parameter it owns directly, in `placements`."""

    def __init__(self, axis: Axis):
        super().__init__()
        self.axis = axis
        self.placements: dict[str, Placement] = {}

    def add_parameter(self, name: str, placement: Placement, *, device: str | torch.device | None = None,
                      dtype: torch.dtype | None = None) -> None:
        """Creates the local part, uninitialised (see init.initialize), and records its placement.

        On an axis of size 1 nothing is split, so there the placement has no shard: a layer that is given such an axis
        inside a larger grid is replicated.
        """
        if self.axis.size == 1:
            placement = replace(placement, shard=None)
        shape = placement.local_shape(self.axis.rank)
        self.placements[name] = placement
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))


def named_placements(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Every parameter of `module` with its qualified name and placement, in registration order, tied ones once.

    Raises: AssertionError for a parameter that no ParallelModule placed (see `ParallelModule.add_parameter`).
    """
    seen: set[int] = set()
    for prefix, sub in module.named_modules():
        for name, parameter in sub.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{prefix}.{name}" if prefix else name
            assert name in getattr(sub, "placements", ()), f"{full} has no placement: add it with add_parameter"
            yield full, parameter, sub.placements[name]


@torch.no_grad()
def reduce_shared_gradients(grads: Iterable[tuple[Tensor, Placement]], axis: Axis) -> None:
    """Makes whole, in place, the gradients of rows that several tp ranks hold: the sum over their holders.

    Call once a batch, with the gradients in the same order on every rank of `axis` (tp).
    Collectives: one all-reduce of all shared rows together for each dtype; none where no row is shared.
    """
    pieces: dict[torch.dtype, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    for grad, placement in grads:
        num_shared, local, slot = _shared_rows(placement, axis.rank)
        if num_shared and placement.shard:
            rows = grad.movedim(placement.shard.dim, 0)  # a view
            local, slot = local.to(grad.device), slot.to(grad.device)
            part = rows.new_zeros(num_shared, *rows.shape[1:])
            part[slot] = rows[local]
            pieces.setdefault(grad.dtype, []).append((rows, local, part, slot))
    for group in pieces.values():
        flat = all_reduce(torch.cat([part.flatten() for _, _, part, _ in group]), axis)
        totals = flat.split([part.numel() for _, _, part, _ in group])
        for (rows, local, part, slot), total in zip(group, totals, strict=True):
            rows[local] = total.view(part.shape)[slot]


@cache
def _shared_rows(placement: Placement, rank: int) -> tuple[int, Tensor, Tensor]:
    """How many slices several ranks hold, and of those on `rank`: local indices, positions among the shared ones."""
    shared = placement.shared_index()
    index = placement.shard.index(rank) if placement.shard else torch.arange(0)
    local = torch.isin(index, shared).nonzero().flatten()
    return len(shared), local, torch.searchsorted(shared, index[local])
