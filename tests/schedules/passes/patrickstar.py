"""PatrickStar, in small: chunks of tensors, their states, their layout and what ranks send each
other.

Source: Fang et al., PatrickStar, arXiv 2108.05818, and its code.
"""

from enum import IntEnum


class TensorState(IntEnum):
    """State of a tensor; a chunk with memory is in the least of its tensors' states."""

    COMPUTE = 0  # cannot move
    HOLD = 1
    HOLD_AFTER_FWD = 2
    HOLD_AFTER_BWD = 3
    FREE = 4


def chunk_state(tensors, *, has_payload=True):
    """A chunk's state; None: released."""
    return min(tensors) if has_payload else None


class Ranks:
    """Chunks of one group, a chunk on each of p ranks, through a step; counts the bytes that a rank
    sends.

    A rank has its own chunk always, the others' from the first touch in a sweep until all are done
    with.
    """

    def __init__(self, num_ranks, chunk_bytes, *, broadcast=False):
        self.p = num_ranks
        self.chunk_bytes = chunk_bytes
        self.broadcast = broadcast
        self.states = [TensorState.HOLD] * num_ranks
        self.payload = [rank == 0 for rank in range(num_ranks)]  # as rank 0 sees it
        self.bytes = 0.0
        self.gathers = 0
        self.scatters = 0

    def _collective(self, factor):
        """A ring moves (p - 1) / p of the group for each rank; a broadcast of each chunk twice as
        much."""
        self.bytes += factor * (self.p - 1) / self.p * self.p * self.chunk_bytes

    def before(self, chunk):
        if chunk_state([self.states[chunk]], has_payload=self.payload[chunk]) is None:
            self.gathers += 1
            self._collective(2 if self.broadcast else 1)
            self.payload = [True] * self.p
        self.states[chunk] = TensorState.COMPUTE

    def after(self, chunk, state):
        self.states[chunk] = state
        if all(held is state for held in self.states):
            if state is TensorState.HOLD_AFTER_BWD:
                self.scatters += 1
                self._collective(1)
            self.payload = [rank == 0 for rank in range(self.p)]
            if state is TensorState.HOLD_AFTER_FWD:  # so a recomputation does not look like an end
                self.states = [TensorState.HOLD] * self.p

    def step(self):
        for chunk in range(self.p):
            self.before(chunk)
            self.after(chunk, TensorState.HOLD_AFTER_FWD)
        for chunk in reversed(range(self.p)):
            self.before(chunk)
            self.after(chunk, TensorState.HOLD_AFTER_BWD)


def next_use(moments, now, total):
    """Moment at which a chunk is used next, after `now`, in batches of `total` moments that
    repeat."""
    return min(
        (moment for moment in moments if moment > now), default=total + min(moments, default=total)
    )


def victim(moments_of, now, total):
    """The chunk that gives way at a moment."""
    return max(moments_of, key=lambda chunk: (next_use(moments_of[chunk], now, total), -chunk))


def layout(modules, capacity):
    """Elements used of each chunk: a module's tensors go together into the last chunk, or else into
    a new one.

    None where one does not fit.
    """
    used = [0]
    for module in modules:
        if module > capacity:
            return None
        if used[-1] + module > capacity:
            used.append(0)
        used[-1] += module
    return used


def waste(modules, capacity):
    """Elements of the chunks that nothing uses; None where a module does not fit."""
    used = layout(modules, capacity)
    return None if used is None else len(used) * capacity - sum(used)


def best_capacity(modules, candidates):
    """The capacity with the least waste, the first of equals."""
    return min(
        (c for c in candidates if waste(modules, c) is not None), key=lambda c: waste(modules, c)
    )
