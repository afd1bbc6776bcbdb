"""Error messages of torch, Gloo and NCCL about lost ranks, and about a rank's own fault.

Gloo's errors arrive in Python as plain RuntimeErrors, and NCCL's as one type for all errors, so
that only the text tells whether a rank has failed or merely lost another one. A missing text makes
an innocent rank look guilty. One too many hides a real failure behind "lost contact", so that each
text is listed with the source line it comes from.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """A part of an error message, and where it comes from.

    Attributes:
        text: Part of the message.
        source: Source file, in gloo/, torch/csrc/distributed/ or NCCL's src/.
        library: Shared library of torch that contains the text; empty for the C library.
    """

    text: str
    source: str
    library: str


_CPU = "libtorch_cpu"
_CUDA = "libtorch_cuda"
_NCCL = "libnccl"

LOST = (
    # Gloo: a connection that breaks
    Words("Connection closed by peer", "gloo/transport/tcp/pair.cc", _CPU),
    Words("Read error [", "gloo/transport/tcp/pair.cc", _CPU),
    Words("writev [", "gloo/transport/tcp/pair.cc", _CPU),
    Words("Socket closed [", "gloo/transport/tcp/pair.cc", _CPU),
    Words("Socket unexpectedly closed [", "gloo/transport/tcp/pair.cc", _CPU),
    Words("Pair is not connected (", "gloo/transport/tcp/pair.cc", _CPU),
    # Gloo: "read: Connection reset by peer, remote=[..]", "short read: got 0 bytes .., remote=[..]"
    # and the like
    Words(", remote=", "gloo/transport/tcp/error.cc", _CPU),
    # Gloo: a peer that is silent. The second comes to all other operations of the rank whose own
    # wait was too long.
    Words("Timed out waiting ", "gloo/transport/tcp/unbound_buffer.cc", _CPU),
    Words("Application timeout caused pair closure", "gloo/transport/tcp/unbound_buffer.cc", _CPU),
    Words("Read timeout [", "gloo/transport/tcp/buffer.cc", _CPU),
    Words("Write timeout [", "gloo/transport/tcp/buffer.cc", _CPU),
    Words("Connect timeout [", "gloo/transport/tcp/pair.h", _CPU),
    Words("timed out connecting: ", "gloo/transport/tcp/helpers.h", _CPU),
    Words("Gloo connectFullMesh failed with ", "c10d/ProcessGroupGloo.cpp", _CPU),
    # torch: monitored barriers, and a Work that is waited for with a time limit
    Words("failed to pass monitoredBarrier in ", "c10d/ProcessGroupGloo.cpp", _CPU),
    Words("timed out in monitoredBarrier after ", "c10d/ProcessGroupGloo.cpp", _CPU),
    Words("for send/recv from rank 0. Please check rank 0 logs", "c10d/ProcessGroupGloo.cpp", _CPU),
    Words("Operation timed out!", "c10d/Work.cpp", _CPU),
    # torch on NCCL
    Words("Watchdog caught collective operation timeout", "c10d/ProcessGroupNCCL.cpp", _CUDA),
    Words("via c10d key-value store by key ", "c10d/ProcessGroupNCCL.cpp", _CUDA),
    Words("NCCL communicator was aborted", "c10d/NCCLUtils.cpp", _CUDA),
    Words("NCCL timeout when waiting for nonblocking call", "c10d/NCCLUtils.hpp", _CUDA),
    Words("ncclRemoteError", "c10d/NCCLUtils.cpp", _CUDA),
    Words("ncclSystemError", "c10d/NCCLUtils.cpp", _CUDA),
    Words("remote process exited or there was a network error", "init.cc", _NCCL),
    Words("Connection closed by remote peer", "misc/socket.cc", _NCCL),
    Words("exceeded error retry count", "os/linux.cc", _NCCL),
)
"""Messages of a rank that lost another one. Errors of torch's store and sockets have their own
types."""

OWN_FAULT = (
    Words("size doesn't match expected size", "gloo/transport/tcp/pair.cc", _CPU),
    Words("Detected mismatch between collectives on ranks", "c10d/ProcessGroupWrapper.cpp", _CPU),
    Words("out of memory", "c10d/NCCLUtils.hpp, of CUDA", ""),
    Words("unhandled cuda error", "init.cc", _NCCL),
    Words("ncclInvalidArgument", "c10d/NCCLUtils.cpp", _CUDA),
    Words("ncclInvalidUsage", "c10d/NCCLUtils.cpp", _CUDA),
    *(
        Words(os.strerror(number), "the C library", "")
        for number in (
            errno.ENOMEM,
            errno.EAGAIN,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOSPC,
            errno.EADDRINUSE,
            errno.EADDRNOTAVAIL,
        )
    ),
)
"""Messages of a rank whose own memory, files, addresses or calls are at fault; they may be part of
one of the messages above."""


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an exception of torch, Gloo or NCCL means that another rank is gone."""
    import torch.distributed as dist

    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if any(words.text in said for words in OWN_FAULT):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return any(words.text in said for words in LOST)
