"""What training may take of the memory that there is. Units: bytes."""

from __future__ import annotations

import os

import torch

RESERVED = 1.5 * 2**30
"""Bytes of an accelerator that its context and communicators take; of a host's memory a tenth is
left to others."""
_FRAGMENTS = 0.04
"""Share of an accelerator's memory that an allocator cannot hand out. An estimate."""


def memory_limit(memory: float, *, is_cpu: bool) -> float:
    """Bytes that training may take of a device of so many, or of a host's share."""
    return 0.9 * memory if is_cpu else (memory - RESERVED) * (1 - _FRAGMENTS)


def limit_here(device_type: str, num_processes: int) -> float:
    """Bytes that each of so many processes on this machine may take: of a GPU, the smallest, or of
    the host."""
    if device_type == "cuda":
        found = [
            torch.cuda.get_device_properties(i).total_memory
            for i in range(torch.cuda.device_count())
        ]
        return memory_limit(min(found), is_cpu=False) / -(-num_processes // len(found))
    return memory_limit(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes, is_cpu=True
    )
