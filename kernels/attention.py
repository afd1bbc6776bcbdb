"""Attention on the GPU without the matrix of probabilities: an online softmax, and a backward pass that computes again.

b samples, s positions, n query heads, n_kv key and value heads, d head dimension; tiles are ROWS queries by KEYS keys.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .philox import _generate, _signed, _words

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
PRECISION = tl.constexpr("tf32x3")
QUADS, WORDS = tl.constexpr(1), tl.constexpr(2)


class Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, kv_head: list[int], scale: float, causal: bool,
              key0: int, key1: int, step: int, sample: int, threshold: int, keep_scale: float,
              start: int) -> tuple[Tensor, Tensor]:
    b, n, s, d = q.shape
    out, lse = q.new_empty((b, s, n, d)), q.new_empty((b, n, s), dtype=torch.float32)
    if q.numel():
        common = _common(q, k, v, real, kv_head, scale, causal,
                         (key0, key1, step, sample, threshold, keep_scale, start))
        _launch(forward_kernel, n, common, out_ptr=out, lse_ptr=lse)
    return out, lse


def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, real: Tensor | None,
                       kv_head: list[int], scale: float, causal: bool, key0: int, key1: int, step: int, sample: int,
                       threshold: int, keep_scale: float, start: int) -> tuple[Tensor, Tensor, Tensor]:
    dq, delta = torch.empty_like(out), torch.empty_like(lse)
    dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (k, v))
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    common = _common(q, k, v, real, kv_head, scale, causal, (key0, key1, step, sample, threshold, keep_scale, start))
    common |= {"dout_ptr": dout, "lse_ptr": lse, "delta_ptr": delta} | _strides("dout", dout)
    _launch(dq_kernel, q.shape[1], common, out_ptr=out, dq_ptr=dq)
    _launch(dkdv_kernel, k.shape[1], common, dk_ptr=dk, dv_ptr=dv, kv_heads=k.shape[1])
    return dq, dk, dv


def _common(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, kv_head: list[int], scale: float, causal: bool,
            mask: tuple[int, int, int, int, int, float, int]) -> dict[str, Any]:
    assert scale > 0, f"scale must be positive, got {scale}"
    _, n, s, d = q.shape
    *words, keep_scale, start = mask
    dropout = 0 if mask[4] == 0 else QUADS.value if s % 4 == start % 4 == 0 else WORDS.value
    key0, key1, step, sample, threshold = _signed(*words)
    return {"q_ptr": q, "k_ptr": k, "v_ptr": v, "real_ptr": None if real is None else real.view(torch.uint8),
            "table_ptr": _table(tuple(kv_head), k.shape[1], q.device),
            **_strides("q", q), **_strides("k", k), **_strides("v", v), "heads": n, "s": s, "scale": scale,
            "key0": key0, "key1": key1, "step": step, "sample": sample, "threshold": threshold,
            "keep_scale": keep_scale if dropout else 1.0, "start": start,
            "HEAD": d, "D": max(16, triton.next_power_of_2(d)), "CAUSAL": causal, "DROPOUT": dropout}


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_b": x.stride(0), f"{name}_n": x.stride(1), f"{name}_s": x.stride(2)}


@functools.lru_cache(maxsize=64)
def _table(kv_head: tuple[int, ...], kv_heads: int, device: torch.device) -> Tensor:
    """[n + n + n_kv + 1]: the kv head of each query head; the query heads by kv head; where those of each begin."""
    by_kv = sorted(range(len(kv_head)), key=lambda i: kv_head[i])
    first = [sum(g < i for g in kv_head) for i in range(kv_heads + 1)]
    return torch.tensor([*kv_head, *by_kv, *first], dtype=torch.int32, device=device)


def tile_of(kernel: str, D: int, itemsize: int, capability: int) -> Tile:
    return Tile(64, 32, 4, 2)


def _launch(kernel, heads: int, common: dict[str, Any], **rest: Any) -> None:
    q = common["q_ptr"]
    cuda = q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q.device)[0] * 10 if cuda else 0
    tile = tile_of(kernel.__name__, common["D"], q.element_size(), capability)
    blocks = triton.cdiv(common["s"], tile.keys if kernel is dkdv_kernel else tile.rows)
    with torch.cuda.device(q.device) if cuda else contextlib.nullcontext():
        kernel[(blocks * heads * q.shape[0],)](**common, **rest, ROWS=tile.rows, KEYS=tile.keys,
                                               num_warps=tile.num_warps, num_stages=tile.num_stages)


_PLAIN = ["heads", "kv_heads", "s", "scale", "key0", "key1", "step", "sample", "threshold", "keep_scale", "start"]


@triton.jit(do_not_specialize=[name for name in _PLAIN if name != "kv_heads"])
def forward_kernel(q_ptr, k_ptr, v_ptr, real_ptr, table_ptr, out_ptr, lse_ptr, q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n,
                   v_s, heads, s, scale, key0, key1, step, sample, threshold, keep_scale, start, HEAD: tl.constexpr,
                   D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
                   DROPOUT: tl.constexpr):
    row, head, b = _place(s, heads, ROWS, CAUSAL)
    kv = tl.load(table_ptr + head).to(tl.int64)
    k_ptr += b * k_b + kv * k_n
    v_ptr += b * v_b + kv * v_n
    if real_ptr is not None:
        real_ptr += b * s
    noise = (key0, key1, step, sample + b.to(tl.int32), threshold)
    rows = row + tl.arange(0, ROWS)
    first = start + (head * s + rows) * s
    q = _load(q_ptr + b * q_b + head * q_n, row, q_s, s, ROWS, HEAD, D, True)
    scale *= LOG2E
    full, end = _keys_seen(real_ptr, row, s, ROWS, KEYS, CAUSAL)
    state = (tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), LOWEST, tl.float32))
    state = _attend(state, q, k_ptr, v_ptr, real_ptr, 0, full, k_s, v_s, rows, s, scale, noise, first, HEAD, D, KEYS,
                    False, False, DROPOUT)
    state = _attend(state, q, k_ptr, v_ptr, real_ptr, full, end, k_s, v_s, rows, s, scale, noise, first, HEAD, D, KEYS,
                    True, CAUSAL, DROPOUT)
    acc, total, top = state
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    acc *= tl.where(blind, 0.0, keep_scale / total)[:, None]
    _store(out_ptr + (b * s * heads + head) * HEAD, acc, row, heads * HEAD, s, ROWS, HEAD, D)
    lse = tl.where(blind, float("inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + (b * heads + head) * s + rows, lse, mask=rows < s)


@triton.jit
def _attend(state, q, k_ptr, v_ptr, real_ptr, begin, end, k_s, v_s, rows, s, scale, noise, first, HEAD: tl.constexpr,
            D: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr):
    acc, total, top = state
    for key in range(begin, end, KEYS):
        k = _load(k_ptr, key, k_s, s, KEYS, HEAD, D, EDGE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = _hide(scores, rows, key, real_ptr, s, KEYS, EDGE, CAUSAL)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(_kept(first, key, noise, KEYS, DROPOUT), p, 0.0)
        v = _load(v_ptr, key, v_s, s, KEYS, HEAD, D, EDGE)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, top


@triton.jit(do_not_specialize=[name for name in _PLAIN if name != "kv_heads"])
def dq_kernel(q_ptr, k_ptr, v_ptr, real_ptr, table_ptr, dout_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, q_b, q_n, q_s,
              k_b, k_n, k_s, v_b, v_n, v_s, dout_b, dout_n, dout_s, heads, s, scale, key0, key1, step, sample,
              threshold, keep_scale, start, HEAD: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
              KEYS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr):
    row, head, b = _place(s, heads, ROWS, CAUSAL)
    kv = tl.load(table_ptr + head).to(tl.int64)
    k_ptr += b * k_b + kv * k_n
    v_ptr += b * v_b + kv * v_n
    if real_ptr is not None:
        real_ptr += b * s
    noise = (key0, key1, step, sample + b.to(tl.int32), threshold)
    rows = row + tl.arange(0, ROWS)
    first = start + (head * s + rows) * s
    q = _load(q_ptr + b * q_b + head * q_n, row, q_s, s, ROWS, HEAD, D, True)
    dout = _load(dout_ptr + b * dout_b + head * dout_n, row, dout_s, s, ROWS, HEAD, D, True)
    out = _load(out_ptr + (b * s * heads + head) * HEAD, row, heads * HEAD, s, ROWS, HEAD, D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (b * heads + head) * s + rows
    tl.store(delta_ptr + at, delta, mask=rows < s)
    lse = tl.load(lse_ptr + at, mask=rows < s, other=float("inf")) * LOG2E
    full, end = _keys_seen(real_ptr, row, s, ROWS, KEYS, CAUSAL)
    dq = tl.zeros((ROWS, D), tl.float32)
    dq = _add_dq(dq, q, dout, lse, delta, k_ptr, v_ptr, real_ptr, 0, full, k_s, v_s, rows, s, scale * LOG2E, keep_scale,
                 noise, first, HEAD, D, KEYS, False, False, DROPOUT)
    dq = _add_dq(dq, q, dout, lse, delta, k_ptr, v_ptr, real_ptr, full, end, k_s, v_s, rows, s, scale * LOG2E,
                 keep_scale, noise, first, HEAD, D, KEYS, True, CAUSAL, DROPOUT)
    _store(dq_ptr + (b * s * heads + head) * HEAD, dq * scale, row, heads * HEAD, s, ROWS, HEAD, D)


@triton.jit
def _add_dq(dq, q, dout, lse, delta, k_ptr, v_ptr, real_ptr, begin, end, k_s, v_s, rows, s, scale, keep_scale, noise,
            first, HEAD: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
            DROPOUT: tl.constexpr):
    for key in range(begin, end, KEYS):
        k = _load(k_ptr, key, k_s, s, KEYS, HEAD, D, EDGE)
        v = _load(v_ptr, key, v_s, s, KEYS, HEAD, D, EDGE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = _hide(scores, rows, key, real_ptr, s, KEYS, EDGE, CAUSAL)
        p = tl.exp2(scores * scale - lse[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(_kept(first, key, noise, KEYS, DROPOUT), dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=_PLAIN)
def dkdv_kernel(q_ptr, k_ptr, v_ptr, real_ptr, table_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_b, q_n, q_s,
                k_b, k_n, k_s, v_b, v_n, v_s, dout_b, dout_n, dout_s, heads, kv_heads, s, scale, key0, key1, step,
                sample, threshold, keep_scale, start, HEAD: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                KEYS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr):
    key, kv, b = _place(s, kv_heads, KEYS, False)
    keys = key + tl.arange(0, KEYS)
    noise = (key0, key1, step, sample + b.to(tl.int32), threshold)
    k = _load(k_ptr + b * k_b + kv * k_n, key, k_s, s, KEYS, HEAD, D, True)
    v = _load(v_ptr + b * v_b + kv * v_n, key, v_s, s, KEYS, HEAD, D, True)
    begin = key // ROWS * ROWS if CAUSAL else 0
    full = tl.minimum(tl.cdiv(key + KEYS - 1, ROWS) * ROWS, s) if CAUSAL else 0
    heads_of = table_ptr + heads
    bounds = heads_of + heads + kv
    dk, dv = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    for i in range(tl.load(bounds), tl.load(bounds + 1)):
        head = tl.load(heads_of + i).to(tl.int64)
        q_at, dout_at = q_ptr + b * q_b + head * q_n, dout_ptr + b * dout_b + head * dout_n
        at = (b * heads + head) * s
        first = start + head * s * s
        if CAUSAL:
            dk, dv = _add_dkdv(dk, dv, k, v, q_at, dout_at, lse_ptr + at, delta_ptr + at, begin, full, q_s, dout_s,
                               keys, key, s, scale * LOG2E, keep_scale, noise, first, HEAD, D, ROWS, KEYS, True,
                               DROPOUT)
        dk, dv = _add_dkdv(dk, dv, k, v, q_at, dout_at, lse_ptr + at, delta_ptr + at, full, s, q_s, dout_s, keys, key,
                           s, scale * LOG2E, keep_scale, noise, first, HEAD, D, ROWS, KEYS, False, DROPOUT)
    if real_ptr is not None:
        real = (tl.load(real_ptr + b * s + keys, mask=keys < s, other=0) != 0)[:, None]
        dk, dv = tl.where(real, dk, 0.0), tl.where(real, dv, 0.0)
    at = (b * s * kv_heads + kv) * HEAD
    _store(dk_ptr + at, dk * scale, key, kv_heads * HEAD, s, KEYS, HEAD, D)
    _store(dv_ptr + at, dv * keep_scale, key, kv_heads * HEAD, s, KEYS, HEAD, D)


@triton.jit
def _add_dkdv(dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, begin, end, q_s, dout_s, keys, key, s, scale,
              keep_scale, noise, first, HEAD: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
              CAUSAL: tl.constexpr, DROPOUT: tl.constexpr):
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        q = _load(q_ptr, row, q_s, s, ROWS, HEAD, D, True)
        lse = tl.load(lse_ptr + rows, mask=rows < s, other=float("inf")) * LOG2E
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(scores * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
        dout = _load(dout_ptr, row, dout_s, s, ROWS, HEAD, D, True)
        delta = tl.load(delta_ptr + rows, mask=rows < s, other=0.0)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if DROPOUT:
            kept = tl.trans(_kept(first + rows.to(tl.int64) * s, key, noise, KEYS, DROPOUT))
            dv = tl.dot(tl.where(kept, p, 0.0).to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        else:
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _place(s, heads, COUNT: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's first position, head and sample. Heads one after the other, which share keys in the L2 cache."""
    blocks = tl.cdiv(s, COUNT)
    program = tl.program_id(0)
    block = program % blocks
    if LAST_FIRST:  # the longest first: what runs last is short
        block = blocks - 1 - block
    pair = program // blocks
    return block * COUNT, (pair % heads).to(tl.int64), (pair // heads).to(tl.int64)


@triton.jit
def _keys_seen(real_ptr, row, s, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys before `full` are in blocks that all of these rows see whole, those from `end` on are seen by none."""
    end = s
    full = s // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(s, row + ROWS)
        full = (row + 1) // KEYS * KEYS
    if real_ptr is not None:
        last = row * 0
        for key in range(0, end, 1024):
            keys = key + tl.arange(0, 1024)
            real = tl.load(real_ptr + keys, mask=keys < end, other=0)
            last = tl.maximum(last, tl.max(tl.where(real != 0, keys + 1, 0), 0))
        end = last
        full = tl.minimum(full, tl.cdiv(end, KEYS) * KEYS)
    return full, end


@triton.jit
def _hide(scores, rows, key, real_ptr, s, KEYS: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr):
    """scores [ROWS, KEYS], -infinity where the key is not to be seen."""
    keys = key + tl.arange(0, KEYS)
    if CAUSAL:
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
    elif EDGE:
        scores = tl.where((keys < s)[None, :], scores, float("-inf"))
    if real_ptr is not None:
        if EDGE:
            real = tl.load(real_ptr + keys, mask=keys < s, other=0)
        else:
            real = tl.load(real_ptr + keys)
        scores = tl.where((real != 0)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _kept(first, key, noise, KEYS: tl.constexpr, DROPOUT: tl.constexpr):
    """Which of [ROWS, KEYS] dropout keeps; `first` [ROWS] int64 is the mask's index of each row's key 0."""
    key0, key1, step, sample, threshold = noise
    if DROPOUT == QUADS:  # a row begins at a multiple of 4: each counter serves four neighbours
        quad = (first >> 2)[:, None] + (key // 4 + tl.arange(0, KEYS // 4))[None, :]
        bits = _generate(quad, key0, key1, step, sample)
    else:
        index = first[:, None] + (key + tl.arange(0, KEYS))[None, :]
        w0, w1, w2, w3 = _words(index >> 2, key0, key1, step, sample)
        word = (index & 3).to(tl.int32)
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def _load(ptr, first, stride, s, COUNT: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """[COUNT, D] of a head, from position `first`; zeros beyond s (if EDGE) and beyond HEAD."""
    position, col = tl.arange(0, COUNT), tl.arange(0, D)
    at = (ptr + tl.cast(first, tl.int64) * stride + position.to(tl.int64) * stride)[:, None] + col[None, :]
    if EDGE:
        x = tl.load(at, mask=(first + position < s)[:, None] & (col < HEAD)[None, :], other=0.0)
    elif HEAD < D:
        x = tl.load(at, mask=(col < HEAD)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _store(ptr, x, first, stride, s, COUNT: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    position, col = tl.arange(0, COUNT), tl.arange(0, D)
    at = (ptr + tl.cast(first, tl.int64) * stride + position.to(tl.int64) * stride)[:, None] + col[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(first + position < s)[:, None] & (col < HEAD)[None, :])
