"""This machine's CPU, as Linux describes it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def cpu_fields() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo, such as 'vendor_id', 'model name', 'flags'; {} elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """The CPU's name by its maker, or else its architecture."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def available_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
