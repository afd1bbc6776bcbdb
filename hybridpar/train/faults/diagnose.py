"""Diagnosis of a failed job: which rank failed, in which action, and who waited for it.

It is made from the flight records and exit codes of all ranks.

    rank 3 died                     the first one that ended otherwise than by losing another
    all gave up                     they agreed on an error, and ended
    rank 1 hangs                    it goes on no more and waits for nobody; the others wait, or
                                    train on while it saves
    ranks 0, 1 wait in a circle     all wait, and these for messages of each other: the plan or a
                                    link is at fault
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

    record: None where it has opened no recorder yet. exit_code: None while it lives, the negative
    signal where one has ended it. idle_s: how long its record has not changed. saving: the state of
    its thread that writes a checkpoint, while it does. patience_s: how long it may at least wait
    for others. stopped: by SIGSTOP, or a debugger. early: its record before it may write into the
    run folder, which says no place on the grid yet. start_timeout_s: how long it may stand still
    before it has the other record.
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
        who = self.record.who if self.record is not None else None
        return (
            f"rank {self.rank}" if who is None else describe(self.rank, who["stages"], who["place"])
        )

    @property
    def failed(self) -> bool:
        return bool(self.exit_code)

    @property
    def is_victim(self) -> bool:
        """Whether it ended because another one had, or by NCCL's watchdog while it waited for
        another.

        There is no watchdog yet at the rendezvous, where Gloo aborts if it can start but some of
        its threads.
        """
        record = self.record or self.early  # a job that only evaluates has none in a run folder
        if record is None:
            return False
        watched = self.waits and record.operation != RENDEZVOUS
        return record.phase == LOST or (self.exit_code == -signal.SIGABRT and watched)

    @property
    def waits(self) -> bool:
        """Whether it waits for others; of one that is stopped it is unknown whether they have
        come."""
        record = self.record or self.early
        return record is not None and record.waits and not self.stopped

    @property
    def error(self) -> str:
        """First line of the error with which it has ended itself; empty where it has not."""
        return self.record.error.partition("\n")[0] if self.record is not None else ""

    @property
    def is_late(self) -> bool:
        """Whether it has stood still for longer than its phase may take, or while it waits than an
        outage may."""
        limit_s = self._limit_s
        return limit_s > 0 and max(limit_s, self.patience_s * self.waits) < self.idle_s

    @property
    def _limit_s(self) -> float:
        """How long it may stand still, 0 for as long as it likes; one that is stopped has a limit
        in every phase."""
        if self.record is not None and self.record.limit_s:
            return self.record.limit_s
        if self.stopped:
            return self.start_timeout_s
        if self.record is not None:
            return 0.0
        if self.early is not None and not self.early.limit_s:  # it prepares its text, say
            return 0.0
        return self.start_timeout_s

    @property
    def hangs(self) -> bool:
        return self.is_late and not self.waits

    @property
    def was_refused(self) -> bool:
        """Whether it ended in good order, before it could begin or to stop at an anomaly, and would
        end so again."""
        return (self.exit_code or 0) > 0 and (self.record is None or self.record.phase == REFUSED)


@dataclass(frozen=True)
class Diagnosis:
    """The reason why a job has failed.

    kind: died, gave up, hangs, circle (ranks wait for messages of each other), link, refused (the
    request cannot work), stopped (by a signal to a rank). text: for people. rank: the one that
    failed first; of a circle or a link the one that waits first; -1: all together.
    """

    kind: str
    rank: int
    text: str
    record: Record | None = None
    exit_code: int = 0
    victims: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether there is no use in starting again."""
        return self.kind in ("refused", "stopped")

    def as_json(self) -> dict[str, Any]:
        """The diagnosis in plain values; those of an action only where the rank was in one."""
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
    """Whether a rank hangs, or all of them wait for something that does not come."""
    return any(seen.hangs for seen in (*ranks, *_savers(ranks))) or all(
        seen.is_late for seen in ranks
    )


def _savers(ranks: Sequence[Seen]) -> list[Seen]:
    return [seen.saving for seen in ranks if seen.saving is not None]


def diagnose(ranks: Sequence[Seen]) -> Diagnosis:
    """Finds out why a rank of a job has ended, or why the job stands still."""
    dead = [seen for seen in ranks if seen.failed and not seen.is_victim]
    if asked := [seen for seen in dead if seen.exit_code in _ASKED]:
        return _of("stopped", asked[0], f"{asked[0].who} was asked to stop", ranks)
    if dead:
        # whoever was ended by a signal did not choose to; of several the first that went silent
        first = min(
            dead,
            key=lambda seen: ((seen.exit_code or 0) > 0, seen.record.time if seen.record else 0.0),
        )
        refused = all(seen.was_refused for seen in dead)
        if first.error and sum(seen.error == first.error for seen in ranks) > 1:
            kind, text = ("refused", "stopped") if refused else ("gave up", "gave up")
            return Diagnosis(
                kind, -1, f"all ranks {text}: {first.error}", first.record, first.exit_code or 0
            )
        if refused:  # the lowest of them has said it, where it is the first of all
            lowest = dead[0]
            return _of("refused", lowest, f"{lowest.who} {_end(lowest)}{_doing(lowest)}", ranks)
        return _of("died", first, f"{first.who} {_end(first)}{_doing(first)}", ranks)
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
    """The messages that the ranks of a circle wait for, both causes that this can have, and how to
    tell them apart.

    The records do not tell whether a message that has not come was sent, so neither cause can be
    left out.
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
    """The receive that ends a record's wait, and its stage; None if it waits for no message between
    stages."""
    if record is None or record.kind not in Kind.__members__:
        return None
    row = ACTION_SPECS[Kind[record.kind]]
    if record.operation == "recv" and row.receive is not None:
        return row.receive, record.stage
    if record.operation == "send" and row.matching_recv is not None:
        return row.matching_recv, record.stage + row.peer_offset
    return None


def _message(record: Record | None) -> str:
    """', for the activation of RECV_F7@1', the message between stages that a record waits for;
    empty without one."""
    transfer = _transfer(record)
    if record is None or transfer is None:
        return ""
    kind, stage = transfer
    receive = f"{kind.value}{record.microbatch}@{stage}"
    name = ACTION_SPECS[kind].name
    return (
        f", for {receive} to take the {name}"
        if record.operation == "send"
        else f", for the {name} of {receive}"
    )


def _may_be_the_plan(circle: Sequence[Seen]) -> bool:
    """Whether the ranks of a circle may wait by the order of their plan.

    They do not where two ranks wait at both ends of the messages into one stage. Messages keep
    their order, so the send and the receive of the first unfinished one have begun, and only the
    link is left to blame.
    """
    transfers = [_transfer(seen.record) for seen in circle]
    if len(circle) < 2 or not any(transfers):
        return False
    return len(circle) > 2 or transfers[0] != transfers[1]


def _circle(ranks: Sequence[Seen]) -> tuple[Sequence[Seen], Sequence[int]]:
    """The ranks that wait for each other in a circle, from the one that began first on, and for
    whom that one waits.

    Ranks outside of the circle wait for one in it, and may have begun before. Without a circle: one
    rank that waits.
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
    if rank is None:  # the last one waits in a collective in which all others of it wait, too
        return [seen[path[-1]]], waits[path[-1]].peers
    path = path[path.index(rank) :]
    start = path.index(min(path, key=lambda rank: waits[rank].time))
    circle = [*path[start:], *path[:start]]
    return [seen[rank] for rank in circle], [circle[1 % len(circle)]]


def _wanted(mine: Record, waits: Mapping[int, Record]) -> int | None:
    """A rank that this one waits for, and that waits for something else."""
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


def _of(kind: str, culprit: Seen, text: str, ranks: Sequence[Seen]) -> Diagnosis:
    victims = tuple(
        f"{seen.who}{_doing(seen)}" for seen in ranks if seen.rank != culprit.rank and seen.waits
    )
    return Diagnosis(kind, culprit.rank, text, culprit.record, culprit.exit_code or 0, victims)


def _end(seen: Seen) -> str:
    code = seen.exit_code or 0
    return (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
    )


def _doing(seen: Seen) -> str:
    return " before it had begun" if seen.record is None else seen.record.doing()
