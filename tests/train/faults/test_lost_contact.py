"""Every word with which torch, Gloo and NCCL say that another rank is gone, and those of a rank's
own fault."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridpar.train.faults.errors import LostContactError, describe_failure
from hybridpar.train.faults.lost_contact import LOST, OWN_FAULT, is_lost_contact

LOST_TEXTS = [text for of_library in LOST.values() for text in of_library]
OWN_TEXTS = [text for of_library in OWN_FAULT.values() for text in of_library]

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
PEER = "[127.0.0.1]:7130"
LOST_MESSAGES = (
    f"{GLOO}/pair.cc:547] Connection closed by peer {PEER}. This is typically caused by a remote "
    "worker crashing.",
    f"{GLOO}/pair.cc:537] Read error {PEER}: Connection reset by peer. This is typically caused by "
    "..",
    f"{GLOO}/pair.cc:339] writev {PEER}: Broken pipe",
    f"{GLOO}/pair.cc:812] Socket closed {PEER}",
    f"{GLOO}/pair.cc:201] Socket unexpectedly closed {PEER}",
    f"[enforce fail at {GLOO[1:]}/pair.cc:801] . Pair is not connected ({PEER} <--> {PEER})",
    f"{GLOO}/pair.cc:152] short read: got 3 bytes while expecting to read 8 bytes, remote={PEER}",
    f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
    "Application timeout caused pair closure",
    f"{GLOO}/buffer.cc:72] Read timeout {PEER}",
    f"{GLOO}/buffer.cc:113] Write timeout {PEER}",
    f"{GLOO}/pair.h:311] Connect timeout {PEER}",
    f"{GLOO}/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, peer {PEER}",
    "Gloo connectFullMesh failed with wait timeout after 60000ms",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 4000 ms",
    "[Rank 0]: Ranks 1, 2 timed out in monitoredBarrier after 4000 ms. Waited for all ranks.",
    "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
    "from rank 0. Please "
    "check rank 0 logs for faulty rank.",
    "Operation timed out!",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) "
    "ran for 4001 ms",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
    "store by key '0', but "
    "store->get('0') got error: Connection reset by peer",
    "NCCL communicator was aborted on rank 1.",
    "NCCL timeout when waiting for nonblocking call to become successful.",
    "NCCL error in: ProcessGroupNCCL.cpp:1\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote "
    "process exiting prematurely.",
    "NCCL error in: ProcessGroupNCCL.cpp:1\nncclSystemError: System call (e.g. socket, malloc) or "
    "external library "
    "call failed or device error.\nLast error:\nCall to recv failed : Connection reset by peer",
    "remote process exited or there was a network error",
    f"socketProgress: Connection closed by remote peer {PEER}",
    f"socketPollConnect: connect to {PEER} returned Connection refused, exceeded error retry count "
    "after 35 attempts",
)
"""A message for each of the words, in their order."""
OWN_MESSAGES = (
    f"[enforce fail at {GLOO[1:]}/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received "
    "data size doesn't "
    "match expected size. Is there a distributed collective mismatch in your code?",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE",
    "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details)",
    "NCCL error in: ProcessGroupNCCL.cpp:1\nncclInvalidArgument: Invalid value for an argument.",
    "NCCL error in: ProcessGroupNCCL.cpp:1\nncclInvalidUsage: This usually reflects invalid usage "
    "of NCCL library.",
    "NCCL error in: NCCLUtils.hpp:268\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
    "error:\nCuda "
    "failure 'out of memory'",
    "ncclSystemError: System call failed.\nLast error:\nCall to malloc failed: Cannot allocate "
    "memory",
    "Gloo connectFullMesh failed with Resource temporarily unavailable",
    "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. socket: Too many open files, "
    "remote=",
    "Gloo connectFullMesh failed with Too many open files in system",
    "ncclSystemError: ..\nLast error:\nError while creating shared memory segment: No space left "
    "on device",
    "Gloo connectFullMesh failed with bind: Address already in use",
    "Gloo connectFullMesh failed with bind: Cannot assign requested address",
)
"""Messages of a rank's own faults; the last are the C library's, in the order of their numbers in
the table."""


@pytest.mark.parametrize(
    ("text", "message"), list(zip(LOST_TEXTS, LOST_MESSAGES, strict=True)), ids=LOST_TEXTS
)
def test_a_rank_that_lost_another_says_so(text: str, message: str) -> None:
    assert [other for other in LOST_TEXTS if other in message] == [text], "each is tested alone"
    for kind in (RuntimeError, dist.DistBackendError):
        assert isinstance(describe_failure(kind(message), "rank 1"), LostContactError)


@pytest.mark.parametrize(
    ("text", "message"), list(zip(OWN_TEXTS, OWN_MESSAGES, strict=True)), ids=OWN_TEXTS
)
def test_a_ranks_own_fault_is_no_lost_contact(text: str, message: str) -> None:
    assert text in message
    for kind in (RuntimeError, dist.DistBackendError, dist.DistNetworkError):
        assert not is_lost_contact(kind(message))


def test_torchs_own_types_of_errors() -> None:
    for kind in (dist.DistNetworkError, dist.DistStoreError):
        assert is_lost_contact(kind("whatever a newer version says"))
    for error in (
        dist.DistBackendError("ncclInternalError: Internal check failed."),
        RuntimeError("a defect of ours"),
        ValueError("Connection closed by peer"),
    ):
        assert not is_lost_contact(error)
    short = describe_failure(dist.DistBackendError(OWN_MESSAGES[5]), "rank 1")
    assert str(short).startswith("rank 1 is out of memory: ")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("library", LOST)
def test_the_installed_torch_has_these_words(library: str) -> None:
    """A message that a newer version words otherwise is noticed here. NCCL and CUDA are not in all
    builds."""
    folder = Path(torch.__path__[0])
    paths = [
        *(folder / "lib").glob(f"{library}.*"),
        *folder.parent.glob(f"nvidia/nccl/lib/{library}.so*"),
    ]
    if not paths:
        assert library != "libtorch_cpu"
        pytest.skip(f"this build of torch has no {library}")
    with (
        paths[0].open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        missing = [
            text
            for text in (*LOST[library], *OWN_FAULT[library])
            if content.find(text.removesuffix("[").encode()) < 0
        ]
    assert not missing


def _lose(rank: int, port: int, said: Connection, how: str) -> None:
    """Rank 2 is gone, or silent. What a rank then meets in two collectives, of which one waits for
    another in vain."""
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, wait_for_workers=False)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=2)
    group: Any = dist.ProcessGroupGloo(store, rank, 3, options)
    x = torch.ones(4)
    group.allreduce([x]).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP if how == "is silent" else signal.SIGKILL)
    works = [group.allgather([[torch.empty(4) for _ in range(3)]], [x]), group.allreduce([x])]
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            errors.append((is_lost_contact(error), f"{type(error).__name__}: {error}"))
    said.send(errors)
    said.recv()


@contextmanager
def three_ranks(how: str) -> Iterator[list[Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(3)]
    ranks = [
        context.Process(target=_lose, args=(rank, port, pipes[rank][1], how)) for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    try:
        yield [pipe[0] for pipe in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["is silent", "is gone"])
def test_gloos_words_about_a_rank(how: str) -> None:
    """Two operations wait for the rank that is silent: the time-out of one closes the connections
    of the other."""
    with three_ranks(how) as ranks:
        for rank in ranks[:2]:
            assert rank.poll(100)
            errors = rank.recv()
            assert errors
            assert all(lost for lost, _ in errors), errors
