"""Measures what moves a rank's state, on all ranks of a job at the same time: they share memory and the disk."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

from hybridpar.comm import barrier, gather_objects
from hybridpar.config import Config
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis
from hybridpar.planner.profile import StateSpeeds
from hybridpar.state.store import DiskStore
from hybridpar.state.tiered import folder_to_measure
from hybridpar.state.tiers import Region
from hybridpar.train.host_forecast import host_speeds

_FILE_BYTES, _QUICK_FILE_BYTES = 64 << 20, 16 << 20
_REPEATS = 3


def measure_state(config: Config, world: Axis, *, quick: bool) -> StateSpeeds:
    """Means over the ranks. Collectives: on all ranks of the job."""
    barrier(world)
    host = host_speeds(config) if config.optim.name != "lamb" else (0.0, 0.0)  # which hosts do not update
    barrier(world)
    file = _file_speeds(folder_to_measure(config), _QUICK_FILE_BYTES if quick else _FILE_BYTES)
    everyone = gather_objects((*host, *file), world)
    return StateSpeeds(*(fmean(speeds) for speeds in zip(*everyone, strict=True)))


def _file_speeds(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes read and written in a second, an item of so many at a time; zeros where there is no room."""
    region = Region(num_bytes)
    try:
        store = DiskStore(folder, [num_bytes])
    except HybridparError:
        return 0.0, 0.0
    read, written = [], []
    try:
        for _ in range(_REPEATS):
            region.tensor.fill_(1)
            start = time.perf_counter()
            store.write(0, region.view)
            written.append(time.perf_counter() - start)
            region.give_back()
            start = time.perf_counter()
            store.read(0, region.view)
            read.append(time.perf_counter() - start)
    except HybridparError:
        return 0.0, 0.0
    finally:
        store.close()
    return num_bytes / sorted(read)[_REPEATS // 2], num_bytes / sorted(written)[_REPEATS // 2]
