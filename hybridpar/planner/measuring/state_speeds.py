"""Measure transfers of a rank's state, on all ranks of a job at the same time, because they share
memory and the disk."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean, median

from hybridpar.comm import barrier, gather_objects
from hybridpar.config import Config
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis
from hybridpar.planner.measuring.overlap_bench import measure_beside
from hybridpar.planner.measuring.profile import StateSpeeds
from hybridpar.state.residency.pages import Region
from hybridpar.state.residency.store import DiskStore
from hybridpar.state.residency.tiered import folder_to_measure
from hybridpar.train.forecasts.host_forecast import host_speeds

_FILE_BYTES = 64 << 20
_QUICK_FILE_BYTES = 16 << 20
_REPEATS = 3


def measure_state(config: Config, world: Axis, *, quick: bool) -> StateSpeeds:
    """Return the speeds as means over the ranks. Collectives: on all ranks of the job."""
    folder = folder_to_measure(config)
    barrier(world)
    host = (
        host_speeds(config) if config.optim.name != "lamb" else (0.0, 0.0)
    )  # optimizers that hosts cannot run have no speed
    barrier(world)
    file = _file_speeds(folder, _QUICK_FILE_BYTES if quick else _FILE_BYTES)
    everyone = gather_objects((*host, *file), world)
    beside = measure_beside(config, world, folder, quick=quick)
    return StateSpeeds(
        *(fmean(speeds) for speeds in zip(*everyone, strict=True)),
        *(beside.get(what) for what in ("reads", "writes", "gathers", "sums")),
    )


def _file_speeds(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return bytes read and written per second, in items of `num_bytes`; zeros if there is no
    room."""
    region = Region(num_bytes)
    store = None
    taken: dict[str, list[float]] = {"read": [], "write": []}
    try:
        store = DiskStore(folder, [num_bytes])
        for _ in range(_REPEATS):
            region.tensor.fill_(1)
            for what, move in (("write", store.write), ("read", store.read)):
                start = time.perf_counter()
                move(0, region.view)
                taken[what].append(time.perf_counter() - start)
    except HybridparError:
        return 0.0, 0.0
    finally:
        if store is not None:
            store.close()
    return num_bytes / median(taken["read"]), num_bytes / median(taken["write"])
