"""Error messages of torch, Gloo and NCCL about lost ranks, and about a rank's own fault.

Gloo's errors arrive in Python as plain RuntimeErrors, and NCCL's as one type for all errors, so
that only the text tells whether a rank has failed or merely lost another one. A missing text makes
an innocent rank look guilty. One too many hides a real failure behind "lost contact", so that each
text is listed with the source file it comes from.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

LOST = {
    "libtorch_cpu": (
        # gloo/transport/tcp: pair.cc, a connection that breaks
        "Connection closed by peer",
        "Read error [",
        "writev [",
        "Socket closed [",
        "Socket unexpectedly closed [",
        "Pair is not connected (",
        # error.cc: "read: Connection reset by peer, remote=[..]" and the like
        ", remote=",
        # unbound_buffer.cc: a peer that is silent. The second comes to all other operations of the
        # rank whose own wait was too long.
        "Timed out waiting ",
        "Application timeout caused pair closure",
        # buffer.cc, pair.h, helpers.h
        "Read timeout [",
        "Write timeout [",
        "Connect timeout [",
        "timed out connecting: ",
        # c10d/ProcessGroupGloo.cpp, Work.cpp: also monitored barriers
        "Gloo connectFullMesh failed with ",
        "failed to pass monitoredBarrier in ",
        "timed out in monitoredBarrier after ",
        "for send/recv from rank 0. Please check rank 0 logs",
        "Operation timed out!",
    ),
    "libtorch_cuda": (
        # c10d/ProcessGroupNCCL.cpp, NCCLUtils.cpp, NCCLUtils.hpp
        "Watchdog caught collective operation timeout",
        "via c10d key-value store by key ",
        "NCCL communicator was aborted",
        "NCCL timeout when waiting for nonblocking call",
        "ncclRemoteError",
        "ncclSystemError",
    ),
    "libnccl": (
        # init.cc, misc/socket.cc, os/linux.cc
        "remote process exited or there was a network error",
        "Connection closed by remote peer",
        "exceeded error retry count",
    ),
}
"""Parts of the messages of a rank that lost another one, by the library of torch that has them.
Errors of torch's store and sockets have their own types."""

OWN_FAULT = {
    "libtorch_cpu": (
        "size doesn't match expected size",  # gloo/transport/tcp/pair.cc
        "Detected mismatch between collectives on ranks",  # c10d/ProcessGroupWrapper.cpp
    ),
    "libnccl": ("unhandled cuda error",),  # init.cc
    "libtorch_cuda": ("ncclInvalidArgument", "ncclInvalidUsage"),  # c10d/NCCLUtils.cpp
    "libc": (
        "out of memory",  # CUDA's, in c10d/NCCLUtils.hpp
        os.strerror(errno.ENOMEM),
        os.strerror(errno.EAGAIN),
        os.strerror(errno.EMFILE),
        os.strerror(errno.ENFILE),
        os.strerror(errno.ENOSPC),
        os.strerror(errno.EADDRINUSE),
        os.strerror(errno.EADDRNOTAVAIL),
    ),
}
"""Parts of the messages of a rank whose own memory, files, addresses or calls are at fault; they may
be part of one of the messages above."""


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an exception of torch, Gloo or NCCL means that another rank is gone."""
    import torch.distributed as dist

    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if _has_any(said, OWN_FAULT):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return _has_any(said, LOST)


def _has_any(said: str, texts: Mapping[str, Sequence[str]]) -> bool:
    return any(text in said for of_library in texts.values() for text in of_library)
