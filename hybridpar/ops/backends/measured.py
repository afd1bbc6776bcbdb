"""Measured times of the operations' backends, for `auto`: measured.json, a table of the package.

    {"NVIDIA H200": {"capability": [9, 0],
                     "rotary": {"bfloat16": {"triton": 41.9, "cuda": 41.4, "torch": 702.5}},
                     "attention d128": {"bfloat16": {"sdpa": 582.0, "cuda": 573.9}}}}

The keys are a device (the name that torch gives a GPU; "cpu" is any CPU), an operation and a type.
The values are microseconds of forward and backward, or of a pass, summed over the shapes of the
benchmark. Where the fastest backend depends on the class of a shape, the class follows the
operation's name. `python -m benchmarks.gpu_ops --table` writes the table.

A GPU that is not in the table takes the times of another one, in this order:

    1. A GPU of the same compute capability (GENERATIONS names them).
    2. The GPU of the nearest compute capability, if both are at least OLDEST and the operation is
       bound by memory. A fused operator then wins by the bytes that it does not move, on any such
       GPU.

Attention (ONE_GENERATION) never takes step 2: it is bound by products, whose instructions differ
between generations, and its CUDA kernel runs on compute capability 9.0 alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

Medians = Mapping[str, float]
Capability = tuple[int, int]
GENERATIONS: dict[Capability, str] = {
    (7, 0): "Volta (V100)",
    (7, 5): "Turing (T4, RTX 20)",
    (8, 0): "Ampere (A100, A800, A30)",
    (8, 6): "Ampere for graphics (A10, A40, RTX 30)",
    (8, 7): "Ampere for boards (Orin)",
    (8, 9): "Ada (L4, L40S, RTX 40)",
    (9, 0): "Hopper (H100, H200, H800, H20, GH200)",
    (10, 0): "Blackwell (B200, GB200)",
    (10, 3): "Blackwell Ultra (B300, GB300)",
    (12, 0): "Blackwell for graphics (RTX 50, RTX PRO 6000)",
    (12, 1): "Blackwell for desktops (GB10)",
}
"""NVIDIA's generations of GPUs by compute capability."""
OLDEST: Capability = (8, 0)
"""Compute capability from which on operators that are bound by memory rank their backends alike:
Ampere, the first with bfloat16 and with copies from global to shared memory beside arithmetic."""
ONE_GENERATION = ("attention",)
"""Operations whose times hold for one compute capability alone."""
_DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
TABLE = resources.files("hybridpar.ops.backends") / "measured.json"


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of each backend (`medians`, empty if none apply), and where they come from
    (`source`)."""

    medians: Medians
    source: str


def medians(
    op: str, device_type: str | None, dtype: torch.dtype | None, shape: str = ""
) -> Medians:
    """Return microseconds of each backend that was measured on such tensors, or on tensors of a GPU
    of its class.

    Args:
        shape: class of the tensors' shapes, where the operation has such classes.
    """
    return find(op, device_type, dtype, shape).medians


def find(op: str, device_type: str | None, dtype: torch.dtype | None, shape: str = "") -> Times:
    """Return the measured times for such tensors, and which device they were measured on and why
    that one."""
    if device_type is None or dtype is None:
        return Times({}, "not measured")
    device = device_name(device_type)
    kind = str(dtype).removeprefix("torch.")
    if own := _entry(device, op, kind, shape):
        return Times(own, f"measured on {_DEVICES.get(device, device)}")
    if device_type != "cuda" or not torch.cuda.is_available():
        return Times({}, f"not measured on {_DEVICES.get(device, device)} in {kind}")
    if torch.version.hip is not None:  # its capabilities are numbers of another vendor's
        return Times({}, "not measured: an AMD GPU, and the table has none")
    here: Capability = torch.cuda.get_device_capability()
    capabilities = {
        name: capability
        for name, capability in _capabilities().items()
        if _entry(name, op, kind, shape)
    }
    kin = generation(here)
    for name, capability in capabilities.items():
        if capability == here:
            return Times(
                _entry(name, op, kind, shape), f"measured on {name}, the same architecture: {kin}"
            )
    if op in ONE_GENERATION:
        return Times(
            {}, f"not measured on {kin}, and {op} ranks its backends otherwise on each architecture"
        )
    if here < OLDEST:
        return Times({}, f"not measured: {kin} is older than what the table has")
    usable = {name: capability for name, capability in capabilities.items() if capability >= OLDEST}
    if not usable:
        return Times({}, f"not measured in {kind}")
    nearest = min(usable, key=lambda name: _distance(usable[name], here))
    reason = "as operators bound by memory rank their backends alike"
    return Times(
        _entry(nearest, op, kind, shape), f"measured on {nearest}, the nearest to {kin}, {reason}"
    )


def generation(capability: Capability) -> str:
    """Return the name of a GPU generation, or its compute capability where that is not known."""
    return GENERATIONS.get(capability, "compute capability {}.{}".format(*capability))


def device_name(device_type: str) -> str:
    """Return the table's name for the device of this type."""
    return (
        torch.cuda.get_device_name()
        if device_type == "cuda" and torch.cuda.is_available()
        else device_type
    )


def _distance(one: Capability, other: Capability) -> tuple[int, int]:
    return abs(one[0] - other[0]), abs(one[1] - other[1])


def _entry(device: str, op: str, kind: str, shape: str) -> Medians:
    """Return the times of a device, of this class of shapes if it has them; empty if there are
    none."""
    of_device = _table().get(device, {})
    for name in (f"{op} {shape}", op):
        if times := of_device.get(name, {}).get(kind):
            return times
    return {}


def _capabilities() -> dict[str, Capability]:
    """Return the compute capability of each GPU in the table."""
    return {
        device: (entry["capability"][0], entry["capability"][1])
        for device, entry in _read().items()
        if "capability" in entry
    }


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Medians]]]:
    return {
        device: {op: types for op, types in entry.items() if op != "capability"}
        for device, entry in _read().items()
    }


@functools.cache
def _read() -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return read
