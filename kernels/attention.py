"""Attention on the GPU without the matrix of probabilities: an online softmax; the backward pass
computes it again.

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

Limits: with first keys (packed documents), positions or a window, query r at position p sees the
keys from max(first[r], p - window + 1) to p. Blocks of keys that no query of a tile sees are
skipped, and blocks of queries that see no key of a tile, so work falls with the mask's area.

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

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .options import OPTIONS, Option
from .philox import _counter, _generate, _signed, _words
from .tiles import Tile, _corner, _load, _store, _tile, has_copy_engine, is_matrix, matrix, tiles_of

OPERATORS = {"attention": (), "attention_backward": ()}

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(
    -3.4028234663852886e38
)  # of float32; finite, so that a row without keys makes no NaN
_PRECISION = tl.constexpr("ieee")  # of float32 products; 16-bit ones are exact
_NO_WINDOW = 1 << 30
_QUADS, _WORDS = (
    tl.constexpr(1),
    tl.constexpr(2),
)  # DROPOUT: a counter for 4 keys, a counter for each; 0: none


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    first: Tensor | None,
    position: Tensor | None,
    kv_head: list[int],
    scale: float,
    causal: bool,
    window: int,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    keep_scale: float,
    start: int,
) -> tuple[Tensor, Tensor]:
    """Return out and lse; for a query that sees no key lse is +infinity and out is zero.

    Args:
        first: The first key that each query may see. None: key 0.
        position: The position of each query among the keys. None: there are as many queries.
        kv_head: The key and value head of each query head.
        window: Most keys that a query sees. 0: no limit.
        threshold: Dropout if above 0: probability (head, position, key) of a sample has the bits of
            index start + (head * s + position) * s + key, stays if they are at least `threshold`,
            and is then multiplied by `keep_scale`.

    Shapes: q [b, n, queries, d]; k, v [b, n_kv, s, d], no gaps in d; real bool [b, s]; first int32
    [b, queries]; position int32 [queries] -> [b, queries, n, d], float32 [b, n, queries].
    """
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel():
        common = _common(
            q,
            k,
            v,
            Limits(causal, real, first, position, window),
            (kv_head, scale),
            (key0, key1, counter, threshold, keep_scale, start),
        )
        _launch(forward_kernel, common, out_ptr=out, lse_ptr=lse, **_strides(q=q, k=k, v=v))
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    real: Tensor | None,
    first: Tensor | None,
    position: Tensor | None,
    kv_head: list[int],
    scale: float,
    causal: bool,
    window: int,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    keep_scale: float,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Shapes: dout like q -> like out, twice [b, s, n_kv,
    d]."""
    dq, delta = torch.empty_like(out), torch.empty_like(lse)
    dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (k, v))
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    common = _common(
        q,
        k,
        v,
        Limits(causal, real, first, position, window),
        (kv_head, scale),
        (key0, key1, counter, threshold, keep_scale, start),
    )
    common |= {
        "dout_ptr": dout,
        "lse_ptr": lse,
        "delta_ptr": delta,
        **_strides(q=q, k=k, v=v, dout=dout),
    }
    _launch(dq_kernel, common, out_ptr=out, dq_ptr=dq)
    grouped = kv_head != list(range(k.shape[1]))
    _launch(dkdv_kernel, common, dk_ptr=dk, dv_ptr=dv, kv_heads=k.shape[1], GROUPED=grouped)
    return dq, dk, dv


class Limits(NamedTuple):
    """The keys that each query sees: see `attention`."""

    causal: bool
    real: Tensor | None
    first: Tensor | None
    position: Tensor | None
    window: int

    def check(self, queries: int, keys: int) -> None:
        """Assert that queries have positions, and that other limits are of causal attention."""
        assert queries == keys or self.position is not None, (queries, keys)
        only_causal = self.first is None and self.position is None and self.window == 0
        assert self.causal or only_causal, "first keys, positions and windows require causal"


def _common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limits: Limits,
    heads: tuple[list[int], float],
    mask: tuple[int, int, Tensor | None, int, float, int],
) -> dict[str, Any]:
    """Return the arguments of all kernels, besides strides."""
    kv_head, scale = heads
    assert scale > 0, (
        f"scale must be positive, got {scale}"
    )  # the largest score must give the largest scaled one
    n, queries, d = q.shape[1:]
    s = k.shape[2]
    limits.check(queries, s)
    assert len(kv_head) == n, f"kv_head needs {n} entries, got {kv_head}"
    key0, key1, counter, threshold, keep_scale, start = mask
    dropout = 0 if threshold == 0 else _QUADS.value if s % 4 == start % 4 == 0 else _WORDS.value
    key0, key1, threshold = _signed(key0, key1, threshold)
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "real_ptr": None if limits.real is None else limits.real.view(torch.uint8),
        "first_ptr": limits.first,
        "position_ptr": limits.position,
        "table_ptr": _table(tuple(kv_head), k.shape[1], q.device),
        "heads": n,
        "queries": queries,
        "s": s,
        "window": limits.window or _NO_WINDOW,
        "scale": scale,
        "counter_ptr": counter,
        "key0": key0,
        "key1": key1,
        "threshold": threshold,
        "keep_scale": keep_scale if dropout else 1.0,
        "start": start,
        "HEAD": d,
        "D": max(16, triton.next_power_of_2(d)),
        "CAUSAL": limits.causal,
        "WINDOW": limits.window > 0,
        "DROPOUT": dropout,
    }


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Return strides in units of 16 bytes if all are multiples, so that the compiler sees full
    vectors; otherwise in elements."""
    strides = {
        f"{name}_{dim}": x.stride(i) if x.shape[i] > 1 else 0
        for name, x in tensors.items()
        for i, dim in enumerate("bns")
    }
    vector = 16 // next(iter(tensors.values())).element_size()
    unit = 1 if any(stride % vector for stride in strides.values()) else vector
    return {name: stride // unit for name, stride in strides.items()} | {"UNIT": unit}


@functools.lru_cache(maxsize=64)
def _table(kv_head: tuple[int, ...], kv_heads: int, device: torch.device) -> Tensor:
    """Return the kv head of each query head, the query heads by kv head, and where each kv
    head's begin.

    Shapes: [n], [n], [n_kv + 1], in one tensor.
    """
    assert all(0 <= g < kv_heads for g in kv_head), f"{kv_head} names a head that is not there"
    order = sorted(range(len(kv_head)), key=lambda head: kv_head[head])
    begins = [sum(g < i for g in kv_head) for i in range(kv_heads + 1)]
    return torch.tensor([*kv_head, *order, *begins], dtype=torch.int32, device=device)


_USES = ("plain", "padded or grouped", "dropout")  # with limits: padded
"""How a kernel is used, as tiles_of counts it."""


def _launch(kernel: Any, common: dict[str, Any], **own: Any) -> None:
    """Start a kernel with the tile that OPTIONS has for such launches, or the default one."""
    q = common["q_ptr"]
    cuda = q.device.type == "cuda"
    is_nvidia = cuda and torch.version.hip is None  # an MI250 says that its capability is 9.0
    major, minor = torch.cuda.get_device_capability(q.device) if is_nvidia else (0, 0)
    loaded = ("q", "dout") if "kv_heads" in own else ("k", "v")
    tensors = {name: common[f"{name}_ptr"] for name in loaded}
    matrices = has_copy_engine(major) and all(is_matrix(x, common["D"]) for x in tensors.values())
    limited = common["first_ptr"] is not None or common["position_ptr"] is not None
    limited = limited or common["WINDOW"] or common["real_ptr"] is not None
    plain = (matrices or major < 9) and not own.get("GROUPED") and not limited
    use = 2 if common["DROPOUT"] else 0 if plain else 1

    def start(option: Option) -> None:
        tile = Tile(*option)
        count = tile.rows if "kv_heads" in own else tile.keys
        read = {
            f"{name}_matrix": matrix(x, count) if matrices else None for name, x in tensors.items()
        }
        blocks, heads = triton.cdiv(common["queries"], tile.rows), q.shape[1]
        if "kv_heads" in own:
            blocks, heads = triton.cdiv(common["s"], tile.keys), own["kv_heads"]
        grid = (blocks, heads, q.shape[0])
        with torch.cuda.device(q.device) if cuda else contextlib.nullcontext():
            kernel[grid](
                **common,
                **own,
                **read,
                ROWS=tile.rows,
                KEYS=tile.keys,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )

    length = triton.next_power_of_2(common["s"])
    key = (
        f"{kernel.__name__} {str(q.dtype).removeprefix('torch.')} d{common['D']} s{length} "
        f"{'causal' if common['CAUSAL'] else 'full'} {_USES[use]}"
    )
    OPTIONS.launch(
        key,
        tiles_of(kernel.__name__, common["D"], q.element_size(), 10 * major + minor, use),
        start,
    )


# Compiled once for all values: these differ from call to call or say nothing.
_QKV = [f"{name}_{dim}" for name in "qkv" for dim in "bns"]
_PLAIN = [
    *_QKV,
    "heads",
    "queries",
    "s",
    "window",
    "scale",
    "key0",
    "key1",
    "threshold",
    "keep_scale",
    "start",
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
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
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
    index = start + (head * s + position) * s
    scale *= _LOG2E  # powers of 2 from here on
    begin, full, end = _keys_seen(
        real_ptr, position_ptr, first, position, rows, queries, row, s, ROWS, KEYS, CAUSAL
    )
    q = _load(q_ptr + (b * q_b + head * q_n) * UNIT, row, q_s * UNIT, queries, ROWS, HEAD, D)
    acc, total = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    for edge in tl.static_range(2):
        for key in range(full if edge else begin, end if edge else tl.minimum(full, end), KEYS):
            k = _tile(k_matrix, k_row, k_col, k_ptr, key, k_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            scores = _scores(q, k, position, first, key, real_ptr, s, KEYS, CAUSAL, edge == 1)
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            top = new_top
            if DROPOUT:
                p = tl.where(_kept(index, key, noise, KEYS, DROPOUT), p, 0.0)
            v = _tile(v_matrix, v_row, v_col, v_ptr, key, v_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=_PRECISION)
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
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
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
    index = start + (head * s + position) * s
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
    for edge in tl.static_range(2):
        for key in range(full if edge else begin, end if edge else tl.minimum(full, end), KEYS):
            k = _tile(k_matrix, k_row, k_col, k_ptr, key, k_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            v = _tile(v_matrix, v_row, v_col, v_ptr, key, v_s * UNIT, s, KEYS, HEAD, D, edge == 0)
            scores = _scores(q, k, position, first, key, real_ptr, s, KEYS, CAUSAL, edge == 1)
            p = tl.exp2(scores * (scale * _LOG2E) - lse[:, None])
            dp = tl.dot(dout, tl.trans(v), input_precision=_PRECISION)
            if DROPOUT:
                dp = tl.where(_kept(index, key, noise, KEYS, DROPOUT), dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=_PRECISION)
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
    counter_ptr,
    key0,
    key1,
    threshold,
    keep_scale,
    start,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
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
                scale * _LOG2E,
                keep_scale,
                noise,
                start + head * s * s,
                UNIT,
                HEAD,
                D,
                ROWS,
                KEYS,
                CAUSAL,
                WINDOW,
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
            scale * _LOG2E,
            keep_scale,
            noise,
            start + kv * s * s,
            UNIT,
            HEAD,
            D,
            ROWS,
            KEYS,
            CAUSAL,
            WINDOW,
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
    keep_scale,
    noise,
    start,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The sums over the queries of one head; transposed tiles [KEYS, ROWS], so that P and dS go on
    from registers."""
    q_row, q_col = _corner(q_matrix, q_at, q_s, UNIT)
    dout_row, dout_col = _corner(dout_matrix, dout_at, dout_s, UNIT)
    q_ptr += q_at * UNIT
    dout_ptr += dout_at * UNIT
    LIMITED: tl.constexpr = first_ptr is not None or position_ptr is not None or WINDOW
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
            scores = tl.dot(k, tl.trans(q), input_precision=_PRECISION)
            p = tl.exp2(scores * scale - lse[None, :])
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
            dp = tl.dot(v, tl.trans(dout), input_precision=_PRECISION)
            if DROPOUT:
                kept = tl.trans(_kept(start + position.to(tl.int64) * s, key, noise, KEYS, DROPOUT))
                dv = tl.dot(
                    tl.where(kept, p, 0.0).to(dout.dtype), dout, dv, input_precision=_PRECISION
                )
                dp = tl.where(kept, dp * keep_scale, 0.0)
            else:
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=_PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=_PRECISION)
    return dk, dv


@triton.jit
def _place(COUNT: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's first position, head, sample. A head's programs follow each other: they share
    the L2 cache."""
    block = tl.program_id(0)
    if LAST_FIRST:  # the longest first: what runs last is short
        block = tl.num_programs(0) - 1 - block
    return block * COUNT, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)


@triton.jit
def _positions(position_ptr, rows, queries):
    """The positions of some queries among the keys."""
    position = rows
    if position_ptr is not None:
        position = tl.load(position_ptr + rows, mask=rows < queries, other=0)
    return position


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
    position,
    first,
    key,
    real_ptr,
    s,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """q k^T [ROWS, KEYS], -infinity where the key is not to be seen. EDGE: on the diagonal or at
    the end."""
    keys = key + tl.arange(0, KEYS)
    scores = tl.dot(q, tl.trans(k), input_precision=_PRECISION)
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
def _kept(index, key, noise, KEYS: tl.constexpr, DROPOUT: tl.constexpr):
    """The elements of [ROWS, KEYS] that dropout keeps; `index` int64 [ROWS] is the mask's index of
    each row's key 0."""
    key0, key1, step, sample, threshold = noise
    if (
        DROPOUT == _QUADS
    ):  # rows begin at multiples of 4: a counter has the words of four neighbours
        quad = (index >> 2)[:, None] + (key // 4 + tl.arange(0, KEYS // 4))[None, :]
        bits = _generate(quad, key0, key1, step, sample)
    else:
        index = index[:, None] + (key + tl.arange(0, KEYS))[None, :]
        w0, w1, w2, w3 = _words(index >> 2, key0, key1, step, sample)
        word = (index & 3).to(tl.int32)
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits >= threshold.to(tl.uint32, bitcast=True)
