"""Peak FLOP/s of a job's processes together in matrix products, the reference of MFU.

A measurement is too low if other programs ran. So the fastest of many short products counts, and
steps that exceed the peak raise it.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable
from statistics import harmonic_mean

import torch

from hybridpar.comm import all_reduce, barrier
from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.models.build import DTYPES
from hybridpar.nn import matmul

_STEPS = 5
"""Number of steps that raise the peak together: one step may seem short because the one before it
was long."""
_PROBE_SIZES = {"cpu": (384, 1024), "cuda": (4096,)}
"""Sizes of the square matrices whose products are timed. A core does a small product in under a
millisecond, which a scheduler rarely interrupts: on a core shared by five programs the fastest is
within 5 % of a quiet core's, where products of 1024 rows seem six times slower. Many threads need
the large matrices."""
_PROBE_SECONDS = 0.1
_PROBE_PRODUCTS = 20
_MOST_PROBE_SECONDS = 1.0
"""Products are timed for at least the first time and until there are enough, but no longer than the
last time."""
_GPU_PEAKS = (
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A30", 165e12),
    ("A40", 150e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Dense peak FLOP/s of 16-bit matrix products, from NVIDIA's data sheets. The first row whose words
occur in the device's name counts; other devices are measured."""
_OLDEST_BF16 = (8, 0)
"""Lowest compute capability whose bfloat16 peak equals the float16 peak."""


class Peak:
    """The peak of a job in FLOP/s (`flops`), and its origin (`source`).

    Args:
        say: Called once if the peak was too low.

    Collectives: the constructor, on all ranks.
    """

    def __init__(
        self, config: Config, device: torch.device, world: Axis, say: Callable[[str], None]
    ):
        self._say = say
        self._said = False
        self._reached: deque[float] = deque(maxlen=_STEPS)
        self.flops, self.source = peak_flops(config, device, world)

    def share(self, flops: float) -> float:
        """Return a step's FLOP/s as a share of the peak, at most 1. Call it at every step.

        The last five steps together raise the peak if they exceed it.
        """
        self._reached.append(flops)
        reached = harmonic_mean(self._reached)  # total operations over total time
        if len(self._reached) == _STEPS and reached > self.flops:
            if not self._said:
                self._say(
                    f"MFU: steps reach {reached / 1e9:,.0f} GFLOP/s, so the peak of "
                    f"{self.flops / 1e9:,.0f} was measured too low (other programs ran?); raised"
                )
            self.flops = reached
            self._said = True
        return min(1.0, flops / self.flops)


def peak_flops(config: Config, device: torch.device, world: Axis) -> tuple[float, str]:
    """Return the matrix-product FLOP/s of all processes together, and the number's origin.

    Known GPUs in 16 bit, with one process each, use their data sheet. Other devices are measured on
    all processes at once. Collectives: on all ranks of the job.
    """
    if (
        device.type == "cuda"
        and config.train.dtype in ("bf16", "fp16")
        and not config.train.share_gpus
    ):
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        if (known := data_sheet(name)) and (
            config.train.dtype == "fp16" or capability >= _OLDEST_BF16
        ):
            return known[1] * world.size, f"{known[0]} data sheet x {world.size}"
    barrier(world)
    total = torch.tensor(
        _probe(DTYPES[config.train.dtype], device), dtype=torch.float64, device=device
    )
    all_reduce(total, world)
    at_once = "es at once" if world.size > 1 else ""
    source = f"{config.train.dtype} matrix products, measured on {world.size} process{at_once}"
    return float(total), source


def data_sheet(name: str) -> tuple[str, float] | None:
    """Return a device's row of _GPU_PEAKS, if any.

    Whole words must match: an RTX A4000 is no A40, and a slice of an H100 (MIG) is no H100.
    """
    words = re.split(r"[ -]", name)
    if "MIG" in words:
        return None
    return next((row for row in _GPU_PEAKS if set(row[0].split()) <= set(words)), None)


def _probe(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a matrix product: the fastest of many, as other programs may run."""
    return max(
        2 * size**3 / _fastest_product(size, dtype, device) for size in _PROBE_SIZES[device.type]
    )


def _fastest_product(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the shortest time of a product of square matrices, in seconds."""
    a, b = torch.randn(2, size, size, device=device, generator=torch.Generator(device)).to(dtype)
    fastest = math.inf
    num_products = 0
    begin = start = time.perf_counter()
    while num_products == 0 or start < begin + (
        _PROBE_SECONDS if num_products >= _PROBE_PRODUCTS else _MOST_PROBE_SECONDS
    ):
        matmul.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.perf_counter()
        fastest = min(fastest, end - start)
        num_products += 1
        start = time.perf_counter()
    return fastest
