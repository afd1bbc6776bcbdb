"""Do the ranks that train the same parameters still hold the same bits?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hybridpar.comm import gather_objects
from hybridpar.grid import Axis
from hybridpar.optim import ParameterSlot
from hybridpar.state import audit_replicas, tp_replicas
from hybridpar.state.kinds import StateKind
from hybridpar.train.engine import Engine


def find_divergence(engine: Engine) -> str:
    """The first tensor that is not the same on all ranks that hold it, and whose it is; empty where all agree.

    Compared are hashes of the bits of all kinds of state: over dp those that are not split (ZeRO); of whole parameters
    over tp what its ranks share, and tied ones over the two ends of the pipeline.
    Collectives: on all ranks of the grid, its pipeline drained.
    """
    grid, mine = engine.grid, ""
    over_dp = engine.state.replicated()
    for axis, tensors in ((grid.dp, over_dp), (grid.tp, _over_tp(engine)), (grid.ends, _tied(engine))):
        if (found := audit_replicas(tensors, axis)) is not None and not mine:
            mine = f"{found.name} of {_ranks(found.ranks, axis)} is not what {_ranks((found.first,), axis)} has"
    return next((text for text in gather_objects(mine, grid.world) if text), "")


def _over_tp(engine: Engine) -> dict[str, Tensor]:
    slots = [ParameterSlot(name, place, engine.grid.tp.rank) for name, place in engine.state.placements.items()]
    return {kind.key(name, what): tensor for kind, what, tensors in _whole(engine)
            for name, tensor in tp_replicas(tensors, slots).items()}


def _tied(engine: Engine) -> dict[str, Tensor]:
    placements = engine.state.placements
    return {kind.key(placements[name].tied, what): tensor for kind, what, tensors in _whole(engine)
            for name, tensor in tensors.items() if placements[name].tied}


def _whole(engine: Engine) -> Iterator[tuple[StateKind, str, dict[str, Tensor]]]:
    """The saved tensors of whole local parameters, by kind and by `what`."""
    return ((kind, what, tensors) for kind in engine.state.kinds if kind.saved and kind.whole
            for what, tensors in kind.by_parameter().items())


def _ranks(of_axis: tuple[int, ...], axis: Axis) -> str:
    return f"rank {', '.join(str(axis.ranks[rank]) for rank in of_axis)}"
