"""The factors of gradients that a rank holds, action by action: see state/compression/stream.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hybridpar.nn.placement import split_ranges
from hybridpar.prediction.footprint import Footprint
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind

Key = tuple[int, int, int, int]
"""Batch, block, stage and segment."""


class HeldFactors:
    """Bytes of factors between a backward and the exchange of their block.

    Args:
        num_microbatches: Micro-batches of a batch.
    """

    def __init__(self, num_microbatches: int):
        self._m = num_microbatches
        self._bytes: dict[Key, int] = {}
        self._waiting: deque[tuple[Key, Footprint]] = deque()
        """Complete blocks, before the update of the batch before."""
        self._running: list[Key] = []
        """Blocks that the next backward frees."""
        self._updated: int | None = None
        """Batches whose update is made."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return sum(self._bytes.values())

    def before_backward(self) -> int:
        """Take the next step of each block under way, and start one that waits. Return the bytes
        that this frees.
        """
        before = self.num_bytes
        for key in self._running:
            del self._bytes[key]
        self._running = []
        if self._waiting and self._is_open(self._waiting[0][0]):
            key, fp = self._waiting.popleft()
            self._bytes[key] = fp.ended
            self._running.append(key)
        return before - self.num_bytes

    def exchanges(self, action: Action, fp: Footprint) -> bool:
        """Return whether a backward ends a block, which is exchanged at once."""
        return self._ends(action, fp) and self._is_open(self._key(action, fp))

    def after_backward(self, action: Action, fp: Footprint) -> None:
        """Hold the factors of a backward with its weight gradients."""
        if not fp.factors:
            return
        key = self._key(action, fp)
        if self._updated is None:
            self._updated = key[0]
        self._bytes[key] = self._bytes.get(key, 0) + fp.factors
        if not self._ends(action, fp):
            return
        is_last = key[1] + 1 == fp.num_blocks
        if is_last:
            if self._is_open(key) and not self._waiting:
                self._bytes[key] = fp.ended
        elif self._is_open(key):
            for other, _ in self._waiting:
                del self._bytes[other]
            self._waiting.clear()
            self._bytes[key] = fp.ended
            self._running.append(key)
        else:
            self._waiting.append((key, fp))

    def drop(self, action: Action) -> None:
        """Free a batch's factors at its NORM or UPDATE."""
        batch = action.microbatch
        self._bytes = {key: size for key, size in self._bytes.items() if key[0] != batch}
        self._waiting = deque(one for one in self._waiting if one[0][0] != batch)
        self._running = [key for key in self._running if key[0] != batch]
        if action.kind is Kind.UPDATE:
            self._updated = batch + 1

    def _is_open(self, key: Key) -> bool:
        return self._updated is None or key[0] <= self._updated

    def _blocks(self, fp: Footprint) -> Sequence[tuple[int, int]]:
        return split_ranges(self._m, max(fp.num_blocks, 1))

    def _key(self, action: Action, fp: Footprint) -> Key:
        batch, index = divmod(action.microbatch, self._m)
        block = sum(index >= stop for _, stop in self._blocks(fp))
        return batch, block, action.stage, action.part

    def _ends(self, action: Action, fp: Footprint) -> bool:
        index = action.microbatch % self._m
        return fp.num_blocks > 0 and any(index + 1 == stop for _, stop in self._blocks(fp))
