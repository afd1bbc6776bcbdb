"""Hidden matrices that are split over tp: the part of each rank, gathering and scattering.

A matrix is orthogonalised on one rank, its home, and not split over tp: every rank is home to its
share of them. That takes one message there and one back, each the size of a rank's part, and no
operation is done twice. (If it stayed split, it would take an all-reduce of the Gram matrix of its
unsplit side in each of the five steps: for the usual 4:1 matrices 1.25 tp times the traffic, and
the arithmetic on Gram matrices repeated on every rank.) The result equals tp = 1 bit for bit, and
all holders of a row receive the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybridpar.comm.collectives import all_to_all
from hybridpar.grid import Axis
from hybridpar.nn.placement import Placement, Range, indices
from hybridpar.optim.newton_schulz import newton_schulz_cost
from hybridpar.optim.slots import ParameterSlot

Slices = tuple[slice, slice]

ROUND = 1 << 24
"""Elements of the matrices that a rank is home to at a time; bounds the memory of
orthogonalisation."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a matrix that a tp rank holds: its place in a slot's local tensor, and in the
    matrix.

    Attributes:
        counted: Whether this rank contributes it to the full matrix; exactly one holder does.
    """

    slot: int
    local: Slices
    place: Slices
    counted: bool


@dataclass(frozen=True, slots=True)
class HiddenMatrix:
    """A matrix: its shape, and the blocks that each tp rank holds of it."""

    shape: tuple[int, int]
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def cost(self) -> int:
        return newton_schulz_cost(*self.shape)

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices that travel together, each with the tp rank that is its home."""

    matrices: tuple[HiddenMatrix, ...]
    homes: tuple[int, ...]

    def at_home(self, rank: int) -> list[HiddenMatrix]:
        return [m for m, home in zip(self.matrices, self.homes, strict=True) if home == rank]


def hidden_matrices(slots: Sequence[ParameterSlot], num_ranks: int) -> list[HiddenMatrix]:
    """Return all matrices that the placements of `slots` name, in order."""
    found = []
    for i, slot in enumerate(slots):
        placement = slot.placement
        assert len(placement.shape) == 2, f"{slot.name}: {placement.shape} is no matrix"
        covered = sum(b - a for ranges in placement.matrices for a, b in ranges)
        assert covered == placement.shape[0], (
            f"{slot.name}: its matrices have {covered} rows, it {placement.shape[0]}"
        )
        for ranges in placement.matrices:
            shape = (sum(b - a for a, b in ranges), placement.shape[1])
            found.append(
                HiddenMatrix(
                    shape, tuple(_blocks(i, placement, ranges, r) for r in range(num_ranks))
                )
            )
    return found


def plan_rounds(
    matrices: Sequence[HiddenMatrix], num_ranks: int, max_elements: int = ROUND
) -> list[Round]:
    """Return rounds of about `max_elements` a rank.

    The largest matrices come first, and each is sent to the rank with the least to do.
    """
    ordered = sorted(matrices, key=lambda m: (-m.cost, m.shape))  # stable: equal on all ranks
    rounds: list[Round] = []
    while ordered:
        count = numel = 0
        while count < len(ordered) and (
            count < num_ranks or numel + ordered[count].numel <= max_elements * num_ranks
        ):
            numel += ordered[count].numel
            count += 1
        loads = [0] * num_ranks
        homes = []
        for matrix in ordered[:count]:
            home = min(range(num_ranks), key=loads.__getitem__)
            loads[home] += matrix.cost
            homes.append(home)
        rounds.append(Round(tuple(ordered[:count]), tuple(homes)))
        ordered = ordered[count:]
    return rounds


def gather(round_: Round, held: Sequence[Tensor], axis: Axis, dtype: torch.dtype) -> list[Tensor]:
    """Return the full matrices that this rank is home to, in `dtype`.

    Args:
        held: The local tensors by slot.

    Collectives: one all-to-all.
    """
    mine = round_.at_home(axis.rank)
    ranks = range(axis.size)
    whole = [held[0].new_empty(m.shape, dtype=dtype) for m in mine]
    sources = [
        [held[b.slot][b.local] for m in round_.at_home(r) for b in m.blocks[axis.rank] if b.counted]
        for r in ranks
    ]
    targets = [
        [x[b.place] for x, m in zip(whole, mine, strict=True) for b in m.blocks[r] if b.counted]
        for r in ranks
    ]
    _exchange(sources, targets, axis, dtype)
    return whole


def scatter(
    round_: Round, whole: Sequence[Tensor], held: Sequence[Tensor], axis: Axis, dtype: torch.dtype
) -> None:
    """Write the matrices that this rank is home to into the local tensors of all who hold parts
    of them.

    Collectives: one all-to-all.
    """
    mine = round_.at_home(axis.rank)
    ranks = range(axis.size)
    sources = [
        [x[b.place] for x, m in zip(whole, mine, strict=True) for b in m.blocks[r]] for r in ranks
    ]
    targets = [
        [held[b.slot][b.local] for m in round_.at_home(r) for b in m.blocks[axis.rank]]
        for r in ranks
    ]
    _exchange(sources, targets, axis, dtype)


def _exchange(
    sources: list[list[Tensor]], targets: list[list[Tensor]], axis: Axis, dtype: torch.dtype
) -> None:
    """Copy sources[r] of this rank into targets[this rank] of each rank r, tensor by tensor."""
    for target, source in zip(targets[axis.rank], sources[axis.rank], strict=True):
        target.copy_(source)
    if axis.size == 1:
        return
    others = [r for r in range(axis.size) if r != axis.rank]
    send_sizes, receive_sizes = (
        [0 if r == axis.rank else sum(x.numel() for x in parts[r]) for r in range(axis.size)]
        for parts in (sources, targets)
    )
    device = next(x.device for parts in (*sources, *targets) for x in parts)
    outgoing = torch.empty(sum(send_sizes), dtype=dtype, device=device)
    sent = [x for r in others for x in sources[r]]
    for part, source in zip(outgoing.split([x.numel() for x in sent]), sent, strict=True):
        part.view(source.shape).copy_(source)
    received = all_to_all(outgoing, axis, send_sizes, receive_sizes)
    awaited = [x for r in others for x in targets[r]]
    for part, target in zip(received.split([x.numel() for x in awaited]), awaited, strict=True):
        target.copy_(part.view(target.shape))


def _blocks(
    slot: int, placement: Placement, ranges: Sequence[Range], rank: int
) -> tuple[Block, ...]:
    """Return tp rank `rank`'s blocks of the matrix that `ranges` of global rows make up."""
    shard = placement.shard
    sizes = placement.shape
    place = torch.full((sizes[0],), -1, dtype=torch.int64)
    place[indices(ranges)] = torch.arange(sum(b - a for a, b in ranges))
    lines = [
        (line, torch.ones(len(line), dtype=torch.bool)) for line in (place, torch.arange(sizes[1]))
    ]
    if shard is None:
        lines[0][1].fill_(rank == 0)
    else:
        lines[shard.dim] = (
            lines[shard.dim][0][shard.index(rank)],
            shard.owned(rank, sizes[shard.dim]),
        )
    rows, cols = (_runs(*line) for line in lines)
    return tuple(
        Block(slot, (a, c), (b, d), counts_row and counts_col)
        for a, b, counts_row in rows
        for c, d, counts_col in cols
    )


def _runs(place: Tensor, counted: Tensor) -> list[tuple[slice, slice, bool]]:
    """Split a line of places (-1: none) into runs of consecutive ones.

    Returns:
        Local positions, places, and whether they are counted, for each run.
    """
    local = (place >= 0).nonzero().flatten()
    place = place[local]
    counted = counted[local]
    breaks = (place.diff() != 1) | (local.diff() != 1) | counted.diff()
    edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(local)]
    return [
        (
            slice(int(local[a]), int(local[a]) + b - a),
            slice(int(place[a]), int(place[a]) + b - a),
            bool(counted[a]),
        )
        for a, b in pairwise(edges)
        if a < b
    ]
