"""Run a function on several processes of this machine that form a separate job."""

from __future__ import annotations

import gc
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridpar.config import use_all_gpu_queues
from hybridpar.errors import HybridparError, trace_from_users_code
from hybridpar.scratch import scratch_folder


def run_on_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    start: str = "fork",
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call `fn(*args)`, a module-level function, on every rank of a new job; return the results by
    rank.

    Each rank has one thread.

    Args:
        fn: The function.
        num_ranks: Number of processes.
        args: Its arguments.
        backend: Backend of torch.distributed.
        start: How processes start; CUDA needs "spawn".
        timeout_s: Time-out of collectives.

    Raises:
        HybridparError: With the traceback of the first rank that failed, or the message alone if it
            raised a HybridparError. The other ranks are terminated.
    """
    if backend == "nccl":
        use_all_gpu_queues()  # set here, because a rank may set up CUDA before it gets to `fn`
    with scratch_folder() as folder:
        readers, writers = zip(
            *(mp.get_context(start).Pipe(duplex=False) for _ in range(num_ranks)), strict=True
        )
        job = (backend, f"{folder}/store", num_ranks, timeout_s)
        with _no_collection():
            processes = mp.start_processes(
                _rank_main, (job, writers, fn, args), num_ranks, join=False, start_method=start
            )
        assert processes is not None
        for writer in writers:
            writer.close()
        results, failures = _listen(readers)
        log = logging.getLogger("torch.multiprocessing.spawn")
        level = log.level
        # it would warn of every rank that it terminates after the first has failed
        log.setLevel(logging.ERROR)
        try:
            while not processes.join():
                pass
        except mp.ProcessExitedException:  # the rank's own traceback says more
            pass
        finally:
            log.setLevel(level)
    if failures:  # a rank that lost its peer is a consequence
        rank, text = min(
            failures.items(), key=lambda failure: ("Connection" in failure[1], len(failure[1]))
        )
        raise HybridparError(f"rank {rank} of {num_ranks} failed:\n{text}")
    return [results[rank] for rank in range(num_ranks)]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep forked processes from collecting garbage of this one before they freeze it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _listen(readers: Sequence[Connection]) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the results by rank, up to the first failures, and the failures."""
    left = {reader: rank for rank, reader in enumerate(readers)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while left and not failures:
        for reader in wait(list(left)):
            assert isinstance(reader, Connection)
            rank = left.pop(reader)
            try:
                result, failure = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
            except EOFError:
                result = None
                failure = "the process ended"
            if failure:
                failures[rank] = failure
            else:
                results[rank] = result
    return results, failures


def _rank_main(
    rank: int,
    job: tuple[str, str, int, float],
    writers: Sequence[Connection],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A destructor of garbage made before the fork may wait for a thread that this process does not
    # have.
    gc.freeze()
    gc.enable()
    backend, path, num_ranks, timeout_s = job
    for other in {*range(num_ranks)} - {rank}:
        writers[other].close()  # else the end of that rank would go unnoticed
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(path, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        # for tensors this takes a third of the time of pickle
        torch.save((fn(*args), ""), result := io.BytesIO())
        dist.barrier()
        dist.destroy_process_group()
        writers[rank].send_bytes(result.getbuffer())
    except BaseException as error:
        text = str(error) if isinstance(error, HybridparError) else trace_from_users_code(error)
        torch.save((None, text), failure := io.BytesIO())
        writers[rank].send_bytes(failure.getbuffer())
        os._exit(1)
