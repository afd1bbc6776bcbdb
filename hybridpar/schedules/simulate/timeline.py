"""Times at which each action of a plan ran, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.kinds import BESIDE, COMPUTE, PER_ITEM, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds: four digits, from a second on all digits in front of the
    point."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times at which each action of a plan ran.

    `plan[rank][i]` used the rank's own time from `starts[rank][i]` until `returns[rank][i]`, and
    was complete at `ends[rank][i]`. A computation returns when it is complete, an asynchronous
    action as soon as it is issued, and UPDATE when the weights are made, which other ranks may
    still have to gather.

    stalls: by rank and step, if not zero: for a computation or an EVICT, how long it waited for
    items of the rank's state or activations alone; for a FETCH or RELEASE, the time from its call
    until the engine started it.
    """

    plan: Plan
    starts: Mapping[int, Sequence[float]]
    ends: Mapping[int, Sequence[float]]
    makespan: float
    returns: Mapping[int, Sequence[float]]
    stalls: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    def actions(self, rank: int) -> Iterator[tuple[Action, float, float, float]]:
        """Yield each action of a rank with start, return and end."""
        return zip(
            self.plan[rank], self.starts[rank], self.returns[rank], self.ends[rank], strict=True
        )

    @property
    def shape(self) -> PipelineShape:
        """Shape of the pipeline, found from the plan."""
        return PipelineShape.found(
            {
                action.stage: rank
                for rank, actions in self.plan.items()
                for action in actions
                if action.kind in COMPUTE
            },
            max(1, len(self.plan)),
        )

    def shown(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Yield actions with start and end as pictures show them (UPDATE: its own work)."""
        stalls = self.stalls.get(rank, {})
        for step, (action, start, done, end) in enumerate(self.actions(rank)):
            began = start + stalls.get(step, 0.0) * (action.kind in PER_ITEM)
            yield action, began, end if action.kind in BESIDE else done

    def scaled(self, by: float) -> Timeline:
        """Return the timeline in another unit of time."""
        starts, ends, returns = (
            {rank: [by * time for time in times] for rank, times in table.items()}
            for table in (self.starts, self.ends, self.returns)
        )
        stalls = {
            rank: {step: by * time for step, time in of_rank.items()}
            for rank, of_rank in self.stalls.items()
        }
        return Timeline(self.plan, starts, ends, by * self.makespan, returns, stalls)

    def cut_at(
        self, until: float, *, since: float = 0.0, ranks: Sequence[int] | None = None
    ) -> Timeline:
        """Return the actions of some ranks (None: all) in a window of time, which then begins at 0.

        Actions are cut off at its edges.
        """
        until = min(self.makespan, until)
        plan: dict[int, tuple[Action, ...]] = {}
        tables: list[dict[int, list[float]]] = [{}, {}, {}]
        stalls: dict[int, dict[int, float]] = {}
        for rank in self.plan if ranks is None else ranks:
            stalled = self.stalls.get(rank, {})
            kept = [
                (step, action, times)
                for step, (action, *times) in enumerate(self.actions(rank))
                if times[0] < until and (times[0] >= since or max(times) > since)
            ]
            plan[rank] = tuple(action for _, action, _ in kept)
            for number, table in enumerate(tables):
                cut = (min(max(times[number], since), until) for _, _, times in kept)
                table[rank] = [time - since for time in cut]
            stalls[rank] = {
                place: stalled[step]
                for place, (step, _, times) in enumerate(kept)
                if step in stalled and times[0] >= since
            }
        starts, returns, ends = tables
        return Timeline(plan, starts, ends, until - since, returns, stalls)

    def busy(self, rank: int, since: float = 0.0, until: float = inf) -> float:
        """Return the time in [since, until] that the rank itself spends on actions."""
        return sum(
            max(0.0, min(done, until) - max(start, since))
            for _, start, done, _ in self.actions(rank)
            if done > start
        )

    def item_waits(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Yield actions that wait for items: action, start, and the wait before it."""
        for step, stall in self.stalls.get(rank, {}).items():
            if self.plan[rank][step].kind not in PER_ITEM:
                yield self.plan[rank][step], self.starts[rank][step], stall

    def idle_share(self, rank: int, since: float = 0.0, until: float | None = None) -> float:
        """Return the share of [since, until] in which the rank is idle (its bubble)."""
        until = self.makespan if until is None else until
        return 1 - self.busy(rank, since, until) / (until - since) if until > since else 0.0

    def batch_starts(self, num_microbatches: int) -> list[float]:
        """Return the times at which rank 0 starts the first forward of each batch."""
        return [
            start
            for action, start in zip(self.plan[0], self.starts[0], strict=True)
            if action.kind is Kind.F
            and action.stage == 0
            and action.microbatch % num_microbatches == 0
            and action.part == 0
        ]

    def steady(self, num_microbatches: int) -> tuple[float, float, int]:
        """Return a steady stretch of complete batches on rank 0: start, end, number of batches.

        If the plan drains before and after a batch and repeats itself, that batch. Else the second
        half of the plan without its last batch, so that fill and drain do not count; that needs at
        least four batches, and schedules with a long pipeline of few micro-batches need more to
        become steady.
        """
        if repeating := self.drained(num_microbatches):
            return *repeating[0], 1
        starts = self.batch_starts(num_microbatches)
        assert len(starts) >= 4, f"{len(starts)} batches: a steady state shows in 4 or more"
        middle = len(starts) // 2
        return starts[middle], starts[-1], len(starts) - 1 - middle

    def step_time(self, num_microbatches: int) -> float:
        """Return the steady-state time from a batch's first forward on rank 0 to the next one's."""
        since, until, num_batches = self.steady(num_microbatches)
        return (until - since) / num_batches

    def steady_step(self, num_microbatches: int) -> tuple[float, tuple[float, ...]]:
        """Return the steady-state time of a batch, and the idle share of each rank in it."""
        windows = self.drained(num_microbatches)
        num_batches = 1
        if not windows:
            *window, num_batches = self.steady(num_microbatches)
            windows = [(window[0], window[1])] * len(self.plan)
        since, until = windows[0]
        return (until - since) / num_batches, tuple(
            self.idle_share(rank, *window)
            for rank, window in zip(sorted(self.plan), windows, strict=True)
        )

    def drained(self, num_microbatches: int) -> list[tuple[float, float]]:
        """Return a batch on each rank, from update to update, if all later ones repeat it.

        They do if ranks start a batch once they have made the previous update, and all of them end
        it equally long after that, because a batch depends on the past only through the time
        differences between ranks. It is the second batch, or the last but one: the last posts no
        receives for another, which take time only if calls do.
        """
        windows = []
        took = []
        for rank, actions in sorted(self.plan.items()):
            updates = list(
                {
                    action.microbatch: i
                    for i, action in enumerate(actions)  # the last part of each
                    if action.kind is Kind.UPDATE
                }.values()
            )
            if len(updates) < 2 or updates[-1] != len(actions) - 1:
                return []
            before, last = updates if len(updates) == 2 else updates[-3:-1]
            begun = next(
                (actions[i].microbatch for i in range(before, -1, -1) if actions[i].kind is Kind.F),
                -1,
            )
            if begun >= (actions[before].microbatch + 1) * num_microbatches:
                return []
            returns = self.returns[rank]
            ends = self.ends[rank]
            windows.append((returns[before], returns[last]))
            took += [returns[last] - returns[before], ends[last] - ends[before]]
        return windows if took and max(took) - min(took) <= SAME * self.makespan else []


SAME = 1e-12
"""Share of a plan's time by which times that are equal may differ by rounding."""
