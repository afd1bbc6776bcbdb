"""Comparison of what the ranks of a grid hold in common while they train."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hybridpar.checkpoint.shards import WEIGHTS
from hybridpar.comm import gather_objects
from hybridpar.grid import Axis
from hybridpar.optim import ParameterSlot
from hybridpar.state import audit_replicas, replicas_along
from hybridpar.train.engine import Engine


def find_divergence(engine: Engine) -> str:
    """The first tensor that is not the same on all ranks that hold it, and whose it is; empty where all agree.

    Compared are hashes of the bits of every tensor of the state, along every axis on which its parameter is a copy:
    every version of the weights; the master copy and the optimizer's state where they are not shared out (ZeRO).
    Collectives: on all ranks of the grid, its pipeline drained.
    """
    grid, mine, tensors = engine.grid, "", list(_tensors(engine))
    lines = {name: grid.axis(name) for name in grid.sizes if name != "pp"} | {"pp": grid.ends}
    for name, axis in lines.items():
        if (found := audit_replicas(replicas_along(name, tensors), axis)) is not None and not mine:
            mine = f"{found.name} of {_ranks(found.ranks, axis)} is not what {_ranks((found.first,), axis)} has"
    return next((text for text in gather_objects(mine, grid.world) if text), "")


def _tensors(engine: Engine) -> Iterator[tuple[str, Tensor, ParameterSlot]]:
    """Tensors of the state by name, with the slot of what this rank has of the parameter."""
    whole = {name: ParameterSlot(name, place, engine.grid.place) for name, place in engine.placements.items()}
    owned = {slot.name: slot for slot in engine.slots}
    for name, tensor in engine.state_tensors().items():
        kind, _, rest = name.partition("/")
        if kind == WEIGHTS:
            yield name, tensor, whole[rest.partition("/")[2]]
        else:
            yield name, tensor, owned[rest] if rest in owned else owned[rest.rpartition(".")[0]]


def _ranks(of_axis: tuple[int, ...], axis: Axis) -> str:
    return f"rank {', '.join(str(axis.ranks[rank]) for rank in of_axis)}"
