"""Attention on the GPU without the matrix of probabilities: its operators, and how their kernels
are started.

attention_kernels.py has the kernels and their costs, attention_mask.py the keys that they see.
b samples, s positions, n query heads, n_kv key and value heads, d head dimension.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import attention_kernels
from .attention_mask import QUADS, WORDS
from .options import OPTIONS, Option
from .philox import _signed
from .tiles import Tile, has_copy_engine, is_matrix, matrix, tiles_of

OPERATORS = {
    "attention": (),
    "attention_backward": (),
}

_NO_WINDOW = 1 << 30


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    first: Tensor | None,
    position: Tensor | None,
    kv_head: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    keep_scale: float,
    start: int,
    mask_row: Tensor | None = None,
    mask_keys: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return out and lse; for a query that sees no key lse is +infinity and out is zero.

    Args:
        first: The first key that each query may see. None: key 0.
        position: The position of each query among the keys. None: there are as many queries.
        kv_head: The key and value head of each query head.
        softcap: Scores become softcap * tanh(score / softcap). 0: they do not.
        window: Most keys that a query sees. 0: no limit.
        threshold: Dropout if above 0: probability (head, position, key) of a sample has the bits of
            index start + (head * s + position) * s + key, stays if they are at least `threshold`,
            and is then multiplied by `keep_scale`.
        mask_row: The row of dropout's mask for each query, if k and v are a block of a sample's
            keys: its position in the sample. None: its position among the keys.
        mask_keys: Columns of dropout's mask: keys of the sample. 0: as many as there are here.

    Shapes: q [b, n, queries, d]; k, v [b, n_kv, s, d], no gaps in d; real bool [b, s]; first int32
    [b, queries]; position, mask_row int32 [queries] -> [b, queries, n, d], float32 [b, n, queries].
    """
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel():
        common = _common(
            q,
            k,
            v,
            Limits(causal, real, first, position, window),
            (kv_head, scale, softcap),
            Dropout(key0, key1, counter, threshold, keep_scale, start, mask_row, mask_keys),
        )
        _launch(
            attention_kernels.forward_kernel,
            common,
            out_ptr=out,
            lse_ptr=lse,
            **_strides(q=q, k=k, v=v),
        )
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
    softcap: float,
    causal: bool,
    window: int,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    keep_scale: float,
    start: int,
    mask_row: Tensor | None = None,
    mask_keys: int = 0,
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
        (kv_head, scale, softcap),
        Dropout(key0, key1, counter, threshold, keep_scale, start, mask_row, mask_keys),
    )
    common |= {
        "dout_ptr": dout,
        "lse_ptr": lse,
        "delta_ptr": delta,
        **_strides(q=q, k=k, v=v, dout=dout),
    }
    _launch(attention_kernels.dq_kernel, common, out_ptr=out, dq_ptr=dq)
    grouped = kv_head != list(range(k.shape[1]))
    _launch(
        attention_kernels.dkdv_kernel,
        common,
        dk_ptr=dk,
        dv_ptr=dv,
        kv_heads=k.shape[1],
        GROUPED=grouped,
    )
    return dq, dk, dv


class Dropout(NamedTuple):
    """The probabilities that dropout keeps: see `attention`."""

    key0: int
    key1: int
    counter: Tensor | None
    threshold: int
    keep_scale: float
    start: int
    mask_row: Tensor | None
    mask_keys: int

    def arguments(self, keys: int) -> dict[str, Any]:
        """Return the arguments of kernels. keys: number of keys at hand."""
        columns = self.mask_keys or keys
        kind = 0
        if self.threshold:
            kind = QUADS.value if columns % 4 == self.start % 4 == 0 else WORDS.value
        key0, key1, threshold = _signed(self.key0, self.key1, self.threshold)
        return {
            "counter_ptr": self.counter,
            "mask_row_ptr": self.mask_row,
            "mask_keys": columns,
            "key0": key0,
            "key1": key1,
            "threshold": threshold,
            "keep_scale": self.keep_scale if kind else 1.0,
            "start": self.start,
            "DROPOUT": kind,
        }


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
    heads: tuple[list[int], float, float],
    dropout: Dropout,
) -> dict[str, Any]:
    """Return the arguments of all kernels, besides strides."""
    kv_head, scale, softcap = heads
    assert scale > 0, (
        f"scale must be positive, got {scale}"
    )  # the largest score must give the largest scaled one
    n, queries, d = q.shape[1:]
    s = k.shape[2]
    limits.check(queries, s)
    assert len(kv_head) == n, f"kv_head needs {n} entries, got {kv_head}"
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
        "softcap": softcap,
        **dropout.arguments(s),
        "HEAD": d,
        "D": max(16, triton.next_power_of_2(d)),
        "CAUSAL": limits.causal,
        "WINDOW": limits.window > 0,
        "SOFTCAP": softcap > 0,
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
