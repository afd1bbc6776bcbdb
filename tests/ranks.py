"""Runs a function in N Gloo processes: `run_ranks(fn, n, *args)` returns what each rank returned, in rank order."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)  # on GPUs others wait while one compiles


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, start: str = "fork") -> list[Any]:
    """Calls `fn(*args)` on every rank of a fresh Gloo job (fn must be importable: a module-level function).

    `start`: of the processes; CUDA needs "spawn".

    Raises: AssertionError with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_run, (num_ranks, folder, fn, args), num_ranks, join=False, start_method=start)
        assert context is not None
        try:
            while not context.join(timeout=1):
                pass
        except mp.ProcessExitedException:  # the rank's own traceback says more
            pass
        failures = [(r, p.read_text()) for r in range(num_ranks) if (p := Path(folder, f"error{r}")).exists()]
        failures.sort(key=lambda item: "Connection closed" in item[1])  # a rank that lost its peer is a consequence
        assert not failures, f"rank {failures[0][0]} of {num_ranks}:\n{failures[0][1]}"
        return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(num_ranks)]


def _run(rank: int, num_ranks: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks,
            timeout=TIMEOUT)
        result = fn(*args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
