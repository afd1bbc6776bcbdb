"""Samples of a custom model that come one after the other, from an iterable or a function of the
first sample's number. Position n of the stream is the n-th sample; nothing is shuffled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import ModelSpec
from hybridpar.data.mapped import as_arrays, form_of, stacked
from hybridpar.data.sample_rules import Arrays, rules_of
from hybridpar.errors import DataError


class StreamedSamples:
    """An endless stream of samples, which starts over when it ends. Every process reads all of it
    and must get the same samples.

    Args:
        source: An object that is iterated once per pass, or a function that returns an iterator
            starting at a given position. With a function, a resumed run skips nothing.
        kept: Number of newest samples that stay in memory, for callers that ask for one again.

    Raises:
        DataError: It is empty, yields batches, or its items are not dicts of arrays or break the
            model's rules.
    """

    def __init__(self, model: ModelSpec, source: Any, part: str, kept: int):
        self._model = model
        self._source = source
        self._part = part
        self._most = kept
        self._rules = rules_of(model)
        self._kept: dict[int, Arrays] = {}
        self._next, self._items, self._passes = 0, iter(()), 0
        self._size: int | None = None  # known once a pass has ended
        if isinstance(size := getattr(source, "batch_size", None), int):
            raise DataError(
                f"{self._where()} yields batches (of {size}); must yield samples: use "
                f"batch_size=None"
            )
        self._open(0)
        first = self._at(0)
        self._form = form_of(first)
        digest = hashlib.sha256(repr(self._form).encode())
        for _, array in sorted(first.items()):
            digest.update(array.tobytes())
        self.fingerprint = digest.hexdigest()[:32]
        """Identity of the first sample: what follows it is not known."""

    def batch(self, counter: NDArray[np.int64]) -> Arrays:
        """Return the samples at these positions. Shapes: [b] -> [b, ..] by name."""
        samples = ((self._where(n), self._at(n)) for n in counter.tolist())
        return self._rules.as_input(stacked(samples, self._form))

    def num_targets(self, counter: NDArray[np.int64]) -> int:
        """Return how many labels count in the samples at these positions."""
        if not self._model.counts_targets:
            return len(counter)
        return sum(self._model.num_targets(self._at(n)) for n in counter.tolist())

    def num_repeats(self, count: int) -> int:
        """Return how many of the first `count` samples repeat an earlier one; 0 until the first
        pass has ended."""
        return 0 if self._size is None else max(count - self._size, 0)

    def _at(self, position: int) -> Arrays:
        if (
            position not in self._kept
            and (position < self._next or callable(self._source))
            and position != self._next
        ):
            self._open(position)
        while position not in self._kept:
            sample = as_arrays(self._item(), where := self._where(self._next))
            self._rules.check(sample, where)
            self._kept[self._next] = sample
            self._next += 1
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
        return self._kept[position]

    def _item(self) -> Any:
        """Return the next item, from the next pass if this one has ended."""
        nothing = object()
        if (item := next(self._items, nothing)) is not nothing:
            return item
        if self._size is None:
            self._size = self._next
        self._items = self._begun(self._next)
        if (item := next(self._items, nothing)) is nothing:
            if self._next and callable(self._source):
                raise DataError(
                    f"{self._where()} ends after {self._next} samples, and its function returns "
                    f"an empty iterator for position {self._next}; to repeat the samples, start "
                    f"at position % {self._next}"
                )
            raise DataError(
                f"{self._where()} ends after {self._next} samples and cannot be iterated again; "
                f"give a function that returns an iterator starting at a given position"
            )
        return item

    def _open(self, position: int) -> None:
        """Start at a position or, if the source cannot, at the beginning."""
        if self._passes and not callable(self._source) and iter(self._source) is self._source:
            raise DataError(
                f"{self._where(position)} was read before, and this iterator can be used once "
                f"only; give a function that returns an iterator starting at a given position"
            )
        self._kept.clear()
        self._next = position if callable(self._source) else 0
        self._items = self._begun(position)

    def _begun(self, position: int) -> Iterator[Any]:
        self._passes += 1
        return iter(self._source(position) if callable(self._source) else self._source)

    def _where(self, position: int | None = None) -> str:
        return f"dataset({self._part!r}) of {self._model.kind}" + (
            "" if position is None else f", sample {position}"
        )
