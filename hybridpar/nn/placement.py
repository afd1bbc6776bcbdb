"""Placements: the global shape of a parameter, and the part of it that each rank holds.

A Placement says for every axis of the grid whether the parameter is split along it, held by all
with full gradients (a copy), or held by all with gradients that are partial sums:

    along   split                          partial                              copy
    pp      on one stage                   `tied`: on the first and the last
    dp                                     each replica has its micro-batches
    experts `apart`                        each replica has its micro-batches
    tp      `shard`                        `partial`: each has its own tokens   all else
    others  `shard`                        `partial`                            all else

That alone decides the starting values of a shard, over which ranks its gradient is reduced, who
counts it in the global gradient norm, who saves it, how checkpoints reassemble it, and which
replicas must agree. A parameter that is not `trainable` keeps its bits: it has neither gradient,
optimizer state, master copy, weight decay nor a part in the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hybridpar.comm import all_reduce
from hybridpar.errors import config_error
from hybridpar.grid import BATCH, Axis, Place
from hybridpar.nn.binding import UNBOUND, ParameterBinding

Range = tuple[int, int]  # half open
Matrices = tuple[tuple[Range, ...], ...]


class Held(Enum):
    """How the ranks along an axis hold a parameter.

    All hold the same with full gradients, or parts of it, or the same with gradients that are yet
    to be
    summed.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"


def split_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Split `size` items into `parts` shares that differ by at most one, the larger ones first.

    Shares may be empty.
    """
    return tuple(size // parts + (i < size % parts) for i in range(parts))


def split_ranges(size: int, parts: int) -> tuple[Range, ...]:
    """Return the half-open ranges of `split_sizes`."""
    ends = tuple(accumulate(split_sizes(size, parts)))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def indices(ranges: Sequence[Range]) -> Tensor:
    """Return all integers of the ranges in order; int64."""
    return torch.cat([torch.arange(a, b) for a, b in ranges] or [torch.arange(0)])


InitKind = Literal["normal", "zeros", "ones", "constructed"]


@dataclass(frozen=True, slots=True)
class Init:
    """The starting value of a global parameter.

    'normal' has mean 0 and the standard deviation `std`; 'constructed' is the result of
    `draw(seed)`;
    'zeros' and 'ones' are constants.
    """

    kind: InitKind
    std: float = 0.0
    draw: Callable[[int], Tensor] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(InitKind)):
            raise config_error(
                "Init.kind", self.kind, f"must be one of {', '.join(kinds)}", '"normal"'
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """A split along dimension `dim` over `axis`.

    `ranges[r]` are the half-open ranges of the global dimension that rank r of the axis holds, in
    the order of its local tensor. Ranges of different ranks may overlap (grouped KV heads shared by
    several ranks). Gradients of such rows are partial and must be summed over their holders.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    axis: str = "tp"

    @staticmethod
    def even(dim: int, size: int, parts: int) -> Shard:
        """Return a contiguous range for each rank, cut by `split_ranges`."""
        return Shard(dim, tuple((r,) for r in split_ranges(size, parts)))

    def local_size(self, rank: int) -> int:
        """Return the extent along `dim` that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def index(self, rank: int) -> Tensor:
        """Return the global indices along `dim` of the local slices; int64 [local_size]."""
        return indices(self.ranges[rank])

    def holders(self, size: int) -> Tensor:
        """Return how many ranks hold each global index along `dim`; int64 [size]."""
        count = torch.zeros(size, dtype=torch.int64)
        for rank in range(len(self.ranges)):
            count.index_add_(0, i := self.index(rank), torch.ones_like(i))
        return count

    def owned(self, rank: int, size: int) -> Tensor:
        """Return True for each local slice whose first holder is `rank`; bool [local_size].

        Every index has one owner.
        """
        first = torch.full((size,), len(self.ranges), dtype=torch.int64)
        for r in reversed(range(len(self.ranges))):
            first[self.index(r)] = r
        return first[self.index(rank)] == rank


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter: its global shape, how it starts, how it is split, and how it is updated.

    Attributes:
        shape: The global shape.
        init: How it starts.
        shard: How it is split; None: it is replicated.
        weight_decay: Factor of optim.weight_decay, 0 for biases and norms.
        lr: Factor of the learning rate.
        tied: Parameters with the same non-empty name are one parameter, held by the first and last
            pipeline stage; their gradients are summed over the embedding group, and it is counted
            once.
        matrices: The hidden matrices that a 2-D parameter consists of, each as ranges of global
            rows, in order; together they are all rows. Empty for embeddings, output heads and
            vectors.
        partial: Axes of the layer whose ranks all hold the parameter, each with a partial sum of
            its gradient.
        trainable: False for a frozen parameter.
        factored: Its layer gives each part of its gradient as two factors (nn.matmul.Product).
        sign_step: If above 0, every update moves each element by this much against the sign of its
            gradient, in place of the optimizer's rule; its gradient is no part of the global norm.
        apart: Axes along which one rank alone holds the parameter, as it does along pp.
    """

    shape: tuple[int, ...]
    init: Init
    shard: Shard | None = None
    weight_decay: float = 1.0
    tied: str = ""
    matrices: Matrices = ()
    partial: tuple[str, ...] = ()
    trainable: bool = True
    factored: bool = False
    lr: float = 1.0
    sign_step: float = 0.0
    apart: tuple[str, ...] = ()

    def along(self, axis: str) -> Held:
        """Return how the ranks along an axis hold it."""
        if axis == "pp":
            return Held.PARTIAL if self.tied else Held.SHARDED
        if axis in self.apart or (self.shard is not None and self.shard.axis == axis):
            return Held.SHARDED
        return Held.PARTIAL if axis in BATCH or axis in self.partial else Held.REPLICATED

    def rank_at(self, place: Place) -> int:
        """Return the index of the part that the rank at `place` holds; 0 if it is not split."""
        return 0 if self.shard is None else place.get(self.shard.axis, 0)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of part `rank` (see `rank_at`)."""
        if self.shard is None:
            return self.shape
        d = self.shard.dim
        return (*self.shape[:d], self.shard.local_size(rank), *self.shape[d + 1 :])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """Return part `rank` of the global tensor (see `rank_at`)."""
        assert tuple(full.shape) == self.shape, f"expected {self.shape}, got {tuple(full.shape)}"
        return (
            full
            if self.shard is None
            else full.index_select(self.shard.dim, self.shard.index(rank).to(full.device))
        )

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the global tensor from all parts in order; the first one if it is not split."""
        if self.shard is None:
            return parts[0]
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            full.index_copy_(self.shard.dim, self.shard.index(rank).to(part.device), part)
        return full

    def shared_index(self) -> Tensor:
        """Return the indices along the split dimension that more than one rank holds; int64, may
        be empty."""
        if self.shard is None:
            return torch.arange(0)
        return (self.shard.holders(self.shape[self.shard.dim]) > 1).nonzero().flatten()


def has_shared_rows(placement: Placement) -> bool:
    """Whether several ranks hold some of the parameter's rows."""
    ranges = (
        sorted(of for held in placement.shard.ranges for of in held if of[0] < of[1])
        if placement.shard
        else []
    )
    return any(one[1] > other[0] for one, other in pairwise(ranges))


class ParallelModule(nn.Module):
    """A module that states the placement of every parameter it owns directly, in `placements`.

    Args:
        sequence: Whether it sees this rank's part of the sequence only, so that gradients of what
            it holds unsharded are partial sums.
    """

    def __init__(self, axis: Axis, sequence: bool = False):
        super().__init__()
        if not isinstance(axis, Axis):
            raise config_error(
                "axis",
                axis,
                "must be a hybridpar.Axis, an axis of the grid",
                "build.axis, or grid.tp",
            )
        self.axis = axis
        self._partial = (axis.name,) if sequence else ()
        self.placements: dict[str, Placement] = {}
        self._bindings: dict[str, ParameterBinding] = {}

    def bind_parameter(self, name: str, binding: ParameterBinding) -> None:
        """Use what the training state binds to a parameter from now on."""
        self._bindings[name] = binding

    def binding(self, name: str) -> ParameterBinding:
        """Return what the training state has bound to a parameter; nothing outside of training."""
        return self._bindings.get(name, UNBOUND)

    def add_parameter(
        self,
        name: str,
        placement: Placement,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the local part, uninitialised (see init.initialize), and record its placement.

        On an axis of size 1 nothing is split, so the placement has no shard there: a layer that is
        given such an axis inside a larger grid is replicated.
        """
        if self.axis.size == 1:
            placement = replace(placement, shard=None, partial=())
        elif self._partial and placement.shard is None:
            placement = replace(placement, partial=self._partial)
        shape = placement.local_shape(self.axis.rank)
        self.placements[name] = placement
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))


def named_placements(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield every parameter of `module` with its qualified name and placement.

    They come in the order of registration, tied ones once.

    Raises:
        AssertionError: No ParallelModule has placed a parameter (see
            `ParallelModule.add_parameter`).
    """
    seen: set[int] = set()
    for prefix, sub in module.named_modules():
        for name, parameter in sub.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{prefix}.{name}" if prefix else name
            assert name in getattr(sub, "placements", ()), (
                f"{full} has no placement: add it with add_parameter"
            )
            yield full, parameter, sub.placements[name]


@torch.no_grad()
def reduce_shared_gradients(grads: Iterable[tuple[Tensor, Placement]], axis: Axis) -> None:
    """Sum, in place, the gradients that are partial over the axis of a layer.

    These are the gradients of rows that several of its ranks hold, and of parameters that are
    partial over it (also of flat parts of these). Every rank then has equal bits.
    Call once a batch, with the gradients in the same order on every rank of `axis`.
    Collectives: one all-reduce of all such rows together for each dtype; none without such rows.
    """
    pieces: dict[torch.dtype, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    for grad, placement in grads:
        num_partial, local, slot = partial_rows(placement, axis.name, axis.rank)
        if num_partial:
            split = placement.shard if axis.name not in placement.partial else None
            rows = grad.movedim(split.dim, 0) if split else grad.view(1, -1)  # a view
            local = local.to(grad.device)
            slot = slot.to(grad.device)
            part = rows.new_zeros(num_partial, *rows.shape[1:])
            part[slot] = rows[local]
            pieces.setdefault(grad.dtype, []).append((rows, local, part, slot))
    for group in pieces.values():
        flat = all_reduce(torch.cat([part.flatten() for _, _, part, _ in group]), axis)
        totals = flat.split([part.numel() for _, _, part, _ in group])
        for (rows, local, part, slot), total in zip(group, totals, strict=True):
            rows[local] = total.view(part.shape)[slot]


@cache
def partial_rows(placement: Placement, axis: str, rank: int) -> tuple[int, Tensor, Tensor]:
    """Return the number of slices with partial gradients, and the slices of `rank`.

    For the latter: local indices, and positions among all of them. A parameter that is partial
    everywhere is one slice.
    """
    if axis in placement.partial:
        return 1, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    if placement.shard is None or placement.shard.axis != axis:
        return 0, torch.arange(0), torch.arange(0)
    shared = placement.shared_index()
    index = placement.shard.index(rank)
    local = torch.isin(index, shared).nonzero().flatten()
    return len(shared), local, torch.searchsorted(shared, index[local])
