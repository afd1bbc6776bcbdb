"""What to say when one rank fails in the middle of a job, in one line."""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType

import torch.distributed as dist

from hybridpar.errors import HybridparError
from hybridpar.grid import Axis
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.run.executor import Executor
from hybridpar.train.errors import LostContactError, RankError

# How Gloo words a connection that broke or stayed silent; its errors are plain RuntimeErrors.
_GLOO = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "gloo/transport", "Socket closed")


def describe_failure(error: Exception, who: str) -> RankError:
    """One line for an exception that ended training on the rank `who`; a traceback is added where it is a defect."""
    if is_lost_contact(error):
        return LostContactError(f"{who} lost contact with another rank{_situation(error.__traceback__)}")
    if isinstance(error, HybridparError):
        return RankError(f"{who}: {error}")
    trace = "".join(traceback.format_exception(error)).rstrip()
    return RankError(f"{who} failed{_situation(error.__traceback__)}:\n{trace}")


def is_lost_contact(error: BaseException) -> bool:
    """Whether an exception is torch's or Gloo's way to say that another rank is gone or silent."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO)


def _situation(trace: TracebackType | None) -> str:
    """What this rank was doing, by the traceback's frames: ' while waiting for RECV_F of micro-batch 3 ...'."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    action = _local(frames, "action", Action)
    if (take := _frame_of(frames, Executor._take)) is not None:
        kind, k, lane = take.f_locals["kind"], take.f_locals["k"], take.f_locals["self"].lane
        axis, step = (lane.pp, -1) if kind is Kind.RECV_F else (lane.reverse, 1)
        return f" while waiting for {kind} of micro-batch {k} from rank {axis.ranks[axis.rank + step]}"
    axis = _local(frames, "axis", Axis)
    over = ""
    if isinstance(axis, Axis):
        over = f" in communication over {axis.name} (ranks {', '.join(map(str, axis.ranks))})"
    return f"{over} during {action}" if action else over


def _frame_of(frames: list[FrameType], function: object) -> FrameType | None:
    code = getattr(function, "__code__", None)
    return next((frame for frame in frames if frame.f_code is code), None)


def _local(frames: list[FrameType], name: str, kind: type) -> object | None:
    """The value of a local variable in the innermost frame that has one of that name and type."""
    return next((f.f_locals[name] for f in reversed(frames) if isinstance(f.f_locals.get(name), kind)), None)
