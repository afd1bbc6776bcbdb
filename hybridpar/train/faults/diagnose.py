"""Diagnose a failed job: which rank failed, in which action, and who waited for it.

The diagnosis uses the flight records and exit codes of all ranks.

    rank 3 died                     the first rank that ended for another reason than a lost rank
    all gave up                     all ranks agreed on an error, and ended
    rank 1 hangs                    it makes no progress and waits for nobody; the others wait, or
                                    train while it saves
    ranks 0, 1 wait in a circle     all wait, these for messages of each other: the plan or a link
                                    is at fault
    the link 0 - 1 is lost          all wait: these at both ends of a message, or in one collective
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.config import STOP_SIGNALS
from hybridpar.flight import LOST, REFUSED, RENDEZVOUS, Record, hang_text
from hybridpar.grid import describe
from hybridpar.schedules.kinds import ACTION_SPECS, Kind

_ASKED = {128 + signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS}


@dataclass(frozen=True)
class Seen:
    """The state of a rank as the supervisor sees it.

    Attributes:
        record: Its flight record; None before it has opened one in the run folder.
        exit_code: None while it runs; minus the signal that ended it.
        idle_s: Time since its record last changed.
        saving: State of its thread that writes a checkpoint; None if none is being written.
        patience_s: Time that it may at least wait for others.
        stopped: Whether SIGSTOP or a debugger has stopped it.
        early: Its record from before it may write to the run folder, without a place on the grid.
        start_timeout_s: Time without progress that it may take before `record` exists.
    """

    rank: int
    record: Record | None = None
    exit_code: int | None = None
    idle_s: float = 0.0
    saving: Seen | None = None
    patience_s: float = 0.0
    stopped: bool = False
    early: Record | None = None
    start_timeout_s: float = 0.0

    @property
    def who(self) -> str:
        """Name of the rank, with stages and place on the grid once they are known."""
        who = self.record.who if self.record is not None else None
        if who is None:
            return f"rank {self.rank}"
        return describe(self.rank, who["stages"], who["place"])

    @property
    def failed(self) -> bool:
        """Whether the rank ended with an error."""
        return bool(self.exit_code)

    @property
    def is_victim(self) -> bool:
        """Whether the rank ended because of another one: lost contact, or NCCL's watchdog aborted it.

        At the rendezvous there is no watchdog yet. Gloo aborts there if it can start only some of
        its threads.
        """
        record = self.record or self.early  # an evaluation job has only the early one
        if record is None:
            return False
        watched = self.waits and record.operation != RENDEZVOUS
        return record.phase == LOST or (self.exit_code == -signal.SIGABRT and watched)

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others; False if stopped, as the others may have come since."""
        record = self.record or self.early
        return record is not None and record.waits and not self.stopped

    @property
    def error(self) -> str:
        """First line of the error that it ended with; empty if it did not."""
        return self.record.error.partition("\n")[0] if self.record is not None else ""

    @property
    def is_late(self) -> bool:
        """Whether the rank made no progress for longer than its phase, or an outage, may take."""
        limit_s = self._limit_s
        return limit_s > 0 and max(limit_s, self.patience_s * self.waits) < self.idle_s

    @property
    def _limit_s(self) -> float:
        """Time that it may make no progress; 0 for no limit. A stopped rank always has a limit."""
        if self.record is not None and self.record.limit_s:
            return self.record.limit_s
        if self.stopped:
            return self.start_timeout_s
        if self.record is not None:
            return 0.0
        if self.early is not None and not self.early.limit_s:  # for example, it tokenizes text
            return 0.0
        return self.start_timeout_s

    @property
    def hangs(self) -> bool:
        """Whether the rank hangs: late without waiting for others."""
        return self.is_late and not self.waits

    @property
    def was_refused(self) -> bool:
        """Whether the rank ended with an orderly error, before training or to stop at an anomaly."""
        return (self.exit_code or 0) > 0 and (self.record is None or self.record.phase == REFUSED)


@dataclass(frozen=True)
class Diagnosis:
    """The reason why a job has failed.

    Attributes:
        kind: died, gave up, hangs, circle (ranks wait for each other's messages), link, refused
            (the request cannot work) or stopped (by a signal to a rank).
        rank: The rank that failed first; of a circle or link the rank that waited first; -1: all
            ranks together.
        victims: Descriptions of the ranks that waited for it.
    """

    kind: str
    rank: int
    text: str
    record: Record | None = None
    exit_code: int = 0
    victims: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether a restart would be useless."""
        return self.kind in ("refused", "stopped")

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values, with the rank's action if it was in one."""
        plain: dict[str, Any] = {
            "kind": self.kind,
            "rank": self.rank,
            "text": self.text,
            "exit_code": self.exit_code,
            "victims": list(self.victims),
        }
        if self.record is not None and self.record.error:
            plain["error"] = self.record.error
        if (record := self.record) is not None:
            plain |= {"phase": record.phase, "stage": record.who.get("stage")}
            if record.kind:
                plain |= {
                    "step": record.step,
                    "action": record.action,
                    "microbatch": record.microbatch,
                }
            if record.waits:
                plain |= {"operation": record.operation, "peers": list(record.peers)}
        return plain


def find_stall(ranks: Sequence[Seen]) -> bool:
    """Return whether a rank hangs, or all ranks wait in vain."""
    return any(seen.hangs for seen in (*ranks, *_savers(ranks))) or all(
        seen.is_late for seen in ranks
    )


def _savers(ranks: Sequence[Seen]) -> list[Seen]:
    return [seen.saving for seen in ranks if seen.saving is not None]


def diagnose(ranks: Sequence[Seen]) -> Diagnosis:
    """Find out why a rank has ended, or why the job makes no progress."""
    dead = [seen for seen in ranks if seen.failed and not seen.is_victim]
    if asked := [seen for seen in dead if seen.exit_code in _ASKED]:
        return _of("stopped", asked[0], f"{asked[0].who} was asked to stop", ranks)
    if dead:
        # a rank that a signal ended is the cause rather than one that failed; then the first to
        # go silent
        first = min(
            dead,
            key=lambda seen: ((seen.exit_code or 0) > 0, seen.record.time if seen.record else 0.0),
        )
        refused = all(seen.was_refused for seen in dead)
        if first.error and sum(seen.error == first.error for seen in ranks) > 1:
            kind = "refused" if refused else "gave up"
            text = "stopped" if refused else "gave up"
            return Diagnosis(
                kind, -1, f"all ranks {text}: {first.error}", first.record, first.exit_code or 0
            )
        if refused:  # if the lowest of them is rank 0, it has reported the error itself
            return _ended("refused", dead[0], ranks)
        return _ended("died", first, ranks)
    idle = [
        seen
        for seen in ranks
        if not (seen.failed or seen.is_victim or seen.waits) and seen.idle_s > 0
    ]
    if idle := [*idle, *(seen for seen in _savers(ranks) if seen.hangs)]:
        worst = max(idle, key=lambda seen: (seen.is_late, seen.stopped, seen.idle_s))
        return _of(
            "hangs",
            worst,
            hang_text(worst.who, worst.idle_s, _doing(worst), stopped=worst.stopped),
            ranks,
        )
    circle, peers = _circle(ranks)
    first = circle[0]
    if _may_be_the_plan(circle):
        return _of("circle", first, _circle_text(circle), ranks)
    others = ", ".join(map(str, peers)) or "any other"
    text = f"the link between rank {first.rank} and rank {others} is lost"
    return _of("link", first, f"{text}: {first.who}{_doing(first)}", ranks)


def _circle_text(circle: Sequence[Seen]) -> str:
    """Describe the messages that a circle of ranks waits for, its two causes, and how to test them.

    The records do not say whether a missing message was sent, so that both causes are possible.
    """
    ranks = ", ".join(str(seen.rank) for seen in circle)
    waits = "; ".join(f"{seen.who}{_doing(seen)}{_message(seen.record)}" for seen in circle)
    return (
        f"ranks {ranks} wait for each other in a circle: {waits}. Either the plan deadlocks, "
        f"or a link between these ranks is lost. If a restart stops at the same actions, "
        f"suspect the plan: run `hybridpar check` on the configuration and report it, or try "
        f"another pipeline.schedule. If it stops elsewhere or continues, suspect the link"
    )


def _transfer(record: Record | None) -> tuple[Kind, int] | None:
    """Return the receive that would end a record's wait, and its stage; None if there is none."""
    if record is None or record.kind not in Kind.__members__:
        return None
    row = ACTION_SPECS[Kind[record.kind]]
    if record.operation == "recv" and row.receive is not None:
        return row.receive, record.stage
    if record.operation == "send" and row.matching_recv is not None:
        return row.matching_recv, record.stage + row.peer_offset
    return None


def _message(record: Record | None) -> str:
    """Return the message that a record waits for, as ', for the activation of ..'."""
    transfer = _transfer(record)
    if record is None or transfer is None:
        return ""
    kind, stage = transfer
    receive = f"{kind.value}{record.microbatch}@{stage}"
    name = ACTION_SPECS[kind].name
    if record.operation == "send":
        return f", for {receive} to take the {name}"
    return f", for the {name} of {receive}"


def _may_be_the_plan(circle: Sequence[Seen]) -> bool:
    """Return whether a circle of ranks may be due to the order of their plans.

    It is not if two ranks wait at both ends of the messages into one stage. Messages keep their
    order, so that the send and the receive of the first unfinished message have both begun, and
    only the link can be at fault.
    """
    transfers = [_transfer(seen.record) for seen in circle]
    if len(circle) < 2 or not any(transfers):
        return False
    return len(circle) > 2 or transfers[0] != transfers[1]


def _circle(ranks: Sequence[Seen]) -> tuple[Sequence[Seen], Sequence[int]]:
    """Return the ranks that wait in a circle, from the first to wait on, and whom that one awaits.

    Ranks outside of the circle wait for a rank in it, and may have begun to wait earlier. If there
    is no circle: one waiting rank.
    """
    seen = {one.rank: one for one in ranks}
    waits = {one.rank: one.record for one in ranks if one.record is not None and one.record.waits}
    if not waits:
        return ranks[:1], ()
    path: list[int] = []
    rank: int | None = min(waits, key=lambda rank: waits[rank].time)
    while rank is not None and rank not in path:
        path.append(rank)
        rank = _wanted(waits[rank], waits)
    if rank is None:  # it waits in a collective in which all its peers wait as well
        return [seen[path[-1]]], waits[path[-1]].peers
    path = path[path.index(rank) :]
    start = path.index(min(path, key=lambda rank: waits[rank].time))
    circle = [*path[start:], *path[:start]]
    return [seen[rank] for rank in circle], [circle[1 % len(circle)]]


def _wanted(mine: Record, waits: Mapping[int, Record]) -> int | None:
    """Return a rank that this one waits for, and that waits for something else; None if none."""
    peers = [peer for peer in mine.peers if peer in waits]
    return next(
        (
            peer
            for peer in peers
            if len(mine.peers) == 1
            or (waits[peer].operation, waits[peer].axis) != (mine.operation, mine.axis)
        ),
        None,
    )


def _ended(kind: str, culprit: Seen, ranks: Sequence[Seen]) -> Diagnosis:
    text = f"{culprit.who} {end_text(culprit.exit_code or 0)}{_doing(culprit)}"
    return _of(kind, culprit, text, ranks)


def _of(kind: str, culprit: Seen, text: str, ranks: Sequence[Seen]) -> Diagnosis:
    victims = tuple(
        f"{seen.who}{_doing(seen)}" for seen in ranks if seen.rank != culprit.rank and seen.waits
    )
    return Diagnosis(kind, culprit.rank, text, culprit.record, culprit.exit_code or 0, victims)


def end_text(code: int) -> str:
    """Return how a process ended whose exit code (minus a signal's number) is not 0."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed (exit code {code})"


def _doing(seen: Seen) -> str:
    return " before it had begun" if seen.record is None else seen.record.doing()
