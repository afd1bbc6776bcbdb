"""Memory that training may use. Units: bytes."""

from __future__ import annotations

import os

import torch

RESERVED = 1.5 * 2**30
"""Bytes of an accelerator that its context and communicators take. (Of host memory, a tenth is left
to other programs.)"""
_FRAGMENTS = 0.04
"""Share of an accelerator's memory that is lost to fragmentation. An estimate."""


def memory_limit(memory: float, *, is_cpu: bool) -> float:
    """Return the bytes that training may use on a device of `memory` bytes, or in a host's
    share."""
    return 0.9 * memory if is_cpu else (memory - RESERVED) * (1 - _FRAGMENTS)


def limit_here(device_type: str, num_processes: int) -> float:
    """Return the bytes that each of `num_processes` processes on this machine may use: on the
    smallest GPU, or of host memory."""
    if device_type == "cuda":
        found = [
            torch.cuda.get_device_properties(i).total_memory
            for i in range(torch.cuda.device_count())
        ]
        return memory_limit(min(found), is_cpu=False) / -(-num_processes // len(found))
    return memory_limit(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes, is_cpu=True
    )
