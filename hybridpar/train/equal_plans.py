"""Replicas have equal plans, or their collectives would not meet: compared before the first batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from hybridpar import __version__
from hybridpar.comm import gather_objects
from hybridpar.pipeline.plan.action import Action
from hybridpar.train.engine import Engine
from hybridpar.train.errors import SetupError

_BATCHES, _MOST_ACTIONS = 4, 20_000
"""What of a plan is compared: it repeats itself after few batches."""


def require_equal_plans(engine: Engine) -> None:
    """Compares the plans of all replicas, and the moves in them where they share chunks (ZeRO-2 and 3).

    Collectives: one gather over the grid, where there are replicas.
    Raises: SetupError on all ranks alike, naming the first two that differ, and settings in which they do.
    """
    grid = engine.grid
    if grid.dp.size == 1:
        return
    first: dict[object, tuple[int, str, dict[str, Any]]] = {}
    place = grid.pp.rank, grid.tp.rank
    mine = place, grid.rank, plan_digest(engine), _settings(engine)
    for where, rank, digest, settings in gather_objects(mine, grid.world):
        other, its_digest, its_settings = first.setdefault(where, (rank, digest, settings))
        if digest == its_digest:
            continue
        apart = [f"{name} is {its_settings[name]!r} on rank {other} and {value!r} on rank {rank}"
                 for name, value in settings.items() if value != its_settings[name]]
        raise SetupError(
            f"ranks {other} and {rank} are replicas of each other and have different plans, so their collectives would "
            f"not meet: {'; '.join(apart) or 'their settings are equal, so start both with the same code'}")


def plan_digest(engine: Engine) -> str:
    """A short text that two plans have in common only where they are equal: of some batches, with what is gathered and
    summed in between, and the sizes of that."""
    actions: Iterable[Action] = engine.plan(_BATCHES)
    sizes: tuple[int, ...] = ()
    if engine.replicas is not None:
        actions, sizes = engine.replicas.items.moved(actions), tuple(engine.replicas.items.weights.num_bytes)
    digest = hashlib.sha256(repr(sizes).encode())
    for action in islice(actions, _MOST_ACTIONS):
        digest.update(f"{action};".encode())
    return digest.hexdigest()[:16]


def _settings(engine: Engine) -> dict[str, Any]:
    """Settings that plans follow from."""
    config = engine.config
    pipeline, memory = config.pipeline, config.memory
    return {
        "parallel.zero": config.parallel.zero, "pipeline.schedule": pipeline.schedule,
        "pipeline.num_microbatches": pipeline.num_microbatches, "pipeline.early_switch": pipeline.early_switch,
        "pipeline.split": list(pipeline.split), "pipeline.split_backward": pipeline.split_backward,
        "memory.parts": memory.parts, "memory.host_optimizer": memory.host_optimizer,
        "memory.offload_activations": memory.num_away, "train.dtype": config.train.dtype,
        "blocks of the model": config.model.num_blocks, "hybridpar": __version__}
