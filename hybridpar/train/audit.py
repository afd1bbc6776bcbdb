"""Comparison of what the ranks of a grid hold in common while they train."""

from __future__ import annotations

from hybridpar.comm import gather_objects
from hybridpar.grid import Axis
from hybridpar.state import audit_replicas, replicas_along
from hybridpar.train.engine import Engine


def find_divergence(engine: Engine) -> str:
    """The first tensor that is not the same on all ranks that hold it, and whose it is; empty where all agree.

    Compared are hashes of the bits of all kinds of state, along every axis on which the parameter is a copy: every
    version of the weights; the master copy and the optimizer's state where they are not shared out (ZeRO).
    Collectives: on all ranks of the grid, its pipeline drained.
    """
    grid, mine, tensors = engine.grid, "", list(engine.state.placed())
    lines = {name: grid.axis(name) for name in grid.sizes if name != "pp"} | {"pp": grid.ends}
    for name, axis in lines.items():
        if (found := audit_replicas(replicas_along(name, tensors), axis)) is not None and not mine:
            mine = f"{found.name} of {_ranks(found.ranks, axis)} is not what {_ranks((found.first,), axis)} has"
    return next((text for text in gather_objects(mine, grid.world) if text), "")




def _ranks(of_axis: tuple[int, ...], axis: Axis) -> str:
    return f"rank {', '.join(str(axis.ranks[rank]) for rank in of_axis)}"
