"""Errors of one rank in the middle of a job, and the line that describes them.

torch is imported only where a rank has failed, so that the command line starts quickly.
"""

from __future__ import annotations

import traceback

from hybridpar.errors import CheckpointError, HybridparError, about_file
from hybridpar.flight import Record

# Gloo raises plain RuntimeErrors with these words when a connection breaks or stays silent.
_GLOO = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "gloo/transport", "Socket closed")
# What torch says of a CPU's allocation that failed; the second is an operator of ours that asked it for a tensor.
_NO_MEMORY = ("can't allocate memory", "aoti_torch_empty_strided")
# How oneDNN and the loader of libraries end where that is all: behind other failures they say what was wrong.
_NO_MEMORY_ENDS = ("could not create a primitive", "failed to map segment from shared object")
# All that Python and Gloo say of a thread that cannot be had.
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")

TO_CONNECT = ("between hosts, GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME) names the interface that leads to the "
              "others, and firewalls let all TCP ports through")
"""What ranks need to find each other."""


class RankError(HybridparError):
    """An error of this rank alone; the message names the rank. The others learn of it by losing contact."""


class LostContactError(RankError):
    """Another rank died or hangs, so this one cannot go on. A consequence, never the cause."""


class AnomalyError(HybridparError):
    """Training has gone wrong in a way that the configuration says to stop at; raised on all ranks together."""


class SaveError(CheckpointError):
    """Saves have failed for so long that the run ends; raised on all ranks together."""


class SetupError(HybridparError):
    """Training cannot begin as it is configured; raised on all ranks together."""


def describe_failure(error: Exception, who: str, record: Record | None = None, link: str = "") -> RankError:
    """The error of the rank `who` as one line; a defect of ours keeps its traceback.

    record: what the rank was doing when the error was raised. link: what is known of a link that is out.
    """
    situation = "" if record is None else record.situation()
    if is_lost_contact(error):
        peers = record.peers if record is not None else ()
        other = f"rank {peers[0]}" if len(peers) == 1 else "another rank"
        if not link and record is not None and record.phase == "connecting":
            link = TO_CONNECT
        return LostContactError(f"{who} lost contact with {other}{situation}" + (f"; {link}" if link else ""))
    if isinstance(error, HybridparError):
        return RankError(f"{who}: {error}")
    if isinstance(error, OSError) and (text := about_file(error)):
        return RankError(f"{who}: {text}")
    if is_out_of_memory(error):
        said = str(error).partition("\n")[0] or type(error).__name__
        less = 'a smaller train.micro_batch_size, pipeline.recompute = "all" or memory.budget needs less'
        return RankError(f"{who} is out of memory{situation}: {said}; {less}, and `hybridpar check` says how much")
    if str(error) in _NO_THREAD:
        return RankError(f"{who} cannot start a thread{situation}: it is out of memory, or may have no more threads "
                         "(ulimit -u, pids.max)")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return RankError(f"{who} failed{situation}:\n{trace}")


def is_lost_contact(error: BaseException) -> bool:
    """Whether torch or Gloo says with this exception that another rank is gone or silent."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of a CPU or of a GPU."""
    said = str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError | ImportError) and (
            any(words in said for words in _NO_MEMORY) or said.endswith(_NO_MEMORY_ENDS)))
