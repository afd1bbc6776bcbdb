"""The order in which samples are visited: a permutation for each epoch, computed for any position
without a table.

A Feistel network permutes pairs (left, right) of numbers below a = ceil(sqrt(n)), that is the
numbers below a * a; results that are not below n are permuted again until they are (cycle walking),
which leaves a permutation of the n. Keyed by (seed, epoch), so the state of a run is one number,
the count of samples consumed, and the order knows nothing of the grid, the batch size or how long
the run will be.

Source: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel,
    cycle walking).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridpar.data.bits import below, derive, root_key
from hybridpar.errors import DataError

_NUM_ROUNDS = 8
_MAX_SAMPLES = 1 << 62  # a * a stays an int64, a below 2**32


class SampleOrder:
    """The sample of a data set at each position of an endless run through it.

    Raises:
        DataError: There is no sample.
    """

    def __init__(self, num_samples: int, seed: int, name: str = "data.order"):
        if not 1 <= num_samples <= _MAX_SAMPLES:
            raise DataError(
                f"a data set must have from 1 to 2**62 samples, this one has {num_samples}"
            )
        self.num_samples = num_samples
        self._side = max(2, math.isqrt(num_samples - 1) + 1)
        self._key = root_key(seed, name)

    def index(self, counter: ArrayLike) -> NDArray[np.int64]:
        """Return the sample at each position of the run. Shapes: `counter` [..] non-negative;
        returns the same shape."""
        return self.locate(counter)[1]

    def locate(self, counter: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch and the sample at each position of the run.

        Shapes: `counter` [..] non-negative; returns two of the same shape.
        """
        counters = np.asarray(counter, np.int64)
        epochs, positions = np.divmod(counters.reshape(-1), self.num_samples)
        keys = derive(self._key, epochs)
        samples = self._permute(positions, keys)
        while (outside := np.flatnonzero(samples >= self.num_samples)).size:
            samples[outside] = self._permute(samples[outside], keys[outside])
        return epochs.reshape(counters.shape), samples.reshape(counters.shape)

    def _permute(self, numbers: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        left, right = np.divmod(numbers, self._side)
        for i in range(_NUM_ROUNDS):
            left, right = right, (left + below(derive(keys, i, right), self._side)) % self._side
        return left * self._side + right
