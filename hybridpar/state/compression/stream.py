"""Exchange of a batch's factors block by block, while its backwards run.

    backward      | mb 0 | mb 1          | mb 2 | mb 3          | ..      blocks of two micro-batches
    block 0               a P a S b P         b S                         buckets a and b
    block 1                                          a P a S b P ..

A block has two messages, P and S (methods/sbpca.py). P of a bucket starts when the last backward of
the block has completed the bucket's factors. S follows when the next bucket starts, or the next
backward, and then the factors are freed. So a rank holds the factors of at most one block, and
two buckets' factors of the micro-batch that ends it.

The batch before must have been updated: until then complete blocks wait. The last block belongs to
the reducer, which also sends what is not compressed. All replicas take the same steps in the same
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from hybridpar.comm import Works
from hybridpar.state.layout import Bucket


class Exchange:
    """The steps of one bucket's all-reduce, taken one at a time; wait for it as for a Work.

    Args:
        steps: Yields the communication of each step.
        rounds: Upper bound of the number of messages that follow each other.
        over_stages: Ranks of several stages take part.
    """

    def __init__(self, steps: Iterator[Works], rounds: int, *, over_stages: bool = False):
        self._steps = steps
        self.rounds = rounds
        self.over_stages = over_stages
        self._work: Works | None = next(steps)

    def proceed(self) -> None:
        """Wait for the message under way and send the next one, if there is another."""
        if self.rounds > 1 and self._work is not None:
            self._advance()

    def wait(self) -> None:
        """Return once the bucket has been all-reduced."""
        while self._work is not None:
            self._advance()

    def _advance(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = next(self._steps, None)
        self.rounds = self.rounds - 1

    def is_done(self) -> bool:
        """Return whether the communication started so far is complete."""
        return self._work is None or self._work.is_done()


class BlockStream:
    """Starts the exchange of each block but a batch's last; without buckets, of none.

    Args:
        buckets: For each bucket the segment whose backward completes it, and its factored
            parameters.
        start: Starts to exchange a bucket's next block; returns None if that is not possible yet.
    """

    def __init__(
        self,
        buckets: Mapping[Bucket, tuple[int, frozenset[str]]],
        start: Callable[[Bucket], Exchange | None],
    ):
        self._buckets = buckets
        self._start = start
        self._missing: dict[Bucket, set[str]] = {}
        """Buckets of the segment whose block ends, not complete yet, in their order."""
        self._complete: deque[Bucket] = deque()
        """Buckets with a complete block, which waits to be exchanged."""
        self._running: dict[Bucket, Exchange] = {}
        self._newest: Exchange | None = None

    def begin(self) -> None:
        """Begin a batch."""
        self._missing.clear()
        self._complete.clear()

    def arm(self, part: int) -> None:
        """Call before the backward of a segment that ends a block."""
        self._missing = {
            bucket: set(names) for bucket, (own, names) in self._buckets.items() if own == part
        }

    def disarm(self) -> None:
        """Note that weight gradients of the backward are deferred: `arm` comes again before them."""
        self._missing.clear()

    def ready(self, name: str) -> None:
        """Note that a parameter has all factors of the block."""
        for missing in self._missing.values():
            missing.discard(name)
        self._start_complete()

    def end(self) -> None:
        """Note that the backward is complete: parameters without factors of the block get none."""
        for missing in self._missing.values():
            missing.clear()
        self._start_complete()

    def _start_complete(self) -> None:
        for bucket in list(self._missing):
            if self._missing[bucket]:
                break
            del self._missing[bucket]
            self._complete.append(bucket)
        while self._complete and self._start_next():
            pass

    def _start_next(self) -> bool:
        """Start the oldest complete block, once the bucket's block before has been exchanged."""
        bucket = self._complete[0]
        before = self._running.get(bucket)
        if before is not None and before.rounds > 1:
            return False
        if before is not None:
            before.wait()
            del self._running[bucket]
        if self._newest is not None:
            self._newest.proceed()
        exchange = self._start(bucket)
        if exchange is None:
            return False
        self._complete.popleft()
        self._running[bucket] = exchange
        self._newest = exchange
        return True

    def proceed(self) -> None:
        """Take the next step of what is under way, before a backward."""
        for exchange in self._running.values():
            exchange.proceed()
        while self._complete and self._complete[0] not in self._running and self._start_next():
            pass

    def finish(self, bucket: Bucket) -> None:
        """Wait for a bucket's block under way, before its last block starts. Complete blocks are left
        to that exchange.
        """
        self._complete = deque(other for other in self._complete if other != bucket)
        running = self._running.pop(bucket, None)
        if running is not None:
            running.wait()
        if self._newest is not None:
            self._newest.proceed()

    def note(self, bucket: Bucket, exchange: Exchange) -> None:
        """Take the next step of a bucket's last exchange when the next bucket starts."""
        self._newest = exchange if bucket in self._buckets else None
