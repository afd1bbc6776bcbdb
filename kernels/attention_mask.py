"""The keys that attention's queries see, and the probabilities that dropout keeps.

Limits: with first keys (packed documents), positions or a window, query r at position p sees the
keys from max(first[r], p - window + 1) to p. Blocks of keys that no query of a tile sees are
skipped, and blocks of queries that see no key of a tile, so work falls with the mask's area.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .philox import _generate, _words

PRECISION = tl.constexpr("ieee")
"""Precision of float32 products; products of 16-bit elements are exact."""
QUADS = tl.constexpr(1)
"""DROPOUT: a counter for 4 keys. 0: no dropout."""
WORDS = tl.constexpr(2)
"""DROPOUT: a counter for each key."""


@triton.jit
def _positions(position_ptr, rows, queries):
    """The positions of some queries among the keys."""
    position = rows
    if position_ptr is not None:
        position = tl.load(position_ptr + rows, mask=rows < queries, other=0)
    return position


@triton.jit
def _mask_rows(mask_row_ptr, position, rows, queries):
    """The rows of dropout's mask of some queries: their positions in the sample."""
    mask_row = position
    if mask_row_ptr is not None:
        mask_row = tl.load(mask_row_ptr + rows, mask=rows < queries, other=0)
    return mask_row


@triton.jit
def _first_keys(first_ptr, b, rows, position, queries, s, window):
    """The first key that each of some queries sees; beyond the last query none."""
    first = position - window + 1
    if first_ptr is not None:
        given = tl.load(first_ptr + b * queries + rows, mask=rows < queries, other=0)
        first = tl.maximum(first, given)
    return tl.where(rows < queries, first, s)


@triton.jit
def _keys_seen(
    real_ptr,
    position_ptr,
    first,
    position,
    rows,
    queries,
    row,
    s,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Keys before `begin` are seen by none of these rows, blocks from there to `full` whole (but
    for padding and first keys), keys from `end` on by none."""
    if position_ptr is not None:
        full = (tl.min(tl.where(rows < queries, position, s - 1), 0) + 1) // KEYS * KEYS
        end = tl.minimum(s, tl.max(position, 0) + 1)
    elif CAUSAL:
        full = (row + 1) // KEYS * KEYS
        end = tl.minimum(s, row + ROWS)
    else:
        full = s // KEYS * KEYS
        end = s
    begin = 0
    if first is not None:
        begin = tl.maximum(tl.min(first, 0), 0) // KEYS * KEYS
        full = tl.maximum(full, begin)
    if real_ptr is not None:
        last = row * 0
        for key in range(0, end, 1024):
            keys = key + tl.arange(0, 1024)
            real = tl.load(real_ptr + keys, mask=keys < end, other=0)
            last = tl.maximum(last, tl.max(tl.where(real != 0, keys + 1, 0), 0))
        end = last
    return begin, full, end


@triton.jit
def _rows_seeing(
    first_ptr,
    position_ptr,
    b,
    key,
    queries,
    s,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The rows of queries, from the start of a tile, outside which none sees one of these keys."""
    begin = key // ROWS * ROWS if CAUSAL else 0
    end = queries
    if first_ptr is not None or position_ptr is not None:
        least = queries
        most = 0
        for row in range(0 if position_ptr is not None else begin, queries, 1024):
            rows = row + tl.arange(0, 1024)
            position = _positions(position_ptr, rows, queries)
            first = _first_keys(first_ptr, b, rows, position, queries, s, window)
            sees = (position >= key) & (first < key + KEYS) & (rows < queries)
            least = tl.minimum(least, tl.min(tl.where(sees, rows, queries), 0))
            most = tl.maximum(most, tl.max(tl.where(sees, rows + 1, 0), 0))
        begin = least // ROWS * ROWS
        end = most
    elif WINDOW:
        end = tl.minimum(queries, key + KEYS - 1 + window)
    return begin, end


@triton.jit
def _scores(
    q,
    k,
    squeeze,
    position,
    first,
    key,
    real_ptr,
    s,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr,
):
    """q k^T [ROWS, KEYS], or with a soft-cap tanh(squeeze q k^T), -infinity where the key is not
    to be seen. EDGE: on the diagonal or at the end."""
    keys = key + tl.arange(0, KEYS)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = _tanh(scores * squeeze)
    if EDGE:
        if CAUSAL:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        else:
            scores = tl.where((keys < s)[None, :], scores, float("-inf"))
    if first is not None:
        scores = tl.where(keys[None, :] >= first[:, None], scores, float("-inf"))
    if real_ptr is not None:
        real = tl.load(real_ptr + keys, mask=keys < s, other=0) != 0
        scores = tl.where(real[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _tanh(x):
    """Without overflow: the power is infinity or 0 where x is large."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _slope(capped):
    """The derivative of tanh, from its value; 0 where a key is not seen (-infinity)."""
    capped = tl.maximum(capped, -1.0)
    return 1.0 - capped * capped


@triton.jit
def _kept(index, key, noise, KEYS: tl.constexpr, DROPOUT: tl.constexpr):
    """The elements of [ROWS, KEYS] that dropout keeps; `index` int64 [ROWS] is the mask's index of
    each row's key 0."""
    key0, key1, step, sample, threshold = noise
    if DROPOUT == QUADS:  # rows begin at multiples of 4: a counter has the words of four neighbours
        quad = (index >> 2)[:, None] + (key // 4 + tl.arange(0, KEYS // 4))[None, :]
        bits = _generate(quad, key0, key1, step, sample)
    else:
        index = index[:, None] + (key + tl.arange(0, KEYS))[None, :]
        w0, w1, w2, w3 = _words(index >> 2, key0, key1, step, sample)
        word = (index & 3).to(tl.int32)
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits >= threshold.to(tl.uint32, bitcast=True)
