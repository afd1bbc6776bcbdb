"""REDUCE, NORM and the gather of new weights, in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.simulated_rank import Rank, Wake


@dataclass(slots=True, eq=False)
class Meeting:
    """A collective of one batch: complete once `size` ranks have issued it."""

    kind: Kind
    batch: int
    size: int
    issued: list[tuple[Rank, int]] = field(default_factory=list)  # ranks, and at which step
    ready: float = 0.0
    end: float | None = None


class Collectives:
    """The collectives of all batches.

    Args:
        ready: By rank, the time at which it has its first weights. None: at once.
        wake: Resumes a waiting rank.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        costs: Costs,
        ready: Sequence[float] | None,
        wake: Wake,
    ):
        p = len(ranks)
        self._ranks = ranks
        self._reduce_times = expand(costs.reduce, p)
        self._norm_time = costs.norm
        self._gather_times = expand(costs.gather, p)
        self._tied = costs.tied and p > 1
        self._wake = wake
        self._meetings: dict[tuple[Kind, int, int], Meeting] = {}  # the number is the first rank
        self._normed: list[set[int]] = [set() for _ in ranks]  # batches whose NORM it has issued
        self._newest = [0] * p  # weight version
        self._gathered = [ready[r] if ready else 0.0 for r in range(p)]  # when that is there

    @property
    def gathers(self) -> bool:
        """Whether gathering new weights takes time."""
        return any(self._gather_times)

    # -- dependencies

    def gathered(self, rank: Rank, action: Action, start: float) -> float:
        """Dependency of F: the replicas have gathered the newest weights, if it uses these."""
        if action.version < self._newest[rank.index]:
            return start
        return max(start, self._gathered[rank.index])

    def reduced(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of a NORM that reads the result of its REDUCE."""
        return self._once_over(rank, self._reduction(rank, action.microbatch), start)

    def normed(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of HOST and UPDATE: the norm, or without a norm the rank's REDUCE."""
        batch = action.microbatch
        if batch in self._normed[rank.index]:
            return self._once_over(rank, self._norm_of(batch), start)
        return self._once_over(rank, self._reduction(rank, batch), start)

    def _once_over(self, rank: Rank, meeting: Meeting, start: float) -> float | None:
        if meeting.end is None:
            rank.waits_for = meeting
            return None
        return max(start, meeting.end)

    # -- effects

    def reduce(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of REDUCE: the rank joins it."""
        meeting = self._reduction(rank, action.microbatch)
        self._join(meeting, rank, step, rank.clock)
        if len(meeting.issued) == meeting.size:
            self._end(meeting, self._reduce_times[rank.index])

    def norm(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of NORM: the rank joins it. It starts once every rank's REDUCE is complete."""
        batch = action.microbatch
        meeting = self._norm_of(batch)
        self._normed[rank.index].add(batch)
        self._join(meeting, rank, step, rank.clock)
        if len(meeting.issued) == meeting.size:  # all have issued their REDUCE before
            meeting.ready = max(meeting.ready, *(self.reduction_end(r, batch) for r in self._ranks))
            self._end(meeting, self._norm_time)

    def gather(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of UPDATE: starts to gather the new weights."""
        self._newest[rank.index] = action.version
        self._gathered[rank.index] = rank.clock + self._gather_times[rank.index]
        rank.ends[step] = self._gathered[rank.index]

    def reduction_end(self, rank: Rank, batch: int) -> float:
        """Return when the rank's REDUCE of a batch is complete, as far as known."""
        return self._reduction(rank, batch).end or 0.0

    def _join(self, meeting: Meeting, rank: Rank, step: int, ready: float) -> None:
        meeting.issued.append((rank, step))
        meeting.ready = max(meeting.ready, ready)

    def _end(self, meeting: Meeting, duration: float) -> None:
        """Set the end, because all ranks have joined, and wake the ranks that wait for it."""
        meeting.end = meeting.ready + duration
        for member, step in meeting.issued:
            member.ends[step] = meeting.end
            self._wake(member, meeting)

    def _reduction(self, rank: Rank, batch: int) -> Meeting:
        """Return the rank's REDUCE of a batch; tied, the first and the last rank share one."""
        if self._tied and rank.index in (0, len(self._ranks) - 1):
            return self._meeting(Kind.REDUCE, batch, 0, 2)
        return self._meeting(Kind.REDUCE, batch, rank.index, 1)

    def _norm_of(self, batch: int) -> Meeting:
        return self._meeting(Kind.NORM, batch, 0, len(self._ranks))

    def _meeting(self, kind: Kind, batch: int, first: int, size: int) -> Meeting:
        key = (kind, batch, first)
        if key not in self._meetings:
            self._meetings[key] = Meeting(kind, batch, size)
        return self._meetings[key]
