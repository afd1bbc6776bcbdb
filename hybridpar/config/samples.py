"""Samples for whatever runs a custom model without training it: `verify`, profiles, shapes and
predicted memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from hybridpar.errors import config_error

_MOST = 256
"""Samples that are taken from a stream."""


class SampleSource:
    """The first samples of a data set.

    dataset: what training is given in place of the data set: the data set itself, or of an iterator
    one that yields
        the samples again that were taken from it.
    """

    def __init__(self, dataset: Any):
        self.dataset: Any = _Peeked(dataset) if hasattr(dataset, "__next__") else dataset
        self._taken: list[Any] = []

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        """Return one sample, the same for the same arguments. Raises: ConfigError if the data set
        is empty."""
        samples: Any = self.dataset
        if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
            samples = self._taken = self._taken or self._first()
        if not len(samples):
            raise config_error(
                "datasets", "train", "must have at least one sample", '[{"x": .., "y": ..}, ..]'
            )
        return samples[(number + seed) % len(samples)]

    def _first(self) -> list[Any]:
        if isinstance(self.dataset, _Peeked):
            return self.dataset.peek(_MOST)
        return list(islice(self.dataset(0) if callable(self.dataset) else self.dataset, _MOST))


class _Peeked:
    """An iterator whose next samples may be looked at before they are taken."""

    def __init__(self, samples: Iterator[Any]):
        self._samples = samples
        self._seen: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._samples)

    def peek(self, count: int) -> list[Any]:
        """Return the next samples, at most so many."""
        self._seen.extend(islice(self._samples, max(count - len(self._seen), 0)))
        return list(self._seen)
