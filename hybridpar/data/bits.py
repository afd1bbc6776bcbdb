"""Random bits for the data layer: a hash of (key, counters), vectorized over numpy arrays of
counters.

`hybridpar.random` draws for consecutive samples of a batch; a data set needs a few numbers for each
of many scattered (epoch, sample) pairs, on the CPU, in numpy. The principle is equal: a number
depends on what it is for, never on when it is drawn.

Source: the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied to key + GAMMA * (counter + 1) for each counter in turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridpar.random import site

Bits = NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF_WORD = np.uint64(32)
_ONE = np.uint64(1)


def root_key(seed: int, name: str) -> Bits:
    """Return the key of everything that `name` draws in a run with this seed. Shapes: [1]."""
    return derive(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), site(name))


def derive(key: Bits, *counters: int | NDArray[np.integer]) -> Bits:
    """Return 64 random bits for each combination of key and non-negative counters; the result is
    also a key for further ones.

    Shapes: `key` [..] and every counter broadcast together; returns their common shape.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        for counter in counters:
            count = np.asarray(counter).astype(np.uint64)
            key = _mix(key + _GAMMA * (count + _ONE))
    return key


def below(bits: Bits, limit: int | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return uniform integers from 0 to limit - 1 (limit up to 2**32; the bias of any value is at
    most 2**-32).

    Shapes: `bits` [..] and `limit` broadcast; returns their common shape.
    """
    return ((bits >> _HALF_WORD) * np.asarray(limit).astype(np.uint64) >> _HALF_WORD).astype(
        np.int64
    )


def count_heads(key: Bits, tosses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of heads in `tosses` tosses of a fair coin. Shapes: `key` [n], `tosses`
    [n]; returns [n]."""
    num_words = -(-int(tosses.max(initial=0)) // 64)
    words = derive(key[:, None], np.arange(num_words)[None, :])
    coins = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1)
    return (coins * (np.arange(coins.shape[1])[None, :] < tosses[:, None])).sum(
        axis=1, dtype=np.int64
    )


def _mix(x: Bits) -> Bits:
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])
