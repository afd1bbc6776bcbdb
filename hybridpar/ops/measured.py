"""Measured times of the operations' backends, for `auto`: measured.json, a table of the package.

    {"NVIDIA H200": {"rotary": {"bfloat16": {"triton": 41.9, "cuda": 41.4, "torch": 702.5}}}}

By device (what torch calls a GPU; "cpu" is any CPU), operation and type: microseconds of forward and backward, or of a
pass, summed over the shapes of the benchmark. `python -m benchmarks.gpu_ops --table` writes it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

import torch

Medians = Mapping[str, float]
TABLE = resources.files("hybridpar.ops") / "measured.json"


def medians(op: str, device_type: str | None, dtype: torch.dtype | None) -> Medians:
    """Microseconds of each backend that was measured on such tensors; empty where none was."""
    if device_type is None or dtype is None:
        return {}
    return _table().get(device_name(device_type), {}).get(op, {}).get(str(dtype).removeprefix("torch."), {})


def device_name(device_type: str) -> str:
    """The table's name for the device of this type."""
    return torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else device_type


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Medians]]]:
    table: dict[str, dict[str, dict[str, Medians]]] = json.loads(TABLE.read_text())
    return table
