"""Costs of the steps of a plan: the input of `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, Kind
from hybridpar.schedules.simulate.network import Network

PerStage = float | Sequence[float]  # one number for all stages, or one for each
PerRank = float | Sequence[float]  # likewise for the ranks, which are the stages where each has one
PerLink = float | Sequence[float]  # likewise for links: r joins ranks r and r + 1 (a ring: mod p)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Costs:
    """Time that each step takes, in any one unit.

    On the rank's own time: forward and backward of one micro-batch. backward_input: I's part of a
    split backward, W takes the rest; None: half. update: the optimizer step. calls: what a rank
    spends to issue a SEND, RECV, REDUCE or NORM, by kind, and to move a MiB of an item (FETCH,
    RELEASE); it takes effect when the call is over.

    Beside it: reduce: gradients over the replicas. norm: the grid-wide reduction. gather: new
    weights over the replicas (sharded optimizer state) after an UPDATE; the first F that uses them
    waits. transfer: how long an activation occupies a link; transfer_back: a gradient, the other
    way; None: as long. latency: from leaving to arrival, and from the posting of a receive until
    the sender knows.

    fetch, release: how long a MiB occupies the engine that brings items of the rank's state into
    its fast tier, and the one that writes changed items back (copy_engines.py); or the collectives
    that gather weights from replicas and sum gradients over them. An action waits for the items
    that it accesses. shared: the same for collectives (fetch, release and their calls), if a rank
    has both.

    offload, reload: how long a micro-batch's tensors of one stage occupy the engine to the slow
    tier, and the one back. An EVICT waits for the first, a backward for the second.

    to_host, host, from_host: how long a batch occupies the engine of gradients to the host, the
    update there, and the engine of new weights back, all groups together. host_shares: of each
    group, by rank; none: all of a rank are equal. An UPDATE waits for its group. host_works: all
    three are work on the cores that ranks share, so both slow down.

    tied: REDUCE also meets over the first and the last stage (tied embeddings). blocking_norm: NORM
    waits for its REDUCE (a CPU rank must read the result) instead of queueing behind it.
    serial_links: a rank's transfers on one axis share a queue.

    variation: by kind (F; B, which I and W share) and stage, each micro-batch's time as a multiple
    of the mean; repeats at its end. Stages wait longer for each other if times vary than their
    means say.

    cores: how many ranks of the pipeline can work at full speed at once; if more do, all slow down
    alike. None: each has its own. transfer_work: work on a transfer before it occupies the link, on
    a thread of its own on these cores.

    network: links that transfers share, instead of transfer, transfer_back and latency.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    update: PerRank = 0.0
    calls: Mapping[Kind, PerRank] = field(default_factory=dict)
    reduce: PerRank = 0.0
    norm: float = 0.0
    gather: PerRank = 0.0
    transfer: PerLink = 0.0
    transfer_back: PerLink | None = None
    latency: PerLink = 0.0
    fetch: PerRank = 0.0
    release: PerRank = 0.0
    shared: Costs | None = None
    offload: PerRank = 0.0
    reload: PerRank = 0.0
    to_host: PerRank = 0.0
    host: PerRank = 0.0
    from_host: PerRank = 0.0
    host_shares: Sequence[Sequence[float]] = ()
    host_works: bool = False
    tied: bool = False
    blocking_norm: bool = False
    serial_links: bool = False
    cores: float | None = None
    transfer_work: PerLink = 0.0
    variation: Mapping[Kind, Sequence[Sequence[float]]] = field(default_factory=dict)
    backward_input: PerStage | None = None
    network: Network | None = None

    def durations(self, kind: Kind, homes: Sequence[int]) -> list[Sequence[float]]:
        """Return the rank's time of actions of a kind, by stage and micro-batch; the sequence
        repeats at its end. homes: ranks of the stages.
        """
        if kind in COMPUTE:
            means = self._means(kind, len(homes))
        else:
            cost = expand(
                self.update if kind is Kind.UPDATE else self.calls.get(kind, 0),
                max(homes, default=-1) + 1,
            )
            means = [cost[rank] for rank in homes]
        factors = self.variation.get(ACTION_SPECS[kind].part_of or kind) or [(1.0,)] * len(means)
        return [
            [mean * factor for factor in of_stage]
            for mean, of_stage in zip(means, factors, strict=True)
        ]

    def with_ranks_of(self, other: Costs, of_other: Sequence[bool], homes: Sequence[int]) -> Costs:
        """Return these costs with the action times of some ranks taken from `other`.

        Args:
            other: Costs for the same shape. Times of asynchronous work are not taken from it.
            of_other: For each rank, whether it is one of these.
            homes: Ranks of the stages.
        """

        def by_rank(mine: PerRank, others: PerRank) -> PerRank:
            both = zip(
                expand(mine, len(of_other)), expand(others, len(of_other)), of_other, strict=True
            )
            return tuple(theirs if theirs_counts else own for own, theirs, theirs_counts in both)

        def by_stage(mine: Sequence[_T], others: Sequence[_T]) -> tuple[_T, ...]:
            return tuple(
                others[stage] if of_other[rank] else mine[stage] for stage, rank in enumerate(homes)
            )

        def means(kind: Kind) -> tuple[float, ...]:
            return by_stage(self._means(kind, len(homes)), other._means(kind, len(homes)))

        even: Sequence[Sequence[float]] = [(1.0,)] * len(homes)
        variation = {
            kind: by_stage(self.variation.get(kind, even), other.variation.get(kind, even))
            for kind in {**self.variation, **other.variation}
        }
        calls = {
            kind: by_rank(cost, other.calls.get(kind, cost)) for kind, cost in self.calls.items()
        }
        return replace(
            self,
            forward=means(Kind.F),
            backward=means(Kind.B),
            backward_input=means(Kind.I),
            calls=calls,
            update=by_rank(self.update, other.update),
            variation=variation,
        )

    def _means(self, kind: Kind, num_stages: int) -> Sequence[float]:
        whole = expand(self.forward if kind is Kind.F else self.backward, num_stages)
        if ACTION_SPECS[kind].part_of is None:
            return whole
        inputs: Sequence[float] = [b / 2 for b in whole]
        if self.backward_input is not None:
            inputs = expand(self.backward_input, num_stages)
        if kind is Kind.I:
            return inputs
        return [max(0.0, b - i) for b, i in zip(whole, inputs, strict=True)]


def expand(cost: PerStage | PerLink, size: int) -> Sequence[float]:
    """Return one number for each stage or link."""
    if isinstance(cost, int | float):
        return [cost] * size
    assert len(cost) == size, f"{len(cost)} costs for {size} stages"
    return cost
