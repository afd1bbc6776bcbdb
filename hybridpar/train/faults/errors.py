"""Errors of one rank during a job, and the line that describes them.

torch is imported only after a failure, so that the command line starts quickly.
"""

from __future__ import annotations

from hybridpar.errors import (
    CheckpointError,
    HybridparError,
    about_file,
    first_line,
    is_out_of_memory,
    lacks_threads,
    trace_from_users_code,
)
from hybridpar.flight import Record
from hybridpar.train.faults.lost_contact import is_lost_contact

GRACE_S = 2.0
"""Time that a rank which lost contact outlives the dead rank, so that the launcher sees and names
the dead rank first."""
TO_CONNECT = (
    "between hosts, GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME) names the interface that "
    "leads to the others, and firewalls let all TCP ports through"
)
"""Advice for ranks that cannot connect."""


class RankError(HybridparError):
    """An error of one rank, named in the message. Other ranks notice it by losing contact."""

    may_pass = True


class LostContactError(RankError):
    """Another rank died or hangs, so this rank cannot continue. A consequence, never the cause."""


class AnomalyError(HybridparError):
    """Training failed in a way that the configuration stops at; raised on all ranks together."""


class CallbackError(HybridparError):
    """A callback given to `fit` raised, and the run has saved; raised on all ranks together."""

    has_users_cause = True


class SaveError(CheckpointError):
    """Saves have failed too often, so the run ends; raised on all ranks together."""


class SetupError(HybridparError):
    """Training cannot start with this configuration; raised on all ranks together."""


def describe_failure(
    error: Exception, who: str, record: Record | None = None, link: str = ""
) -> RankError:
    """Return the error of a rank as one line; an internal error keeps its traceback."""
    situation = "" if record is None else record.situation()
    if is_lost_contact(error):
        peers = record.peers if record is not None else ()
        other = f"rank {peers[0]}" if len(peers) == 1 else "another rank"
        if not link and record is not None and record.phase == "connecting":
            link = TO_CONNECT
        return LostContactError(
            f"{who} lost contact with {other}{situation}" + (f"; {link}" if link else "")
        )
    if isinstance(error, HybridparError):
        return RankError(f"{who}: {error}")
    if isinstance(error, OSError) and (text := about_file(error)):
        return RankError(f"{who}: {text}")
    if is_out_of_memory(error):
        said = first_line(error)
        return RankError(
            f"{who} is out of memory{situation}: {said}; a smaller train.micro_batch_size, "
            'pipeline.recompute = "all" or memory.limit needs less. `hybridpar check` predicts how '
            "much a run needs"
        )
    if lacks_threads(error):
        return RankError(
            f"{who} cannot start a thread{situation}: it is out of memory, or has reached its "
            f"limit of threads (ulimit -u, pids.max)"
        )
    return RankError(f"{who} failed{situation}:\n{trace_from_users_code(error)}")
