"""Samples of a model of one's own that come one after the other: from an iterable, or from a
function of the first one's number. Position n of the stream is the n-th of them; nothing is
shuffled."""

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
    """An endless stream: what has ended begins again. Every process reads all of it, and must find
    the same.

    source: an object that is iterated anew for every pass, or a function that returns an iterator
    which begins at a given position; with a function, a resumed run skips nothing. kept: number of
    newest samples that stay in memory, for those who ask for one again.

    Raises: DataError if it is empty, gives batches, or items that are no dicts of arrays or break
        the model's rules.
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
                f"{self._where()} gives batches (of {size}), which must be samples: batch_size=None"
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
        """The samples at these positions. Shapes: [b] -> [b, ..] by name."""
        samples = ((self._where(n), self._at(n)) for n in counter.tolist())
        return self._rules.as_input(stacked(samples, self._form))

    def num_targets(self, counter: NDArray[np.int64]) -> int:
        """How many labels count in the samples at these positions."""
        if not self._model.counts_targets:
            return len(counter)
        return sum(self._model.num_targets(self._at(n)) for n in counter.tolist())

    def num_repeats(self, count: int) -> int:
        """Return how many of the first `count` samples have come before; 0 until the first pass has
        ended."""
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
        """The next item, of the next pass where one has ended."""
        nothing = object()
        if (item := next(self._items, nothing)) is not nothing:
            return item
        if self._size is None:
            self._size = self._next
        self._items = self._begun(self._next)
        if (item := next(self._items, nothing)) is nothing:
            if self._next and callable(self._source):
                raise DataError(
                    f"{self._where()} ends after {self._next} samples, and its function returns an "
                    "empty "
                    f"iterator for position {self._next}; try one that begins again, at position "
                    f"% {self._next}"
                )
            raise DataError(
                f"{self._where()} ends after {self._next} samples and cannot be gone through "
                "again; try a "
                "function that returns an iterator which begins at a given position"
            )
        return item

    def _open(self, position: int) -> None:
        """Begins at a position, or, where that cannot be, at the start."""
        if self._passes and not callable(self._source) and iter(self._source) is self._source:
            raise DataError(
                f"{self._where(position)} has been read before and is gone: it can be gone through "
                "once; "
                "try a function that returns an iterator which begins at a given position"
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
