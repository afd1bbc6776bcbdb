"""Check that ranks agree on settings, data and plans.

Otherwise they would train nonsense, or their collectives would not match. Settings and data are
compared at the start, plans of replicas before the first batch.
"""

from __future__ import annotations

import hashlib
import json
from itertools import islice

from hybridpar import __version__
from hybridpar.comm import gather_objects
from hybridpar.config import Config, ModelSpec, to_mapping
from hybridpar.data import Data
from hybridpar.errors import DataError, HybridparError, config_error
from hybridpar.schedules.passes.residency import add_residency
from hybridpar.train.engine import Engine
from hybridpar.train.faults.errors import SetupError
from hybridpar.train.launching.launch import Job

_BATCHES = 4
_MOST_ACTIONS = 20_000
"""Number of batches and actions of a plan that are compared; a plan repeats after few batches."""

_OWN_SECTIONS = ("data", "faults", "kernels", "plan", "run")
_OWN = {
    "memory.budget",
    "memory.limit",
    "memory.folder",
    "train.log_interval",
    "train.start_from",
    "train.stop_signals",
    "train.threads",
    "train.timeout_s",
}
"""Settings that may differ between machines. Data are compared by content when they are open, so
their paths may differ."""


def require_equal_settings(config: Config, job: Job) -> None:
    """Compare the settings of all processes with rank 0's.

    Raises: HybridparError on all processes, naming each setting that differs.
    """
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
    """Compare the initial weights of the program's own modules with rank 0's.

    Differing weights are refused rather than broadcast: they mean that the program did not seed its
    generators, so its random samples differ between processes too.

    Raises: HybridparError on all processes.
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
    """Compare the samples of all processes with rank 0's. Raises: HybridparError on all."""
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
    """Compare the plans of all replicas, with the gathers and releases of ZeRO-2 and ZeRO-3.

    Collectives: one gather over the grid, if there are replicas.
    Raises: SetupError on all ranks, naming the first two ranks that differ.
    """
    grid = engine.grid
    if grid.dp_cp.size == 1:
        return
    first: dict[object, tuple[int, str]] = {}
    mine = (grid.pp.rank, grid.tp.rank), grid.rank, plan_digest(engine)
    for where, rank, digest in gather_objects(mine, grid.world):
        other, its_digest = first.setdefault(where, (rank, digest))
        if digest != its_digest:
            raise SetupError(
                f"ranks {other} and {rank} are replicas of each other but have different plans, "
                f"so their collectives would not match: they must run the same code"
            )


def plan_digest(engine: Engine) -> str:
    """Return a digest of a rank's plan for a few batches.

    It includes gathers and releases of sharded chunks, and the sizes of these. Moves between tiers
    are left out: they are no collectives, and replicas may own unequal shards and have unequal
    memory.
    """
    accesses = engine.moves.accesses
    actions = add_residency(engine.plan(_BATCHES), accesses.sharded_pools())
    sizes = [chunk.num_bytes for chunk in accesses.chunks]
    digest = hashlib.sha256(repr(sizes).encode())
    for action in islice(actions, _MOST_ACTIONS):
        digest.update(f"{action};".encode())
    return digest.hexdigest()[:16]
