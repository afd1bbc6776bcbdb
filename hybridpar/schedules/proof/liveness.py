"""Count what a rank holds at once, from its list: activations, weight versions, gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, BESIDE, Kind, Step


@dataclass(frozen=True, slots=True)
class Live:
    """Counts on one rank, right after an action; or the peaks over a list.

    Attributes:
        activations: Micro-batches between their forward and the end of their backward, counted on
            each stage that the rank holds.
        versions: Weights that are the newest, or that a later action uses.
        gradients: Batches with a backward done whose update is not done.
    """

    activations: int = 0
    versions: int = 0
    gradients: int = 0

    def peak(self, other: Live) -> Live:
        """Return the larger of each count."""
        return Live(
            max(self.activations, other.activations),
            max(self.versions, other.versions),
            max(self.gradients, other.gradients),
        )


def most_held(steps: Iterable[Step]) -> int:
    """Return the most micro-batches between forward and backward, over one rank's steps."""
    return max(accumulate(ACTION_SPECS[kind].holds for kind, _, _ in steps), default=0)


def live_counts(
    actions: Sequence[Action], num_microbatches: int, keep: Collection[int] = ()
) -> Iterator[Live]:
    """Yield the counts after each action; versions in `keep` are needed to the end."""
    last_use = {
        action.version: i for i, action in enumerate(actions) if ACTION_SPECS[action.kind].reads
    }
    last_use |= dict.fromkeys(keep, len(actions))
    updates = ((a.microbatch, i) for i, a in enumerate(actions) if a.kind is Kind.UPDATE)
    updated = dict(updates)  # by batch: its last part
    made = {action.version for action in actions if ACTION_SPECS[action.kind].makes}
    newest = min(made, default=max(last_use, default=0) + 1) - 1
    versions = {newest} | last_use.keys() - made  # at the start
    activations = 0
    gradients = set()
    counts = Live(0, len(versions), 0)
    for i, action in enumerate(actions):
        row = ACTION_SPECS[action.kind]
        if action.kind in BESIDE and not row.makes:
            yield counts
            continue
        # from the first part forward to the last one backward
        activations += row.holds * (action.part == 0)
        if row.adds:
            gradients.add(action.microbatch // num_microbatches)
        elif row.makes:
            if updated.get(action.microbatch) == i:
                gradients.discard(action.microbatch)
            newest = max(newest, action.version)
            versions.add(action.version)
        versions = {v for v in versions if v == newest or last_use.get(v, -1) > i}
        counts = Live(activations, len(versions), len(gradients))
        yield counts


def peak_live(actions: Sequence[Action], num_microbatches: int) -> Live:
    """Return the largest counts that one rank reaches."""
    return reduce(Live.peak, live_counts(actions, num_microbatches), Live())
