"""Measures what moves a rank's state, on all ranks of a job at the same time: they share memory and the disk."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean, median

from hybridpar.comm import barrier, gather_objects
from hybridpar.config import Config
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis
from hybridpar.planner.profile import StateSpeeds
from hybridpar.state.pages import Region
from hybridpar.state.store import DiskStore
from hybridpar.state.tiered import folder_to_measure
from hybridpar.train.host_forecast import host_speeds

_FILE_BYTES, _QUICK_FILE_BYTES = 64 << 20, 16 << 20
_REPEATS = 3
_GIB = 1 << 30


def measure_state(config: Config, world: Axis, *, quick: bool) -> StateSpeeds:
    """Means over the ranks. Collectives: on all ranks of the job."""
    barrier(world)
    host = host_speeds(config) if config.optim.name != "lamb" else (0.0, 0.0)  # which hosts do not update
    barrier(world)
    file = _file_speeds(folder_to_measure(config), _QUICK_FILE_BYTES if quick else _FILE_BYTES)
    everyone = gather_objects((*host, *file), world)
    return StateSpeeds(*(fmean(speeds) for speeds in zip(*everyone, strict=True)))


def _file_speeds(folder: Path, num_bytes: int) -> tuple[float, float, float, float]:
    """Bytes read and written in a second, an item of so many at a time, and the CPU time of a GiB of each; zeros where
    there is no room."""
    region, store = Region(num_bytes), None
    taken: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
    try:
        store = DiskStore(folder, [num_bytes])
        for _ in range(_REPEATS):
            region.tensor.fill_(1)
            for what, move in (("write", store.write), ("read", store.read)):
                start, used = time.perf_counter(), time.process_time()
                move(0, region.view)
                taken[what].append((time.perf_counter() - start, time.process_time() - used))
    except HybridparError:
        return 0.0, 0.0, 0.0, 0.0
    finally:
        if store is not None:
            store.close()
    (read, read_work), (write, write_work) = (map(median, zip(*taken[what], strict=True)) for what in taken)
    return num_bytes / read, num_bytes / write, read_work * _GIB / num_bytes, write_work * _GIB / num_bytes
