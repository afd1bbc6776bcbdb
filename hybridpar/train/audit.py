"""Do the ranks that train the same parameters still hold the same bits?"""

from __future__ import annotations

from torch import Tensor

from hybridpar.checkpoint.shards import WEIGHTS
from hybridpar.comm import gather_objects
from hybridpar.grid import Axis
from hybridpar.optim import ParameterSlot
from hybridpar.state import audit_replicas, tp_replicas
from hybridpar.train.engine import Engine


def find_divergence(engine: Engine) -> str:
    """The first tensor that is not the same on all ranks that hold it, and whose it is; empty where all agree.

    Compared are hashes of the bits: over dp every version of the weights, and the master copy and the optimizer's state
    where they are not split (ZeRO); over tp what its ranks share; tied weights over the two ends of the pipeline.
    Collectives: on all ranks of the grid, its pipeline drained.
    """
    grid, mine = engine.grid, ""
    for axis, tensors in ((grid.dp, _over_dp(engine)), (grid.tp, _over_tp(engine)), (grid.ends, _tied(engine))):
        if (found := audit_replicas(tensors, axis)) is not None and not mine:
            mine = f"{found.name} of {_ranks(found.ranks, axis)} is not what {_ranks((found.first,), axis)} has"
    return next((text for text in gather_objects(mine, grid.world) if text), "")


def _over_dp(engine: Engine) -> dict[str, Tensor]:
    parts = engine.owned_parts()
    return {name: tensor for name, tensor in engine.state_tensors().items()
            if name.startswith(f"{WEIGHTS}/") or not _parameters(name) & parts.keys()}


def _parameters(name: str) -> set[str]:
    """Of which a tensor of the master copy or of the optimizer may be: its name with or without what follows a dot."""
    rest = name.partition("/")[2]
    return {rest, rest.rpartition(".")[0]}


def _over_tp(engine: Engine) -> dict[str, Tensor]:
    slots = [ParameterSlot(name, place, engine.grid.tp.rank) for name, place in engine.placements.items()]
    return {f"{WEIGHTS}/{version}/{name}": tensor for version in engine.weights.live_versions
            for name, tensor in tp_replicas(engine.weights.leaves_of(version), slots).items()}


def _tied(engine: Engine) -> dict[str, Tensor]:
    return {f"{WEIGHTS}/{version}/{engine.placements[name].tied}": leaf for version in engine.weights.live_versions
            for name, leaf in engine.weights.leaves_of(version).items() if engine.placements[name].tied}


def _ranks(of_axis: tuple[int, ...], axis: Axis) -> str:
    return f"rank {', '.join(str(axis.ranks[rank]) for rank in of_axis)}"
