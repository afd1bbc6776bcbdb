"""The order of interleaved 1F1B: a rank holds v virtual stages, and fills and drains in 1/v of the
time.

Two ranks with two virtual stages each, four micro-batches; b is the second virtual stage, and a
stage is half as long as in 1f1b:

    rank 0  F0- F1- F0b F1b F2-     B0b---- F3- B1b---- F2b B0----- F3b B1-----     B2b----     B3b---- B2----- B3-----*
    rank 1      F0- F1- F0b B0b---- F1b B1b---- F2- B0----- F3- B1----- F2b B2b---- F3b B3b---- B2----- B3-----        *

2bw continues with the next batch instead of draining, so no rank waits, and p-1-r forwards ahead
instead of 2(p-1-r) are enough (if a backward takes no less time than a forward). Interleaving then
saves no drain time, but balances blocks of different cost, because a rank holds stages from several
places.

The micro-batches of a batch are processed in rounds: a round passes through the first virtual
stages of all ranks, then through the second ones, and so on; backwards likewise, the last virtual
stage first. A round of p micro-batches fills the ring exactly. So m // p rounds take all m of them,
each of at least p and as equal as possible, the larger ones first: if p does not divide m, some
rounds are larger, because one that is too small would leave gaps. For any m >= p the bubble of a
batch is (p-1)(F+B)/v: (p-1)/(m v) of the work.

Source: Narayanan et al., arXiv 2104.04473, section 2.2, for p that divides m and rounds of p. The
order and the warm-up, 2(p-1-r) + (v-1)p, are from there; the uneven rounds are not.

p = ranks, v = virtual stages, m = micro-batches of a batch, r = rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, count, islice, pairwise

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import INPUTS, Kind, Step
from hybridpar.schedules.pipeline_shape import PipelineShape

SizeOf = Callable[[PipelineShape, int], int]  # (shape, rank) -> a number


def rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Return the micro-batches of each round."""
    number = max(num_microbatches // num_ranks, 1)
    least, larger = divmod(num_microbatches, number)
    stops = [(least + 1) * min(i, larger) + least * max(i - larger, 0) for i in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(stops)]


def runs_ahead(factor: int) -> SizeOf:
    """Return a function that computes a rank's warm-up: k(p-1-r) forwards, k = factor, and the
    forwards of other virtual stages before the last one of the largest round.

    With k = 1 a gradient reaches the previous rank just in time; each further step keeps one more
    micro-batch on every link, both ways, so that transfers of up to (k-1)/2 periods (a virtual
    stage's forward and backward) cost no time.

    Source: with one virtual stage and k = 2, eager 1F1B, arXiv 2211.05322.
    """

    def ahead(shape: PipelineShape, rank: int) -> int:
        m = shape.num_microbatches
        p = shape.num_ranks
        largest = -(-m // max(m // p, 1))  # of the rounds
        return factor * (p - 1 - rank) + (shape.virtual_stages - 1) * largest

    return ahead


def forward_order(
    shape: PipelineShape, rank: int, num_microbatches: int
) -> Iterator[tuple[int, int]]:
    """Yield stage and micro-batch of a rank's forwards, in order."""
    if shape.virtual_stages == 1:
        yield from ((rank, k) for k in range(num_microbatches))
        return
    stages = shape.stages_of(rank)
    for together in rounds(num_microbatches, shape.num_ranks):
        yield from ((stage, k) for stage in stages for k in together)


def order(
    shape: PipelineShape, rank: int, early: int, first_batch: int, num_batches: int | None
) -> Iterator[Step]:
    """Yield a rank's steps: `early` forwards ahead, then a forward and a backward alternately, then
    the remaining backwards. num_batches: None: endless.
    """
    stages = shape.stages_of(rank)
    mirror = stages[0] + stages[-1]
    forwards, backwards = (_endless(shape, rank, first_batch, num_batches) for _ in range(2))
    for stage, k in islice(forwards, early):
        yield Kind.F, stage, k
    for stage, k in forwards:
        yield Kind.F, stage, k
        stage, k = next(backwards)
        yield Kind.B, mirror - stage, k
    for stage, k in backwards:
        yield Kind.B, mirror - stage, k


def _endless(
    shape: PipelineShape, rank: int, first: int, num: int | None
) -> Iterator[tuple[int, int]]:
    """Yield the forwards of batches [first, first + num), or without end."""
    m = shape.num_microbatches
    for batch in count(first) if num is None else range(first, first + num):
        yield from ((stage, batch * m + k) for stage, k in forward_order(shape, rank, m))


@lru_cache(maxsize=8)
def _places(shape: PipelineShape) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Return, for a batch's forwards, the place of each virtual stage and micro-batch, and the
    latest micro-batch started up to each place.
    """
    steps = [
        (stage // shape.num_ranks, k)
        for stage, k in forward_order(shape, 0, shape.num_microbatches)
    ]
    return {step: place for place, step in enumerate(steps)}, list(
        accumulate((k for _, k in steps), max)
    )


def place(shape: PipelineShape, kind: Kind, stage: int, microbatch: int) -> int:
    """Return how many forwards, or backwards, of a rank come before one of its steps."""
    if shape.virtual_stages == 1:
        return microbatch
    batch, k = divmod(microbatch, shape.num_microbatches)
    chunk = stage // shape.num_ranks
    places, _ = _places(shape)
    return (
        batch * len(places)
        + places[chunk if kind is Kind.F else shape.virtual_stages - 1 - chunk, k]
    )


def begun(shape: PipelineShape, place: int) -> int:
    """Return the latest micro-batch that a rank has started with its forward of that place."""
    if shape.virtual_stages == 1:
        return place
    _, latest = _places(shape)
    batch, rest = divmod(place, len(latest))
    return batch * shape.num_microbatches + latest[rest]


class Receives:
    """Order in which a rank posts its receives: each at the action that needs it, or, if it closes
    a ring, when it arrives.

    A transfer from the last rank to the first (backward: the first to the last) arrives p forwards
    after it was sent, in a round of more than p before its turn. It is received when it arrives:
    with one queue for all transfers of a rank, as in NCCL, it would block all others until then. It
    is also received before the rank's own send of that time: all other ranks send first, and if all
    did, each would wait for the next one to receive.

    `lean`: with a lean warm-up ranks are closer together, and a transfer has gone round after a
    little more than half of the ring. (The fractions were found by trying: with them no transport
    deadlocked for any p up to 40; for `endless` schedules, up to 12.)
    """

    def __init__(self, shape: PipelineShape, *, lean: bool = False, endless: bool = False):
        self.shape = shape
        p = shape.num_ranks
        stages = range(shape.num_stages)
        back = 2 * p // 3 if endless else p // 2
        self._round = (7 * p // 12, back) if lean else (p - 1, p - 1)  # forwards, backwards
        # Stages whose input has gone round the ring, backwards and forwards, and stages that
        # receive any input.
        self._closing = [
            set() if shape.is_v else {stage for stage in stages if shape.rank_of(stage) == rank}
            for rank in (p - 1, 0)
        ]
        self._fed = [
            {stage for stage in stages if shape.carries(-side, stage, side)} for side in (1, -1)
        ]
        self._count = dict.fromkeys(INPUTS, 0)
        self._due: dict[Kind, deque[tuple[int, int, int]]] = {kind: deque() for kind in INPUTS}

    def arriving(self, action: Action) -> list[tuple[int, int]]:
        """Return the receives (stage, micro-batch) to post when the rank reaches this F, B or I."""
        kind = action.kind
        stage = action.stage
        due = self._due[action.kind]
        number = self._count[kind]
        self._count[kind] += 1
        forward = kind is Kind.F
        here = (stage, action.microbatch)
        if stage not in self._closing[forward]:
            return [here] if stage in self._fed[forward] else []
        following = stage + (self.shape.num_ranks if forward else -self.shape.num_ranks)
        if following in self._fed[forward]:
            due.append((number + self._round[not forward], following, action.microbatch))
        found = []
        while due and (due[0][0] <= number or due[0][1:] == here):
            found.append(due.popleft()[1:])
        return found
