"""Cores that this process may run on. Imports no torch, so that a command can print something
before torch is loaded.
"""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(num_ranks: int) -> str:
    """Return a description of how few cores so many ranks share; empty if each rank has one."""
    cores = available_cores()
    return f"they share {cores} core{'s' * (cores > 1)}" if num_ranks > cores else ""
