"""What the steps of a plan cost: the input of `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridpar.pipeline.plan.action import Kind

PerStage = float | Sequence[float]  # one number for all stages, or one for each
PerRank = float | Sequence[float]  # likewise for the ranks, which are the stages where each has one
PerLink = float | Sequence[float]  # likewise for the links: link r joins ranks r and r + 1 (a ring: mod p), both ways


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, in any one unit of time.

    On the rank's own time: forward, backward: of one micro-batch. update: the optimizer step. calls: what a rank spends
    to issue a SEND, a RECV, a REDUCE or a NORM, by kind; it takes effect when the call is over.

    Beside it: reduce: gradients over the replicas. norm: the grid-wide reduction. gather: new weights over the replicas
    (sharded optimizer state), after an UPDATE; the first F that uses them waits. transfer: how long one activation
    occupies a link; latency: from its leaving to its arrival.

    tied: REDUCE also meets over the first and the last stage (tied embeddings). blocking_norm: NORM waits for its
    REDUCE (a CPU rank that must read the result) instead of queueing behind it. serial_links: the transfers of a rank
    on one axis share a queue.

    variation: by kind (F, B) and stage, what micro-batch after micro-batch takes as a multiple of that mean; from its
    end on again from the start. Where the time varies, stages wait for each other more than the means let them.

    cores: how many ranks of the pipeline can work at full speed at once; where more do, all slow down alike. None:
    each has its own. transfer_work: work on a transfer before it occupies the link, on a thread of its own, which
    shares these cores.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    update: PerRank = 0.0
    calls: Mapping[Kind, PerRank] = field(default_factory=dict)
    reduce: PerRank = 0.0
    norm: float = 0.0
    gather: PerRank = 0.0
    transfer: PerLink = 0.0
    latency: PerLink = 0.0
    tied: bool = False
    blocking_norm: bool = False
    serial_links: bool = False
    cores: float | None = None
    transfer_work: PerLink = 0.0
    variation: Mapping[Kind, Sequence[Sequence[float]]] = field(default_factory=dict)


def expand(cost: PerStage | PerLink, size: int) -> Sequence[float]:
    """One number for each stage or link."""
    if isinstance(cost, int | float):
        return [cost] * size
    assert len(cost) == size, f"{len(cost)} costs for {size} stages"
    return cost
