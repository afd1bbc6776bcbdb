"""Compares replicas, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm.collectives import gather_objects
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn.placement import has_shared_rows
from hybridpar.optim.slots import ParameterSlot

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
_CHUNK = 1 << 20  # elements hashed at a time: 8 MiB of int64
_MULTIPLIERS = (0x9E3779B97F4A7C15 - 2**64, 0x3F58476D1CE4E5B9)

Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that replicas disagree on: its name, and the ranks of the axis that differ from the
    majority (of equal groups, the one with the first rank); `first`: a rank of the majority."""

    name: str
    ranks: tuple[int, ...]
    first: int

    def __str__(self) -> str:
        return (
            f"{self.name} on ranks {', '.join(map(str, self.ranks))} differs from that on rank "
            f"{self.first}"
        )


def find_divergence(
    tensors: Iterable[tuple[str, Tensor, ParameterSlot]],
    grid: ProcessGrid,
    read: Read = lambda tensor: tensor,
) -> str:
    """The first tensor that is not the same on all ranks that hold it, and which ranks differ;
    empty if all agree.

    Hashes of the bits are compared along every axis on which the parameter is a copy. `tensors`:
    all kinds of state, from RankState.placed; master copy and optimizer state only where replicas
    do not share them out (ZeRO). `read`: gives a tensor's content. Collectives: on all ranks of the
    grid, its pipeline drained.
    """
    mine = ""
    held = list(tensors)
    lines = {name: grid.axis(name) for name in grid.sizes if name != "pp"} | {"pp": grid.ends}
    for name, axis in lines.items():
        if (
            found := audit_replicas(replicas_along(name, held), axis, read)
        ) is not None and not mine:
            mine = (
                f"{found.name} of {_ranks(found.ranks, axis)} is not what "
                f"{_ranks((found.first,), axis)} has"
            )
    return next((text for text in gather_objects(mine, grid.world) if text), "")


def _ranks(of_axis: tuple[int, ...], axis: Axis) -> str:
    return f"rank {', '.join(str(axis.ranks[rank]) for rank in of_axis)}"


def audit_replicas(
    tensors: Mapping[str, Tensor], axis: Axis, read: Read = lambda tensor: tensor
) -> Mismatch | None:
    """The first tensor, by name, that is not the same on all ranks of the axis that pass one of
    that name.

    Pass it the `replicas_along` that axis. Compares dtype, shape and a hash of the bits: a
    difference in one element is always found, any other one is missed with odds of about 2**-64.
    All ranks return the same.
    Collectives: one gather_objects of some 100 bytes for each tensor; also with no tensors.
    """
    if axis.size == 1:
        return None
    mine = {
        name: (int(bit_hash(read(x))), str(x.dtype), tuple(x.shape)) for name, x in tensors.items()
    }
    everyone = gather_objects(mine, axis)
    for name in sorted({name for held in everyone for name in held}):
        holders = [rank for rank, held in enumerate(everyone) if name in held]
        counts = Counter(everyone[rank][name] for rank in holders)
        usual = max(counts, key=counts.__getitem__)  # of equal ones the first
        if differing := tuple(rank for rank in holders if everyone[rank][name] != usual):
            return Mismatch(
                name, differing, next(rank for rank in holders if everyone[rank][name] == usual)
            )
    return None


def replicas_along(
    axis: str, tensors: Iterable[tuple[str, Tensor, ParameterSlot]]
) -> dict[str, Tensor]:
    """Tensors that must be equal on the ranks along an axis; rows that several ranks share as
    'name[start:stop]'.

    `tensors`: names, with this rank's part of the parameter of each slot. Tied parameters have
    different names, so along pp their common one is used.
    """
    held: dict[str, Tensor] = {}
    for name, tensor, slot in tensors:
        shard = slot.placement.shard
        if slot.is_copy_along(axis):
            held[name.replace(slot.name, slot.placement.tied) if axis == "pp" else name] = tensor
        elif shard is not None and shard.axis == axis and has_shared_rows(slot.placement):
            holders = shard.holders(slot.placement.shape[shard.dim])
            index = shard.index(slot.rank)
            for start, stop in slot.segments:
                first = int(index[start])
                if holders[first] > 1:
                    held[f"{name}[{first}:{first + stop - start}]"] = tensor.narrow(
                        shard.dim, start, stop - start
                    )
    return held


@torch.no_grad()
def bit_hash(x: Tensor) -> Tensor:
    """A hash of the bits of `x` in order; int64 scalar on its device.

    The sum, modulo 2**64, of every element's bits times an odd weight of its position: changing one
    element by d changes the sum by d times an odd number, which is 0 only if d is.
    """
    bits = x.contiguous().view(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        weights = torch.arange(start, start + part.numel(), device=x.device).mul_(_MULTIPLIERS[0])
        weights ^= weights >> 29
        weights.mul_(_MULTIPLIERS[1])
        weights ^= weights >> 32
        total += weights.bitwise_or_(1).mul_(part).sum()
    return total
