"""Scaled dot-product attention over the heads that this rank holds.

b samples, s positions, n query heads, n_kv key and value heads (local ones), d head dimension
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.ops.dropout import dropout
from hybridpar.ops.registry import resolve
from hybridpar.random import RandomKey


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, padding_mask: Tensor | None = None,
              kv_index: Sequence[int] | None = None, dropout_p: float = 0.0, key: RandomKey | None = None,
              site: int = 0, head_start: int = 0, backend: str = "auto", dropout_backend: str = "auto") -> Tensor:
    """softmax(q k^T / sqrt(d)) v, with dropout on the softmax.

    A position that sees no key (all padding) yields zeros, and no gradient. `kv_index[i]` is the key and value head of
    query head i; without it, each serves n / n_kv neighbours. `head_start` is the global number of the first query
    head: the dropout mask of (head, q, k) has index (head * s + q) * s + k within its sample.

    Shapes: q [b, n, s, d]; k, v [b, n_kv, s, d]; padding_mask bool [b, s], True = real -> [b, n, s, d].
    Raises: ValueError for other shapes; ConfigError if dropout_p is not in [0, 1), or the backend cannot run.
    Source: arXiv 1706.03762; grouped heads arXiv 2305.13245.
    """
    _check(q, k, v, padding_mask)
    n, n_kv = q.shape[1], k.shape[1]
    if n == 0:
        return q
    if kv_index is not None:
        if len(kv_index) != n or not all(0 <= i < n_kv for i in kv_index):
            raise ValueError(f"kv_index must have {n} entries from 0 to {n_kv - 1}, got {list(kv_index)}")
    elif n_kv == 0 or n % n_kv:
        raise ValueError(f"{n} query heads are no multiple of {n_kv} key heads; give kv_index")
    if kv_index is not None:
        index = torch.tensor(kv_index, device=q.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    elif n != n_kv:
        k, v = (x.unsqueeze(2).expand(-1, -1, n // n_kv, -1, -1).flatten(1, 2) for x in (k, v))

    def drop(probabilities: Tensor) -> Tensor:
        s = probabilities.shape[-1]
        return dropout(probabilities, dropout_p, key, site, inner_size=s, inner_start=head_start * s * s,
                       backend=dropout_backend)

    with_dropout = key is not None and dropout_p != 0.0
    return resolve("attention", backend, q)(q, k, v, causal, padding_mask, drop if with_dropout else None)


def attention_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding_mask: Tensor | None,
                    drop: Callable[[Tensor], Tensor] | None) -> Tensor:
    """`drop` is applied to the softmax; None: the fused kernel of torch, which has no counter-based dropout."""
    visible = blind = None
    if padding_mask is not None:
        visible = padding_mask[:, None, None, :]
        if causal:
            visible = visible & _triangle(q)
        blind = ~visible.any(-1, keepdim=True)  # sees nothing: let it see everything, and set it to zero afterwards
        visible = visible | blind
    if drop is None:
        out = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal and visible is None)
    else:
        if visible is None and causal:
            visible = _triangle(q)
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        out = drop(scores.softmax(-1)).to(q.dtype) @ v
    return out if blind is None else out.masked_fill(blind, 0.0)


def _triangle(q: Tensor) -> Tensor:
    s = q.shape[2]
    return torch.ones(s, s, dtype=torch.bool, device=q.device).tril()


def _check(q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"expected q [b, n, s, d] and k, v [b, n_kv, s, d], got {shapes}")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q and k must agree in samples, positions and head dimension, got {shapes}")
    if padding_mask is not None and (padding_mask.dtype != torch.bool or
                                     padding_mask.shape != (q.shape[0], q.shape[2])):
        raise ValueError(f"padding_mask must be bool [{q.shape[0]}, {q.shape[2]}], got {padding_mask.dtype} "
                         f"{tuple(padding_mask.shape)}")
