"""Scaled dot-product attention over the heads that this rank holds.

b samples, s positions, n query heads, n_kv key and value heads (local ones), d head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.ops.backends.libraries import Shapes, heads_inside, wide_type, without_gaps
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.dropout import KEEP_ALL, Mask, drop, make_mask
from hybridpar.random import RandomKey


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    padding_mask: Tensor | None = None,
    kv_index: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    key: RandomKey | None = None,
    site: int = 0,
    head_start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, with dropout on the softmax.

    If there are fewer queries than keys, the queries have the last positions; torch's kernel
    computes
    them, whatever the backend. A position that sees no key (all padding) yields zeros, and no
    gradient.

    Args:
        kv_index: The key and value head of each query head. Without it, each serves n / n_kv
            neighbours.
        head_start: Global number of the first query head: the dropout mask of (head, q, k) has
            index (head * s + q) * s + k within its sample.

    Shapes: q [b, n, s, d]; k, v [b, n_kv, keys, d]; padding_mask bool [b, keys], True = real -> [b,
    n, s, d].
    Raises: ValueError for other shapes, or dropout with fewer queries than keys; ConfigError if
    dropout_p is not in [0, 1), or the backend cannot run.
    Source: arXiv 1706.03762; grouped heads arXiv 2305.13245.
    """
    _check(q, k, v, padding_mask)
    n = q.shape[1]
    n_kv = k.shape[1]
    if n == 0:
        return q
    if kv_index is None:
        if n_kv == 0 or n % n_kv:
            raise ValueError(
                f"{n} query heads must be a multiple of {n_kv} key heads, unless kv_index is given"
            )
        kv_index = _neighbours(n, n_kv)
    elif len(kv_index) != n or not all(0 <= i < n_kv for i in kv_index):
        raise ValueError(
            f"kv_index must have {n} entries from 0 to {n_kv - 1}, got {list(kv_index)}"
        )
    s = q.shape[2]
    mask = make_mask(
        (q.shape[0], n, s, s), q.device, dropout_p, key, site, inner_start=head_start * s * s
    )
    if s < k.shape[2]:
        if mask is not KEEP_ALL:
            raise ValueError(f"dropout needs as many queries as keys, got {_shapes(q, k, v)}")
        return attention_torch(q, k, v, causal, padding_mask, list(kv_index), mask)
    code = resolve("attention", backend, q, attention_class(q.shape[3], grouped=n != n_kv))
    return code(q, k, v, causal, padding_mask, list(kv_index), mask)


def attention_class(head_dim: int, *, grouped: bool) -> str:
    """Return the class of shapes for which one backend is the fastest."""
    return f"d{head_dim}{' grouped' * grouped}"


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    padding_mask: Tensor | None,
    kv_index: list[int],
    mask: Mask,
) -> Tensor:
    """Run torch's fused kernel (cuDNN's or FlashAttention's) if it has one, otherwise Triton's.

    torch's has neither dropout nor padding, and adds up dq in any order, so Triton's also runs if
    torch is to be deterministic.
    Shapes: see `attention`.
    """
    n = q.shape[1]
    n_kv = k.shape[1]
    d = q.shape[3]
    plain = mask is KEEP_ALL and padding_mask is None and kv_index == _neighbours(n, n_kv)
    if (
        not plain
        or d % 8
        or d > 256
        or q.numel() == 0
        or torch.are_deterministic_algorithms_enabled()
    ):
        return resolve("attention", "triton", q)(q, k, v, causal, padding_mask, kv_index, mask)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=n != n_kv)


def attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    padding_mask: Tensor | None,
    kv_index: list[int],
    mask: Mask,
) -> Tensor:
    """Run torch's fused kernel, which has no counter-based dropout; with dropout, the full
    matrix of probabilities."""
    b, n, queries, d = q.shape
    n_kv, keys = k.shape[1:3]
    if kv_index != list(range(n_kv)):
        if (
            kv_index == _neighbours(n, n_kv) and queries == 1 < keys
        ):  # heads that share a key are queries of one head
            folded = q.reshape(b, n_kv, n // n_kv, d)
            return attention_torch(
                folded, k, v, False, padding_mask, list(range(n_kv)), mask
            ).reshape(b, n, 1, d)
        if kv_index == _neighbours(n, n_kv):
            k, v = (x.unsqueeze(2).expand(-1, -1, n // n_kv, -1, -1).flatten(1, 2) for x in (k, v))
        else:
            index = torch.tensor(kv_index, device=q.device)
            k = k.index_select(1, index)
            v = v.index_select(1, index)
    if mask is not KEEP_ALL:
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        probabilities = _softmax(scores * q.shape[-1] ** -0.5, causal, padding_mask)
        return drop(probabilities, mask).to(q.dtype) @ v
    if padding_mask is None and (queries in (1, keys) or not causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and queries == keys)
    visible, blind = _visible(queries, keys, causal and queries > 1, padding_mask, q.device)
    y = F.scaled_dot_product_attention(q, k, v, visible)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _softmax(x: Tensor, causal: bool, padding_mask: Tensor | None) -> Tensor:
    """Return the softmax over the keys that each query sees; zeros elsewhere."""
    visible, blind = _visible(x.shape[2], x.shape[3], causal, padding_mask, x.device)
    if visible is not None:
        x = x.masked_fill(~visible, float("-inf"))
    y = x.softmax(-1)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _visible(
    queries: int,
    keys: int,
    causal: bool,
    padding_mask: Tensor | None,
    device: torch.device | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the keys that each query sees, and the queries that see none.

    The latter are shown all keys, and zeroed afterwards.
    """
    visible = None
    if causal:
        device = device if padding_mask is None else padding_mask.device
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if padding_mask is not None:
        real = padding_mask[:, None, None, :]
        visible = real if visible is None else visible & real
    if visible is None or (padding_mask is None and queries <= keys):
        return visible, None
    blind = ~visible.any(-1, keepdim=True)
    return visible | blind, blind


def _neighbours(n: int, n_kv: int) -> list[int]:
    """Return the key head of each query head if each serves n / n_kv neighbours; empty if n_kv
    does not divide n."""
    return [i // (n // n_kv) for i in range(n)] if n_kv and n % n_kv == 0 else []


def _check(q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            f"expected q [b, n, s, d] and k, v [b, n_kv, keys, d], got {_shapes(q, k, v)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[2] > k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must have the same samples and head dimension, and q at most as many "
            "positions as k, got "
            f"{_shapes(q, k, v)}"
        )
    if padding_mask is not None and (
        padding_mask.dtype != torch.bool or padding_mask.shape != (k.shape[0], k.shape[2])
    ):
        raise ValueError(
            f"padding_mask must be bool {[k.shape[0], k.shape[2]]}, got {padding_mask.dtype} "
            f"{tuple(padding_mask.shape)}"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


class _Attention(Function):
    """Keeps q, k, v, the output, and a number a row; recomputes the mask of dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        library: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        padding_mask: Tensor | None,
        kv_index: list[int],
        mask: Mask,
    ) -> Tensor:
        q = without_gaps(q)
        k = without_gaps(k)
        v = without_gaps(v)
        real = None if padding_mask is None else padding_mask.contiguous()
        ctx.library = library
        ctx.settings = (kv_index, q.shape[-1] ** -0.5, causal, *mask[:5], mask.start)
        out, lse = library.attention(q, k, v, real, *ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse, real)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.library.attention_backward(
            without_gaps(dout), *ctx.saved_tensors, *ctx.settings
        )
        return None, *(grad.transpose(1, 2) for grad in grads), None, None, None, None


def _output_and_sums(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return heads_inside(q), q.new_empty(q.shape[:-1], dtype=wide_type(q))


attention_fused = _Attention.apply
PASSES: Shapes = {
    "attention": _output_and_sums,
    "attention_backward": lambda dout, q, k, *_: (
        heads_inside(q),
        heads_inside(k),
        heads_inside(k),
    ),
    "attention_hopper": _output_and_sums,
}
