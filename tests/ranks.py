"""Runs a function in N Gloo processes: `run_ranks(fn, n, *args)` returns what each rank returned,
in rank order."""

from __future__ import annotations

from datetime import timedelta

from hybridpar.comm.ranks import run_on_ranks as run_ranks

__all__ = ["TIMEOUT", "run_ranks"]

TIMEOUT = timedelta(seconds=120)  # on GPUs others wait while one compiles
