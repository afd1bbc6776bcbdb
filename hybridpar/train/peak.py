"""The arithmetic that a job's processes reach together in matrix products, which MFU is a share of.

    <data folder>/peaks.json    {"host, device, dtype, processes, threads": FLOP/s}

A peak that was measured while other programs ran is too low, so the largest that was seen counts: a new run measures
again, a run that goes on takes what is known, and steps that pass it raise it.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from hybridpar.checkpoint import json_values as plain
from hybridpar.checkpoint.files import write_text
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.cpu import cpu_name
from hybridpar.grid import Axis
from hybridpar.reading import read_limited
from hybridpar.train.metrics import peak_flops

PEAKS = "peaks.json"
_MAX_BYTES = 1 << 20
_STEPS = 5
"""The median of so many steps counts: one step may seem short because the one before it was long."""


class Peak:
    """`flops`: the peak, in FLOP/s; `source`: where it comes from. `say` is told once if it was too low."""

    def __init__(self, flops: float, source: str, path: Path, key: str, say: Callable[[str], None]):
        self.flops, self.source = flops, source
        self._path, self._key, self._say = path, key, say
        self._reached: deque[float] = deque(maxlen=_STEPS)
        self._said = False

    @staticmethod
    def of(config: Config, device: torch.device, world: Axis, say: Callable[[str], None], *, goes_on: bool) -> Peak:
        """The peak of a job. Collectives: on all ranks of the job."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        key = (f"{platform.node()}, {name}, {config.train.dtype}, {world.size} processes, "
               f"{torch.get_num_threads()} threads")
        path = config.cache_folder / PEAKS
        known = gather_objects(read_peaks(path).get(key, 0.0) if world.rank == 0 else 0.0, world)[0]
        source = (f"{config.train.dtype} matrix products, the fastest seen here on {world.size} "
                  f"process{'es at once' * (world.size > 1)}")
        if not (known and goes_on) or device.type == "cuda":  # whose data sheet takes no time
            measured, from_where = peak_flops(config, device, world)
            if measured >= known:
                known, source = measured, from_where
        peak = Peak(known, source, path, key, say)
        if world.rank == 0:
            peak._keep()
        return peak

    def share(self, flops: float) -> float:
        """The part of the peak that a step of so many FLOP/s is; to be called for step after step."""
        self._reached.append(flops)
        reached = median(self._reached)
        if len(self._reached) == _STEPS and reached > self.flops:
            if not self._said:
                self._say(f"MFU: steps reach {reached / 1e9:,.0f} GFLOP/s, so the peak of {self.flops / 1e9:,.0f} was "
                          "measured too low (other programs ran?); raised")
            self.flops, self._said = reached, True
            self._keep()
        return flops / self.flops

    def _keep(self) -> None:
        """Where the folder cannot be written to, the next run measures again."""
        known = read_peaks(self._path)
        if self.flops > known.get(self._key, 0.0):
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._path, json.dumps(known | {self._key: self.flops}, indent=1) + "\n")


def read_peaks(path: Path) -> dict[str, float]:
    """Known peaks by machine and job; none where the file is not there, or holds something else."""
    try:
        found = plain.mapping(plain.parse(read_limited(path, _MAX_BYTES)), path.name)
        return {key: flops for key, value in found.items() if (flops := plain.number(value, key)) > 0}
    except (OSError, ValueError):
        return {}
