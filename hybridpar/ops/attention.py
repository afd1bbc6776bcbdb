"""Scaled dot-product attention over the heads that this rank holds.

b samples, s positions, n query heads, n_kv key and value heads (local ones), d head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import apply, once_differentiable
from hybridpar.ops.backends.libraries import Shapes, heads_inside, wide_type, without_gaps
from hybridpar.ops.backends.registry import SOFTCAP, resolve
from hybridpar.ops.dropout import KEEP_ALL, DropoutMask, DropoutSpec, drop, make_mask
from hybridpar.random import RandomKey


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """The keys that each query attends to, and the dropout of their probabilities.

    It is everything that a backend is told besides q, k and v. The query at position p sees the
    real keys j with

        max(first_key of the query, p - window + 1) <= j <= p      if causal, otherwise all of them

    so first keys express packed documents, windows express local attention, and positions express
    queries that are not neighbours. Blocks of keys that none of a block of queries sees cost
    nothing.

    Attributes:
        causal: Whether a query sees only keys up to its own position.
        kv_index: The key and value head of each query head.
        padding_mask: bool [b, keys], contiguous, True = real. None: all keys are real.
        dropout: The mask of the probabilities [b, n, keys, keys], of which the queries have the
            rows of their positions.
        first_key: int32 [b, queries], contiguous. None: key 0 for all queries.
        positions: int32 [queries], contiguous. None: the queries have the last positions.
        window: Most keys that a query sees, its own included. 0: no limit.
        scale: Factor of the products of queries and keys. None: 1 / sqrt(d).
        softcap: Scores become softcap * tanh(score / softcap). 0: they do not.
    """

    causal: bool
    kv_index: list[int]
    padding_mask: Tensor | None = None
    dropout: DropoutMask = KEEP_ALL
    first_key: Tensor | None = None
    positions: Tensor | None = None
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0

    @property
    def is_square(self) -> bool:
        """Whether the rule is that of full or causal attention, without other limits."""
        return self.first_key is None and self.positions is None and self.window == 0

    @property
    def is_plain(self) -> bool:
        """Whether libraries can express the mask: square, no padding and no dropout."""
        return self.is_square and self.padding_mask is None and self.dropout.threshold == 0

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of the products of queries and keys."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    padding_mask: Tensor | None = None,
    window: int | None = None,
    first_key: Tensor | None = None,
    positions: Tensor | None = None,
    kv_index: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    key: RandomKey | None = None,
    site: int = 0,
    head_start: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(scale q k^T) v, with dropout on the softmax.

    If there are fewer queries than keys and no `positions`, the queries have the last positions;
    torch's kernel computes them, whatever the backend. A query that sees no key (all padding)
    yields zeros, and no gradient.

    Args:
        window: Most keys that a query sees, its own included (sliding window). None: no limit.
        first_key: The first key that each query may see, such as the start of its document.
        positions: The position of each query among the keys, ascending for speed.
        kv_index: The key and value head of each query head. Without it, each serves n / n_kv
            neighbours.
        head_start: Global number of the first query head: the dropout mask of (head, position, key)
            has index (head * keys + position) * keys + key within its sample.
        scale: Factor of the products. None: 1 / sqrt(d).
        softcap: Scores become softcap * tanh(score / softcap), by torch's operators alone. 0: they
            do not.

    Shapes: q [b, n, s, d]; k, v [b, n_kv, keys, d]; padding_mask bool [b, keys], True = real;
    first_key int32 [b, s]; positions int32 [s] -> [b, n, s, d].
    Raises: ValueError for other shapes, for a window, first keys or positions without causal, or
    for dropout with fewer queries than keys and no positions; ConfigError if dropout_p is not in
    [0, 1), or the backend cannot run.
    Source: arXiv 1706.03762; grouped heads arXiv 2305.13245; windows arXiv 2004.05150.
    """
    _check(q, k, v, padding_mask)
    _check_limits(q, causal, window, first_key, positions)
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
    keys = k.shape[2]
    spec = DropoutSpec(dropout_p, key, site, inner_start=head_start * keys * keys)
    mask = AttentionMask(
        causal,
        list(kv_index),
        None if padding_mask is None else padding_mask.contiguous(),
        make_mask(spec, (q.shape[0], n, keys, keys), q.device),
        None if first_key is None else first_key.contiguous(),
        None if positions is None else positions.contiguous(),
        window if window is not None and window < keys else 0,  # a wider one hides nothing
        scale,
        softcap,
    )
    if s < keys and positions is None:
        if mask.dropout is not KEEP_ALL:
            raise ValueError(f"dropout needs as many queries as keys, got {_shapes(q, k, v)}")
        return attention_torch(q, k, v, mask)
    shape = attention_class(q.shape[3], grouped=n != n_kv)
    code = resolve("attention", backend, q, shape, SOFTCAP if softcap else ())
    return code(q, k, v, mask)


def attention_class(head_dim: int, *, grouped: bool) -> str:
    """Return the class of shapes for which one backend is the fastest."""
    return f"d{head_dim}{' grouped' * grouped}"


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Run torch's fused kernel (cuDNN's or FlashAttention's) if it has one, otherwise Triton's.

    torch's has neither dropout nor padding, first keys, positions or windows, and adds up dq in any
    order, so Triton's also runs if torch is to be deterministic.
    Shapes: see `attention`.
    """
    n = q.shape[1]
    n_kv = k.shape[1]
    d = q.shape[3]
    if (
        not mask.is_plain
        or mask.kv_index != _neighbours(n, n_kv)
        or d % 8
        or d > 256
        or q.numel() == 0
        or torch.are_deterministic_algorithms_enabled()
    ):
        return resolve("attention", "triton", q)(q, k, v, mask)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=mask.causal, scale=mask.scale, enable_gqa=n != n_kv
    )


def attention_torch(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Run torch's fused kernel, which has no counter-based dropout and no soft-cap; with either, the
    full matrix of probabilities."""
    b, n, queries, d = q.shape
    n_kv, keys = k.shape[1:3]
    if mask.kv_index != list(range(n_kv)):
        are_neighbours = mask.kv_index == _neighbours(n, n_kv)
        if are_neighbours and queries == 1 < keys and mask.is_square:
            # heads that share a key are queries of one head
            folded = q.reshape(b, n_kv, n // n_kv, d)
            one_each = replace(mask, causal=False, kv_index=list(range(n_kv)))
            return attention_torch(folded, k, v, one_each).reshape(b, n, 1, d)
        if are_neighbours:
            k, v = (x.unsqueeze(2).expand(-1, -1, n // n_kv, -1, -1).flatten(1, 2) for x in (k, v))
        else:
            index = torch.tensor(mask.kv_index, device=q.device)
            k = k.index_select(1, index)
            v = v.index_select(1, index)
    if mask.dropout is not KEEP_ALL or mask.softcap:
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        scores = scores * mask.scale_of(q)
        if mask.softcap:
            scores = (scores / mask.softcap).tanh() * mask.softcap
        return _drop_rows(_softmax(scores, mask), mask).to(q.dtype) @ v
    square = mask.padding_mask is None and mask.is_square
    if square and (queries in (1, keys) or not mask.causal):
        is_causal = mask.causal and queries == keys
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=mask.scale)
    visible, blind = _visible(queries, keys, mask, q.device)
    y = F.scaled_dot_product_attention(q, k, v, visible, scale=mask.scale)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _softmax(x: Tensor, mask: AttentionMask) -> Tensor:
    """Return the softmax over the keys that each query sees; zeros elsewhere."""
    visible, blind = _visible(x.shape[2], x.shape[3], mask, x.device)
    if visible is not None:
        x = x.masked_fill(~visible, float("-inf"))
    y = x.softmax(-1)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _drop_rows(probabilities: Tensor, mask: AttentionMask) -> Tensor:
    """Drop probabilities [b, n, queries, keys] by the mask's rows of the queries' positions."""
    if mask.positions is None:
        return drop(probabilities, mask.dropout)
    b, n, _, keys = probabilities.shape
    kept = drop(probabilities.new_ones(b, n, keys, keys), mask.dropout)
    return probabilities * kept[:, :, mask.positions.long()]


def _visible(
    queries: int, keys: int, mask: AttentionMask, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the keys that each query sees, and the queries that see none.

    The latter are shown all keys, and zeroed afterwards.
    """
    visible = None
    if not mask.is_square:
        visible = _within_limits(queries, keys, mask, device)
    elif mask.causal and queries > 1:  # a single query is the last, which sees all keys
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if mask.padding_mask is not None:
        real = mask.padding_mask[:, None, None, :]
        visible = real if visible is None else visible & real
    sees_itself = mask.padding_mask is None and mask.first_key is None and queries <= keys
    if visible is None or sees_itself:
        return visible, None
    blind = ~visible.any(-1, keepdim=True)
    return visible | blind, blind


def _within_limits(queries: int, keys: int, mask: AttentionMask, device: torch.device) -> Tensor:
    """Return the keys that each query sees by its position, window and first key.

    Shapes: [queries, keys], or [b, 1, queries, keys] with first keys.
    """
    key = torch.arange(keys, device=device)
    position = mask.positions
    if position is None:
        position = torch.arange(keys - queries, keys, device=device)
    position = position[:, None]
    visible = key <= position
    if mask.window:
        visible &= key > position - mask.window
    if mask.first_key is not None:
        visible = visible & (key >= mask.first_key[:, None, :, None])
    return visible


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


def _check_limits(
    q: Tensor,
    causal: bool,
    window: int | None,
    first_key: Tensor | None,
    positions: Tensor | None,
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}; None: no limit")
    if not causal and not (window is None and first_key is None and positions is None):
        raise ValueError("window, first_key and positions require causal = True")
    shapes = {
        "first_key": (first_key, (q.shape[0], q.shape[2])),
        "positions": (positions, (q.shape[2],)),
    }
    for name, (given, shape) in shapes.items():
        if given is not None and (given.dtype != torch.int32 or given.shape != shape):
            raise ValueError(
                f"{name} must be int32 {list(shape)}, got {given.dtype} {tuple(given.shape)}"
            )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


class SavedAttention(NamedTuple):
    """The tensors that the backward pass takes from the forward pass.

    Shapes: q [b, n, s, d]; k, v [b, n_kv, keys, d]; out [b, s, n, d]; lse, the logarithm of the sum
    of exponentials, [b, n, s].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionPasses(Protocol):
    """The two passes of an attention kernel."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """Return the output [b, s, n, d], and lse."""

    def backward(
        self, dout: Tensor, saved: SavedAttention, mask: AttentionMask
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, each [b, s, heads, d]; dout is [b, n, s, d]."""


class LibraryPasses(NamedTuple):
    """The passes of a library of operators, which take plain arguments (kernels/attention.py)."""

    library: Any

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        return self.library.attention(q, k, v, *_arguments(q, mask))

    def backward(
        self, dout: Tensor, saved: SavedAttention, mask: AttentionMask
    ) -> tuple[Tensor, ...]:
        return self.library.attention_backward(dout, *saved, *_arguments(saved.q, mask))


def _arguments(q: Tensor, mask: AttentionMask) -> tuple[Any, ...]:
    """Return the arguments of operators that describe the mask. Rows of dropout's mask are as many
    elements apart as there are keys."""
    return (
        mask.padding_mask,
        mask.first_key,
        mask.positions,
        mask.kv_index,
        mask.scale_of(q),
        mask.causal,
        mask.window,
        *mask.dropout[:5],
        mask.dropout.start,
    )


class _Attention(Function):
    """Keeps q, k, v, the output, and a number a row; recomputes the mask of dropout."""

    @staticmethod
    def forward(
        ctx: Any, passes: AttentionPasses, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        q = without_gaps(q)
        k = without_gaps(k)
        v = without_gaps(v)
        out, lse = passes.forward(q, k, v, mask)
        limits = mask.padding_mask, mask.first_key, mask.positions
        ctx.save_for_backward(q, k, v, out, lse, *limits)
        ctx.passes = passes
        ctx.mask = replace(mask, padding_mask=None, first_key=None, positions=None)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, padding_mask, first_key, positions = ctx.saved_tensors
        limits = {"padding_mask": padding_mask, "first_key": first_key, "positions": positions}
        mask = replace(ctx.mask, **limits)
        grads = ctx.passes.backward(without_gaps(dout), SavedAttention(*saved), mask)
        return None, *(grad.transpose(1, 2) for grad in grads), None


def attention_by(
    passes: AttentionPasses, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
) -> Tensor:
    """Run a kernel's passes, differentiably. Shapes: see `attention`."""
    return apply(_Attention, passes, q, k, v, mask)


def attention_fused(library: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    return attention_by(LibraryPasses(library), q, k, v, mask)


def _output_and_sums(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return heads_inside(q), q.new_empty(q.shape[:-1], dtype=wide_type(q))


PASSES: Shapes = {
    "attention": _output_and_sums,
    "attention_backward": lambda dout, q, k, *_: (
        heads_inside(q),
        heads_inside(k),
        heads_inside(k),
    ),
    "attention_hopper": _output_and_sums,
}
