"""Errors of one rank in the middle of a job, and the line that describes them.

torch is imported only where a rank has failed, so that the command line starts quickly.
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
"""How long a rank that lost contact outlives the one that died, so that the launcher sees and names
that one first."""
TO_CONNECT = (
    "between hosts, GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME) names the interface that "
    "leads to the "
    "others, and firewalls let all TCP ports through"
)
"""What ranks need to find each other."""


class RankError(HybridparError):
    """An error of this rank alone; the message names the rank. The others learn of it by losing
    contact."""

    may_pass = True


class LostContactError(RankError):
    """Another rank died or hangs, so this one cannot go on. A consequence, never the cause."""


class AnomalyError(HybridparError):
    """Training has gone wrong in a way that the configuration says to stop at; raised on all ranks
    together."""


class CallbackError(HybridparError):
    """A function that the program gave to `fit` has raised. The run has saved; raised on all ranks
    together."""

    has_users_cause = True


class SaveError(CheckpointError):
    """Saves have failed for so long that the run ends; raised on all ranks together."""


class SetupError(HybridparError):
    """Training cannot begin as it is configured; raised on all ranks together."""


def describe_failure(
    error: Exception, who: str, record: Record | None = None, link: str = ""
) -> RankError:
    """The error of the rank `who` as one line; a defect of ours keeps its traceback.

    record: what the rank was doing when the error was raised. link: what is known of a link that is
    out.
    """
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
        less = (
            'a smaller train.micro_batch_size, pipeline.recompute = "all" or memory.budget needs '
            "less"
        )
        return RankError(
            f"{who} is out of memory{situation}: {said}; {less}. `hybridpar check` predicts how "
            f"much a run needs"
        )
    if lacks_threads(error):
        return RankError(
            f"{who} cannot start a thread{situation}: it is out of memory, or has reached its "
            f"limit of threads (ulimit -u, pids.max)"
        )
    return RankError(f"{who} failed{situation}:\n{trace_from_users_code(error)}")
