"""When each action of a plan ran, and what follows from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.pipeline.plan.action import COMPUTE, Kind, Plan
from hybridpar.pipeline.plan.liveness import Live, peak_live

_TAKES_TIME = COMPUTE | {Kind.UPDATE}


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a plan ran: `starts[rank][i]` to `ends[rank][i]` for `plan[rank][i]`.

    SEND, RECV, REDUCE and NORM start when the rank issues them and end when they are complete; meanwhile the rank
    does other things.
    """

    plan: Plan
    starts: Mapping[int, Sequence[float]]
    ends: Mapping[int, Sequence[float]]
    makespan: float

    def busy(self, rank: int) -> float:
        """Time that the rank computes or updates."""
        return sum(
            end - start
            for action, start, end in zip(self.plan[rank], self.starts[rank], self.ends[rank], strict=True)
            if action.kind in _TAKES_TIME
        )

    def idle_share(self, rank: int) -> float:
        """Share of the makespan that the rank does nothing (its bubble)."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def step_time(self, num_microbatches: int) -> float:
        """Steady-state time of a batch: from the start of its first forward on rank 0 to that of the next batch.

        Mean over the second half of the plan without its last batch, so fill and drain do not count; needs at least
        four batches, and schedules with a long pipeline of few micro-batches need more to settle.
        """
        starts = [
            start
            for action, start in zip(self.plan[0], self.starts[0], strict=True)
            if action.kind is Kind.F and action.microbatch % num_microbatches == 0
        ]
        assert len(starts) >= 4, f"{len(starts)} batches: a steady state shows in 4 or more"
        middle = len(starts) // 2
        return (starts[-1] - starts[middle]) / (len(starts) - 1 - middle)

    def peak_live(self, rank: int, num_microbatches: int) -> Live:
        """The most activations, weight versions and gradients that the rank holds at once."""
        return peak_live(self.plan[rank], num_microbatches)
