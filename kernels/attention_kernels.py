"""The kernels of attention: an online softmax, which the backward pass computes again.

b samples, s positions, n query heads, n_kv key and value heads, d head dimension; a tile is ROWS
queries by KEYS keys. P = softmax(scale q k^T), out = (P * mask / (1 - p)) v, lse = log of the sum
of exponentials, all sums in float32.

    forward_kernel  a program for ROWS queries of a head; keys go by                         2 products a tile
    dq_kernel       the same, with dS = P * (mask dout v^T / (1 - p) - delta), dq += dS k    3 products
                    and delta = rowsum(dout * out), which the next kernel reads
    dkdv_kernel     a program for KEYS keys of a kv head; the queries of its heads go by     4 products

No atomics: every sum has one order. Blocks of keys above the diagonal or beyond the last real key
are skipped; only those on the diagonal and at the end, in a loop of their own, are compared with
positions. Dropout's mask is made again from its counters.

Soft-caps: tiles hold tanh(scale q k^T / softcap), P is softmax of softcap times that, and dS gains
the factor 1 - tanh^2.

FLOPs: forward 4 b n s^2 d, backward 14 (10 are needed: the two kernels both make P and dS); half if
causal. Bytes: forward reads q, k, v and writes out and lse; backward reads q, k, v, dout and lse
twice, out once, writes and reads delta, writes dq, dk, dv. That is s / (bytes of an element) FLOPs
a byte forward (n_kv = n), so bf16 on an H100, about 300 FLOPs a byte, is bound by the tensor cores
from s = 600 on. Keys come again for each ROWS queries, queries for each KEYS keys, from the L2
cache: ROWS FLOPs a byte of its traffic forward, 2 KEYS in dkdv_kernel, hence wide tiles.
Source: arXiv 2205.14135 (online softmax, computing P again); arXiv 2307.08691 (loops over tiles,
    which are skipped).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_mask import (
    PRECISION,
    _first_keys,
    _kept,
    _keys_seen,
    _mask_rows,
    _positions,
    _rows_seeing,
    _scores,
    _slope,
    _tanh,
)
from .philox import _counter
from .tiles import _corner, _load, _store, _tile

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32. It is finite, so that a row without keys makes no NaN."""

# Compiled once for all values: these differ from call to call or say nothing.
_QKV = [f"{name}_{dim}" for name in "qkv" for dim in "bns"]
_PLAIN = [
    *_QKV,
    "heads",
    "queries",
    "s",
    "window",
    "scale",
    "softcap",
    "key0",
    "key1",
    "threshold",
    "keep_scale",
    "start",
    "mask_keys",
]
_PLAIN_BACKWARD = [*_PLAIN, "dout_b", "dout_n", "dout_s"]


@triton.jit(do_not_specialize=_PLAIN)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_matrix,
    v_matrix,
    real_ptr,
    first_ptr,
    position_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    q_b,
    q_n,
    q_s,
    k_b,
    k_n,
    k_s,
    v_b,
    v_n,
    v_s,
    heads,
    queries,
    s,
    window,
    scale,
    softcap,
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    mask_row_ptr,
    mask_keys,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    row, head, b = _place(ROWS, CAUSAL)
    kv = tl.load(table_ptr + head).to(tl.int64)
    k_row, k_col = _corner(k_matrix, b * k_b + kv * k_n, k_s, UNIT)
    v_row, v_col = _corner(v_matrix, b * v_b + kv * v_n, v_s, UNIT)
    k_ptr += (b * k_b + kv * k_n) * UNIT
    v_ptr += (b * v_b + kv * v_n) * UNIT
    if real_ptr is not None:
        real_ptr += b * s
    step, sample = _counter(counter_ptr, b.to(tl.int32))
    noise = (key0, key1, step, sample, threshold)
    rows = row + tl.arange(0, ROWS)
    LIMITED: tl.constexpr = first_ptr is not None or position_ptr is not None or WINDOW
    position = _positions(position_ptr, rows, queries)
    first = _first_keys(first_ptr, b, rows, position, queries, s, window) if LIMITED else None
    mask_row = _mask_rows(mask_row_ptr, position, rows, queries)
    index = start + (head * mask_keys + mask_row) * mask_keys
    squeeze = scale / softcap if SOFTCAP else scale
    scale = (softcap if SOFTCAP else scale) * _LOG2E  # powers of 2 from here on
    begin, full, end = _keys_seen(
        real_ptr, position_ptr, first, position, rows, queries, row, s, ROWS, KEYS, CAUSAL
    )
    q = _load(q_ptr + (b * q_b + head * q_n) * UNIT, row, q_s * UNIT, queries, ROWS, HEAD, D)
    acc, total = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    for edge in tl.static_range(2):
        for key in range(full if edge else begin, end if edge else tl.minimum(full, end), KEYS):
            k = _tile(k_matrix, k_row, k_col, k_ptr, key, k_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            scores = _scores(
                q, k, squeeze, position, first, key, real_ptr, s, KEYS, CAUSAL, SOFTCAP, edge == 1
            )
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            top = new_top
            if DROPOUT:
                p = tl.where(_kept(index, key, noise, KEYS, DROPOUT), p, 0.0)
            v = _tile(v_matrix, v_row, v_col, v_ptr, key, v_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    acc *= tl.where(blind, 0.0, keep_scale / total)[:, None]
    at = (b * queries * heads + head) * HEAD
    _store(out_ptr + at, acc, row, heads * HEAD, queries, ROWS, HEAD, D)
    lse = tl.where(blind, float("inf"), (top + tl.log2(total)) * _LN2)
    tl.store(lse_ptr + (b * heads + head) * queries + rows, lse, mask=rows < queries)


@triton.jit(do_not_specialize=_PLAIN_BACKWARD)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_matrix,
    v_matrix,
    real_ptr,
    first_ptr,
    position_ptr,
    table_ptr,
    dout_ptr,
    out_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    q_b,
    q_n,
    q_s,
    k_b,
    k_n,
    k_s,
    v_b,
    v_n,
    v_s,
    dout_b,
    dout_n,
    dout_s,
    heads,
    queries,
    s,
    window,
    scale,
    softcap,
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    mask_row_ptr,
    mask_keys,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    row, head, b = _place(ROWS, CAUSAL)
    kv = tl.load(table_ptr + head).to(tl.int64)
    k_row, k_col = _corner(k_matrix, b * k_b + kv * k_n, k_s, UNIT)
    v_row, v_col = _corner(v_matrix, b * v_b + kv * v_n, v_s, UNIT)
    k_ptr += (b * k_b + kv * k_n) * UNIT
    v_ptr += (b * v_b + kv * v_n) * UNIT
    if real_ptr is not None:
        real_ptr += b * s
    step, sample = _counter(counter_ptr, b.to(tl.int32))
    noise = (key0, key1, step, sample, threshold)
    rows = row + tl.arange(0, ROWS)
    LIMITED: tl.constexpr = first_ptr is not None or position_ptr is not None or WINDOW
    position = _positions(position_ptr, rows, queries)
    first = _first_keys(first_ptr, b, rows, position, queries, s, window) if LIMITED else None
    mask_row = _mask_rows(mask_row_ptr, position, rows, queries)
    index = start + (head * mask_keys + mask_row) * mask_keys
    begin, full, end = _keys_seen(
        real_ptr, position_ptr, first, position, rows, queries, row, s, ROWS, KEYS, CAUSAL
    )
    dout = _load(
        dout_ptr + (b * dout_b + head * dout_n) * UNIT, row, dout_s * UNIT, queries, ROWS, HEAD, D
    )
    corner = (b * queries * heads + head) * HEAD
    out = _load(out_ptr + corner, row, heads * HEAD, queries, ROWS, HEAD, D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (b * heads + head) * queries + rows
    tl.store(delta_ptr + at, delta, mask=rows < queries)
    lse = tl.load(lse_ptr + at, mask=rows < queries, other=float("inf")) * _LOG2E
    q = _load(q_ptr + (b * q_b + head * q_n) * UNIT, row, q_s * UNIT, queries, ROWS, HEAD, D)
    dq = tl.zeros((ROWS, D), tl.float32)
    squeeze = scale / softcap if SOFTCAP else scale
    power = (softcap if SOFTCAP else scale) * _LOG2E
    for edge in tl.static_range(2):
        for key in range(full if edge else begin, end if edge else tl.minimum(full, end), KEYS):
            k = _tile(k_matrix, k_row, k_col, k_ptr, key, k_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            v = _tile(v_matrix, v_row, v_col, v_ptr, key, v_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            scores = _scores(
                q, k, squeeze, position, first, key, real_ptr, s, KEYS, CAUSAL, SOFTCAP, edge == 1
            )
            p = tl.exp2(scores * power - lse[:, None])
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            if DROPOUT:
                dp = tl.where(_kept(index, key, noise, KEYS, DROPOUT), dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds *= _slope(scores)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    _store(dq_ptr + corner, dq * scale, row, heads * HEAD, queries, ROWS, HEAD, D)


@triton.jit(do_not_specialize=[*_PLAIN_BACKWARD, "kv_heads"])
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_matrix,
    dout_matrix,
    real_ptr,
    first_ptr,
    position_ptr,
    table_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_b,
    q_n,
    q_s,
    k_b,
    k_n,
    k_s,
    v_b,
    v_n,
    v_s,
    dout_b,
    dout_n,
    dout_s,
    heads,
    kv_heads,
    queries,
    s,
    window,
    scale,
    softcap,
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    mask_row_ptr,
    mask_keys,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    GROUPED: tl.constexpr,
):
    key, kv, b = _place(KEYS, False)
    keys = key + tl.arange(0, KEYS)
    k = _load(k_ptr + (b * k_b + kv * k_n) * UNIT, key, k_s * UNIT, s, KEYS, HEAD, D)
    v = _load(v_ptr + (b * v_b + kv * v_n) * UNIT, key, v_s * UNIT, s, KEYS, HEAD, D)
    begin, end = _rows_seeing(
        first_ptr, position_ptr, b, key, queries, s, window, ROWS, KEYS, CAUSAL, WINDOW
    )
    if real_ptr is not None:  # nothing to do where no key is real
        end *= tl.max(
            (tl.load(real_ptr + b * s + keys, mask=keys < s, other=0) != 0).to(tl.int32), 0
        )
    step, sample = _counter(counter_ptr, b.to(tl.int32))
    noise = (key0, key1, step, sample, threshold)
    lse_ptr += b * heads * queries
    delta_ptr += b * heads * queries
    if first_ptr is not None:
        first_ptr += b * queries
    dk, dv = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    if GROUPED:
        order = table_ptr + heads
        begins = order + heads + kv
        for i in range(tl.load(begins), tl.load(begins + 1)):
            head = tl.load(order + i).to(tl.int64)
            dk, dv = _add_dkdv(
                dk,
                dv,
                k,
                v,
                q_matrix,
                q_ptr,
                b * q_b + head * q_n,
                q_s,
                dout_matrix,
                dout_ptr,
                b * dout_b + head * dout_n,
                dout_s,
                lse_ptr + head * queries,
                delta_ptr + head * queries,
                first_ptr,
                position_ptr,
                keys,
                key,
                begin,
                end,
                queries,
                s,
                window,
                scale,
                softcap,
                keep_scale,
                noise,
                start + head * mask_keys * mask_keys,
                mask_row_ptr,
                mask_keys,
                UNIT,
                HEAD,
                D,
                ROWS,
                KEYS,
                CAUSAL,
                WINDOW,
                SOFTCAP,
                DROPOUT,
            )
    else:
        dk, dv = _add_dkdv(
            dk,
            dv,
            k,
            v,
            q_matrix,
            q_ptr,
            b * q_b + kv * q_n,
            q_s,
            dout_matrix,
            dout_ptr,
            b * dout_b + kv * dout_n,
            dout_s,
            lse_ptr + kv * queries,
            delta_ptr + kv * queries,
            first_ptr,
            position_ptr,
            keys,
            key,
            begin,
            end,
            queries,
            s,
            window,
            scale,
            softcap,
            keep_scale,
            noise,
            start + kv * mask_keys * mask_keys,
            mask_row_ptr,
            mask_keys,
            UNIT,
            HEAD,
            D,
            ROWS,
            KEYS,
            CAUSAL,
            WINDOW,
            SOFTCAP,
            DROPOUT,
        )
    if real_ptr is not None:  # hidden keys have their own rows: what was added there is left out
        real = (tl.load(real_ptr + b * s + keys, mask=keys < s, other=0) != 0)[:, None]
        dk, dv = tl.where(real, dk, 0.0), tl.where(real, dv, 0.0)
    at = (b * s * kv_heads + kv) * HEAD
    _store(dk_ptr + at, dk * scale, key, kv_heads * HEAD, s, KEYS, HEAD, D)
    _store(dv_ptr + at, dv * keep_scale, key, kv_heads * HEAD, s, KEYS, HEAD, D)


@triton.jit
def _add_dkdv(
    dk,
    dv,
    k,
    v,
    q_matrix,
    q_ptr,
    q_at,
    q_s,
    dout_matrix,
    dout_ptr,
    dout_at,
    dout_s,
    lse_ptr,
    delta_ptr,
    first_ptr,
    position_ptr,
    keys,
    key,
    begin,
    end,
    queries,
    s,
    window,
    scale,
    softcap,
    keep_scale,
    noise,
    start,
    mask_row_ptr,
    mask_keys,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The sums over the queries of one head; transposed tiles [KEYS, ROWS], so that P and dS go on
    from registers."""
    q_row, q_col = _corner(q_matrix, q_at, q_s, UNIT)
    dout_row, dout_col = _corner(dout_matrix, dout_at, dout_s, UNIT)
    q_ptr += q_at * UNIT
    dout_ptr += dout_at * UNIT
    LIMITED: tl.constexpr = first_ptr is not None or position_ptr is not None or WINDOW
    squeeze = scale / softcap if SOFTCAP else scale
    power = (softcap if SOFTCAP else scale) * _LOG2E
    full = end
    if not LIMITED:  # queries from here on see all of these keys; with limits all are compared
        full = tl.cdiv(key + KEYS - 1, ROWS) * ROWS if CAUSAL else 0
    for diagonal in tl.static_range(1 if CAUSAL else 0, 0 if LIMITED else -1, -1):
        for row in range(
            begin if diagonal else full,
            tl.minimum(full, end) if diagonal else end,
            ROWS,
        ):
            rows = row + tl.arange(0, ROWS)
            q = _tile(q_matrix, q_row, q_col, q_ptr, row, q_s * UNIT, queries, ROWS, HEAD, D, False)
            lse = tl.load(lse_ptr + rows, mask=rows < queries, other=float("inf")) * _LOG2E
            position = _positions(position_ptr, rows, queries)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if SOFTCAP:
                scores = _tanh(scores * squeeze)
            p = tl.exp2(scores * power - lse[None, :])
            if diagonal:
                p = tl.where(keys[:, None] <= position[None, :], p, 0.0)
                if LIMITED:
                    first = _first_keys(first_ptr, 0, rows, position, queries, s, window)
                    p = tl.where(keys[:, None] >= first[None, :], p, 0.0)
            dout = _tile(
                dout_matrix,
                dout_row,
                dout_col,
                dout_ptr,
                row,
                dout_s * UNIT,
                queries,
                ROWS,
                HEAD,
                D,
                False,
            )
            delta = tl.load(delta_ptr + rows, mask=rows < queries, other=0.0)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            if DROPOUT:
                mask_row = _mask_rows(mask_row_ptr, position, rows, queries).to(tl.int64)
                index = start + mask_row * mask_keys
                kept = tl.trans(_kept(index, key, noise, KEYS, DROPOUT))
                dv = tl.dot(
                    tl.where(kept, p, 0.0).to(dout.dtype), dout, dv, input_precision=PRECISION
                )
                dp = tl.where(kept, dp * keep_scale, 0.0)
            else:
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds *= _slope(scores)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _place(COUNT: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's first position, head, sample. A head's programs follow each other: they share
    the L2 cache."""
    block = tl.program_id(0)
    if LAST_FIRST:  # the longest first: what runs last is short
        block = tl.num_programs(0) - 1 - block
    return block * COUNT, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
