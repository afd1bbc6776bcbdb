"""Measured times of the operations' backends, for `auto`: measured.json, a table of the package.

    {"NVIDIA H200": {"rotary": {"bfloat16": {"triton": 41.9, "cuda": 41.4, "torch": 702.5}},
                     "attention d128": {"bfloat16": {"sdpa": 582.0, "cuda": 573.9}}}}

By device (what torch calls a GPU; "cpu" is any CPU), operation and type: microseconds of forward and backward, or of a
pass, summed over the shapes of the benchmark. Where which is fastest depends on the class of a shape, that follows the
operation's name. `python -m benchmarks.gpu_ops --table` writes it. A GPU has the times of the one of its compute
capability that is in it, but for what was measured on it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

import torch

Medians = Mapping[str, float]
ALIKE = {(9, 0): "NVIDIA H200"}
"""Devices of the table by compute capability: an H100 has the same multiprocessors, and two thirds of the bandwidth."""
TABLE = resources.files("hybridpar.ops") / "measured.json"


def medians(op: str, device_type: str | None, dtype: torch.dtype | None, shape: str = "") -> Medians:
    """Microseconds of each backend that was measured on such tensors; empty where none was. shape: their class."""
    if device_type is None or dtype is None:
        return {}
    devices = [device_name(device_type)]
    if device_type == "cuda" and torch.cuda.is_available():
        devices.append(ALIKE.get(torch.cuda.get_device_capability(), ""))
    kind = str(dtype).removeprefix("torch.")
    found = [_table().get(device, {}).get(name, {}).get(kind) for device in devices for name in (f"{op} {shape}", op)]
    return next(filter(None, found), {})


def device_name(device_type: str) -> str:
    """The table's name for the device of this type."""
    return torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else device_type


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Medians]]]:
    table: dict[str, dict[str, dict[str, Medians]]] = json.loads(TABLE.read_text())
    return table
