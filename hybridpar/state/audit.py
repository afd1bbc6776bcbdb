"""Compare the state of replicas bit by bit."""

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
    """A tensor on which replicas disagree.

    Attributes:
        name: Key of the tensor.
        ranks: Ranks of the axis that differ from the majority. If two groups are of equal size, the
            group with the lowest rank is the majority.
        first: A rank of the majority.
    """

    name: str
    ranks: tuple[int, ...]
    first: int


def find_divergence(
    tensors: Iterable[tuple[str, Tensor, ParameterSlot]],
    grid: ProcessGrid,
    read: Read = lambda tensor: tensor,
) -> str:
    """Return which tensor differs between ranks that hold copies of it, and on which ranks.

    Hashes of the bits are compared along every axis on which the parameter is replicated.

    Args:
        tensors: All kinds of state, from RankState.placed. The master copy and the optimizer state
            are compared only if replicas do not shard them (ZeRO).
        grid: The process grid. Collectives: on all ranks of the grid, with its pipeline drained.
        read: Returns a tensor's content.

    Returns:
        A description of the first tensor that differs; empty if all agree.
    """
    mine = ""
    held = list(tensors)
    lines = {name: grid.axis(name) for name in grid.sizes if name != "pp"} | {
        "pp": grid.embedding_group
    }
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
    """Return the first tensor, by name, that differs between ranks of the axis that pass it.

    `tensors` is the result of `replicas_along` for that axis. Compares dtype, shape and a hash of
    the bits: a difference in one element is always found, any other difference is missed with a
    probability of about 2**-64. All ranks return the same.

    Collectives: one gather_objects of some 100 bytes for each tensor, even if there are no tensors.
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
    """Return the tensors that must be equal on the ranks along an axis.

    Rows that several ranks share are named 'name[start:stop]'. Along pp, tied parameters are named
    by their common name, because each stage has its own name for them.

    Args:
        tensors: Key, tensor, and the slot that says which part of the parameter this rank has.
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
    """Return a hash of the bits of `x` in order: an int64 scalar on its device.

    The hash is the sum, modulo 2**64, of every element's bits times an odd weight of its position:
    changing one element by d changes the sum by d times an odd number, which is 0 only if d is.
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
