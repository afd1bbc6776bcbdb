"""The order of interleaved 1F1B: a rank holds v chunks of the model, and fills and drains in 1/v of the time.

Two ranks with two chunks each, four micro-batches; b is the second chunk, a stage half of what 1f1b's would be:

    rank 0  F0- F1- F0b F1b F2-     B0b---- F3- B1b---- F2b B0----- F3b B1-----     B2b----     B3b---- B2----- B3-----*
    rank 1      F0- F1- F0b B0b---- F1b B1b---- F2- B0----- F3- B1----- F2b B2b---- F3b B3b---- B2----- B3-----        *

The micro-batches of a batch go in rounds: a round's pass through the first chunks of all ranks, then through the second
ones, and so on; backwards likewise, the last chunk first. A round of p micro-batches is what the ring has room for. So
m // p rounds take all m of them, each of at least p and as equal as can be, the larger ones first: where p does not
divide m, rounds are larger rather than one of them too small, which would leave gaps. From m = p on, whatever m is, the
bubble is (p-1)(F+B)/v of a batch: (p-1)/(m v) of the work.

Source: Narayanan et al., arXiv 2104.04473, section 2.2, where p divides m and all rounds are of p. Theirs is the order
and the warm-up, 2(p-1-r) + (v-1)p; the uneven rounds are not.

p = ranks, v = chunks, m = micro-batches of a batch, r = rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, pairwise

from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import INPUTS, Kind
from hybridpar.pipeline.plan.sizes import Sizes

Step = tuple[Kind, int, int]  # kind, stage, micro-batch


def rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """The micro-batches of each round."""
    number = max(num_microbatches // num_ranks, 1)
    least, larger = divmod(num_microbatches, number)
    stops = [(least + 1) * min(i, larger) + least * max(i - larger, 0) for i in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(stops)]


def warmup(sizes: Sizes, rank: int) -> int:
    """Forwards that a rank runs ahead: the last chunk of the first round then has its turn on the last rank."""
    largest = len(rounds(sizes.num_microbatches, sizes.num_ranks)[0])
    return 2 * (sizes.num_ranks - 1 - rank) + (sizes.chunks - 1) * largest


def lean_warmup(sizes: Sizes, rank: int) -> int:
    """The same where gradients of weights fill the drain: a backward to the input comes back in half of the time, and
    p-1-r fewer forwards are held for it."""
    return warmup(sizes, rank) - (sizes.num_ranks - 1 - rank)


def forward_order(sizes: Sizes, rank: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """Yields stage and micro-batch of a rank's forwards, in order."""
    stages = sizes.stages_of(rank)
    for together in rounds(num_microbatches, sizes.num_ranks):
        yield from ((stage, k) for stage in stages for k in together)


@lru_cache(maxsize=256)
def batch_order(sizes: Sizes, rank: int, early: int) -> tuple[Step, ...]:
    """Steps of a rank for a batch, whose micro-batches count from 0: `early` forwards ahead, then a forward and a
    backward by turns, then the backwards that are left."""
    ahead = list(forward_order(sizes, rank, sizes.num_microbatches))
    first, last = sizes.stages_of(rank)[0], sizes.stages_of(rank)[-1]
    steps_f: list[Step] = [(Kind.F, stage, k) for stage, k in ahead]
    steps_b: list[Step] = [(Kind.B, first + last - stage, k) for stage, k in ahead]
    by_turns = zip(steps_f[early:], steps_b, strict=False)
    return (*steps_f[:early], *chain.from_iterable(by_turns), *steps_b[max(len(ahead) - early, 0):])


class Receives:
    """Order in which a rank posts its receives: each when it comes to the action that needs it, or where it closes a
    ring when it arrives.

    What the last rank sends to the first (backward: the first to the last) comes back to the rank p forwards after it
    left, which in a round of more than p is before its turn. It is taken when it comes: where the transfers of a rank
    queue, as with NCCL, it would stand in the way of all others until then. And before the rank's own send of that time
    is in the queue: all other ranks send first, and if all did, each would wait for the next one to receive.

    `lean`: with a lean warm-up ranks are closer together, and what goes round is back after a little more than half
    of the ring. (The fractions were found by trying: with them no transport deadlocked for any p up to 40.)
    """

    def __init__(self, sizes: Sizes, *, lean: bool = False):
        self.sizes = sizes
        p, stages = sizes.num_ranks, range(sizes.num_stages)
        self._round = (7 * p // 12, p // 2) if lean else (p - 1, p - 1)  # forwards, backwards
        # stages where what comes has gone round, backwards and forwards, and those to which anything comes
        self._closing = [set() if sizes.is_v else {stage for stage in stages if sizes.rank_of(stage) == rank}
                         for rank in (p - 1, 0)]
        self._fed = [{stage for stage in stages if sizes.peer(stage, side) is not None} for side in (1, -1)]
        self._count = dict.fromkeys(INPUTS, 0)
        self._due: dict[Kind, deque[tuple[int, int, int]]] = {kind: deque() for kind in INPUTS}

    def arriving(self, action: Action) -> list[tuple[int, int]]:
        """Stage and micro-batch of what the rank is to receive when it comes to this F, B or I."""
        kind, stage, due = action.kind, action.stage, self._due[action.kind]
        number = self._count[kind]
        self._count[kind] += 1
        forward, here = kind is Kind.F, (stage, action.microbatch)
        if stage not in self._closing[forward]:
            return [here] if stage in self._fed[forward] else []
        following = stage + (self.sizes.num_ranks if forward else -self.sizes.num_ranks)
        if 0 <= following < self.sizes.num_stages:
            due.append((number + self._round[not forward], following, action.microbatch))
        found = []
        while due and (due[0][0] <= number or due[0][1:] == here):
            found.append(due.popleft()[1:])
        return found
