"""What ranks must have in common, or they would train nonsense, or their collectives not meet:
settings and data, which are compared as they start, and the plans of replicas, before the first
batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import islice

from hybridpar import __version__
from hybridpar.comm import gather_objects
from hybridpar.config import Config, ModelSpec, to_mapping
from hybridpar.data import Data
from hybridpar.errors import DataError, HybridparError, config_error
from hybridpar.schedules.action import Action
from hybridpar.train.engine import Engine
from hybridpar.train.faults.errors import SetupError
from hybridpar.train.launch import Job

_BATCHES = 4
_MOST_ACTIONS = 20_000
"""What of a plan is compared: it repeats itself after few batches."""

_OWN_SECTIONS = ("data", "faults", "kernels", "plan", "run")
_OWN = {
    "memory.budget",
    "memory.folder",
    "train.log_interval",
    "train.start_from",
    "train.stop_signals",
    "train.threads",
    "train.timeout_s",
}
"""Settings that each machine may have its own of. What data are, not where, is compared when they
are open."""


def require_equal_settings(config: Config, job: Job) -> None:
    """Compares the settings of all processes with those of the first. Raises: HybridparError on
    all, naming each."""
    mine = {"hybridpar": __version__, "run.name": config.run.name} | {
        f"{section}.{key}": value
        for section, table in to_mapping(config).items()
        if section not in _OWN_SECTIONS
        for key, value in table.items()
        if f"{section}.{key}" not in _OWN
    }
    mine = json.loads(json.dumps(mine))
    first = job.decide(lambda: mine)

    def compare() -> None:
        apart = [
            f"{key} is {mine.get(key)!r} here and {first.get(key)!r} on rank 0"
            for key in first | mine
            if first.get(key) != mine.get(key)
        ]
        if apart:
            raise HybridparError(
                f"{', '.join(apart)}; all ranks must run the same version with the same file "
                f"and flags"
            )

    job.together(compare)


def require_equal_start(model: ModelSpec, job: Job, *, resumes: bool) -> None:
    """Compares the weights of modules that the program has made on all processes with those of the
    first.

    They are compared and not sent, because processes that draw other weights draw other samples,
    too, if these are random: the program lacks a seed.

    Raises: HybridparError on all.
    """
    mine = model.start_checksum(resumes=resumes)
    if not mine:
        return
    first = job.decide(lambda: mine)

    def compare() -> None:
        if mine != first:
            rule = (
                "the weights or buffers differ from those on rank 0; all ranks must start "
                "from equal weights"
            )
            raise config_error(
                "modules", "..", rule, "torch.manual_seed(0) before the modules are made"
            )

    job.together(compare)


def require_equal_data(data: Data, job: Job) -> None:
    """Compares the samples of all processes with those of the first. Raises: HybridparError on
    all."""
    mine = {"train": data.train.fingerprint} | {
        f"valid {name}".rstrip(): samples.fingerprint for name, samples in data.valid.items()
    }
    first = job.decide(lambda: mine)

    def compare() -> None:
        if list(mine) != list(first):
            raise DataError(
                f"the data sets are {', '.join(mine)} here and {', '.join(first)} on rank 0: "
                f"all ranks must have the same validation sets, in the same order"
            )
        for part, fingerprint in mine.items():
            if fingerprint != first[part]:
                raise DataError(
                    f"the samples of {part} do not match rank 0's (fingerprint {fingerprint}, "
                    f"on rank 0 {first[part]}): data.corpus and data.split must be the same on "
                    f"all machines"
                )

    job.together(compare)


def require_equal_plans(engine: Engine) -> None:
    """Compares the plans of all replicas, and the moves in them where they share chunks (ZeRO-2 and
    3).

    Collectives: one gather over the grid, where there are replicas.
    Raises: SetupError on all ranks alike, naming the first two that differ.
    """
    grid = engine.grid
    if grid.dp.size == 1:
        return
    first: dict[object, tuple[int, str]] = {}
    mine = (grid.pp.rank, grid.tp.rank), grid.rank, plan_digest(engine)
    for where, rank, digest in gather_objects(mine, grid.world):
        other, its_digest = first.setdefault(where, (rank, digest))
        if digest != its_digest:
            raise SetupError(
                f"ranks {other} and {rank} are replicas of each other but have different plans, "
                f"so their collectives would not match: they must have the same memory.budget "
                f"and run the same code"
            )


def plan_digest(engine: Engine) -> str:
    """A short text that two plans have in common only where they are equal: of some batches, with
    what is gathered and summed in between, and the sizes of that."""
    actions: Iterable[Action] = engine.plan(_BATCHES)
    sizes: tuple[int, ...] = ()
    if engine.replicas is not None:
        actions = engine.replicas.items.moved(actions)
        sizes = tuple(engine.replicas.items.weights.num_bytes)
    digest = hashlib.sha256(repr(sizes).encode())
    for action in islice(actions, _MOST_ACTIONS):
        digest.update(f"{action};".encode())
    return digest.hexdigest()[:16]
