"""What to say when one rank fails in the middle of a job, in one line."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from hybridpar.errors import HybridparError, about_file
from hybridpar.flight import Record
from hybridpar.train.errors import LostContactError, RankError

# How Gloo words a connection that broke or stayed silent; its errors are plain RuntimeErrors.
_GLOO = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "gloo/transport", "Socket closed")


def describe_failure(error: Exception, who: str, doing: Record | None = None) -> RankError:
    """One line for an exception that ended training on the rank `who`; a traceback is added where it is a defect.

    `doing`: what the rank was doing.
    """
    situation = "" if doing is None else doing.situation()
    if is_lost_contact(error):
        peers = doing.peers if doing is not None else ()
        other = f"rank {peers[0]}" if len(peers) == 1 else "another rank"
        return LostContactError(f"{who} lost contact with {other}{situation}")
    if isinstance(error, HybridparError):
        return RankError(f"{who}: {error}")
    if isinstance(error, OSError) and (text := about_file(error)):
        return RankError(f"{who}: {text}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return RankError(f"{who} failed{situation}:\n{trace}")


def is_lost_contact(error: BaseException) -> bool:
    """Whether an exception is torch's or Gloo's way to say that another rank is gone or silent."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO)
