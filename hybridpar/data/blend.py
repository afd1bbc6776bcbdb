"""Several data sets as one endless stream, each with its share, at any length of the run.

At each position the data set that is furthest behind its share comes next. With shares that are
whole numbers (w of W), the sequence repeats after W positions with every debt settled, so a table
of W entries answers for any position:

    shares 2 : 1        position   0 1 2 | 3 4 5 | ...        data set   0 1 0 | 0 1 0 | ...

Why it repeats: before the choice the debts add up to 1, so the largest is above 0 and above -1
after it was paid, and other debts only grow. After W positions all are whole numbers above -1 whose
sum is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridpar.data.order import SampleOrder
from hybridpar.errors import config_error

_TICKS = 10_000  # finest share is 1 / _TICKS


class Dataset(Protocol):
    """A member of a blend: GPTDataset, BertDataset, or a custom one."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]: ...

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int: ...


class Blend:
    """An endless shuffled stream of samples from weighted data sets (default: in proportion to
    their samples).

    Raises:
        ConfigError: The weights are not one positive number per data set, each at least 1 / 10000
            of their sum.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] = (), *, seed: int):
        self.datasets = tuple(datasets)
        self.shares = _whole_shares(tuple(weights) or _by_size(self.datasets), len(self.datasets))
        self._choice, self._rank = _period(self.shares)
        self._orders = [
            SampleOrder(len(d), seed, f"data.order.{i}") for i, d in enumerate(self.datasets)
        ]
        text = f"{seed} {self.shares} {[d.fingerprint for d in self.datasets]}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def locate(
        self, counter: ArrayLike
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set, its epoch, and the sample in it, at each position of the stream.

        Shapes: `counter` [n] non-negative; returns three of [n].
        """
        rounds, position = np.divmod(np.asarray(counter, np.int64), len(self._choice))
        members = self._choice[position]
        drawn = rounds * np.array(self.shares)[members] + self._rank[position]
        epochs = np.zeros_like(drawn)
        samples = np.zeros_like(drawn)
        for member in np.unique(members):
            mine = members == member
            epochs[mine], samples[mine] = self._orders[member].locate(drawn[mine])
        return members, epochs, samples

    def batch(self, counter: ArrayLike) -> dict[str, NDArray[Any]]:
        """Return the samples at these positions. Shapes: `counter` [b]; returns the data sets'
        entries, [b, ..]."""
        members, epochs, samples = self.locate(counter)
        merged: dict[str, NDArray[Any]] = {}
        for member in np.unique(members):
            mine = np.flatnonzero(members == member)
            for name, values in self.datasets[member].batch(samples[mine], epochs[mine]).items():
                if name not in merged:
                    merged[name] = np.empty((len(members), *values.shape[1:]), values.dtype)
                merged[name][mine] = values
        return merged

    def num_targets(self, counter: ArrayLike) -> int:
        """Return how many labels count in the samples at these positions. Shapes: `counter` [b]."""
        members, epochs, samples = self.locate(counter)
        groups = [(self.datasets[m], np.flatnonzero(members == m)) for m in np.unique(members)]
        return sum(dataset.num_targets(samples[mine], epochs[mine]) for dataset, mine in groups)

    def num_repeats(self, count: int) -> int:
        """Return how many of the first `count` positions repeat an earlier sample."""
        rounds, left = divmod(count, len(self._choice))
        drawn = rounds * np.array(self.shares) + np.bincount(
            self._choice[:left], minlength=len(self.datasets)
        )
        return sum(
            max(int(n) - len(dataset), 0) for n, dataset in zip(drawn, self.datasets, strict=True)
        )


def _by_size(datasets: Sequence[Dataset]) -> tuple[float, ...]:
    """Return weights in proportion to the samples, but none below the finest share."""
    sizes = [len(d) for d in datasets]
    return tuple(max(float(n), 2 * sum(sizes) / _TICKS) for n in sizes)


def _whole_shares(weights: tuple[float, ...], num_datasets: int) -> tuple[int, ...]:
    """Return weights as whole numbers whose sum is at most _TICKS; exact if the weights are (as
    0.7 and 0.3)."""
    if not weights or len(weights) != num_datasets:
        raise config_error(
            "data.weights",
            weights,
            f"must have one weight for each of {num_datasets} data sets",
            str(tuple([1.0] * num_datasets)),
        )
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise config_error(
            "data.weights",
            weights,
            "must be above 0; to leave out a corpus, remove it from data.corpus",
        )
    exact = [w / math.fsum(weights) * _TICKS for w in weights]
    shares = [math.floor(e + 1e-9) for e in exact]
    owed = sorted(range(num_datasets), key=lambda d: (shares[d] - exact[d], d))
    for d in owed[: _TICKS - sum(shares)]:
        shares[d] += 1
    if min(shares) < 1:
        raise config_error(
            "data.weights",
            weights,
            f"each must be at least 1 / {_TICKS} of their sum",
            str(tuple(max(w, 2 * math.fsum(weights) / _TICKS) for w in weights)),
        )
    divisor = math.gcd(*shares)
    return tuple(s // divisor for s in shares)


def _period(shares: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the data set at each position of a period, and how many of its samples came before.
    Shapes: both [W]."""
    total = sum(shares)
    weights = np.array(shares)
    choice = np.empty(total, np.int64)
    rank = np.empty(total, np.int64)
    # debt in units of 1 / W
    debt = np.zeros_like(weights)
    counts = np.zeros_like(weights)
    for i in range(total):
        debt += weights
        member = int(debt.argmax())
        choice[i], rank[i] = member, counts[member]
        debt[member] -= total
        counts[member] += 1
    assert not debt.any(), debt
    return choice, rank
