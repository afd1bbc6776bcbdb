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
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.dropout import KEEP_ALL, NO_DROPOUT, DropoutMask, DropoutSpec, drop, make_mask


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """The keys that each query attends to.

    The query at position p sees the real keys j with

        max(first_key of the query, p - window + 1) <= j <= p      if causal, otherwise all of them

    so first keys express packed documents, windows express local attention, and positions express
    queries that are not neighbours. Blocks of keys that none of a block of queries sees cost
    nothing.

    Attributes:
        causal: Whether a query sees only keys up to its own position; all limits below but the
            padding require it.
        padding_mask: bool [b, keys], True = real. None: all keys are real.
        window: Most keys that a query sees, its own included (sliding window). None: no limit.
        first_key: int32 [b, queries], the first key that each query may see, such as the start of
            its document. None: key 0 for all queries.
        positions: int32 [queries], the position of each query among the keys, ascending for speed.
            None: the queries have the last positions.
    """

    causal: bool
    padding_mask: Tensor | None = None
    window: int | None = None
    first_key: Tensor | None = None
    positions: Tensor | None = None

    @property
    def has_tensors(self) -> bool:
        """Whether there is padding, a first key or a position."""
        return not (self.padding_mask is None and self.first_key is None and self.positions is None)

    @property
    def is_square(self) -> bool:
        """Whether attention is full or causal, without other limits than padding."""
        return self.first_key is None and self.positions is None and self.window is None

    def prepared(self, keys: int) -> AttentionMask:
        """Return the mask as backends take it: tensors contiguous, and no window that hides none
        of the keys."""
        has_window = self.window is not None and self.window < keys
        return AttentionMask(
            self.causal,
            None if self.padding_mask is None else self.padding_mask.contiguous(),
            self.window if has_window else None,
            None if self.first_key is None else self.first_key.contiguous(),
            None if self.positions is None else self.positions.contiguous(),
        )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The settings of a layer's attention besides its mask.

    Attributes:
        kv_index: The key and value head of each query head. None: each serves n / n_kv neighbours.
        dropout: Dropout of the softmax: its probability, key and site.
        head_start: Global number of the first query head: the dropout mask of (head, position, key)
            has index (head * keys + position) * keys + key within its sample.
        scale: Factor of the products of queries and keys. None: 1 / sqrt(d).
        softcap: Scores become softcap * tanh(score / softcap). 0: they do not.
    """

    kv_index: Sequence[int] | None = None
    dropout: DropoutSpec = NO_DROPOUT
    head_start: int = 0
    scale: float | None = None
    softcap: float = 0.0


DEFAULT_OPTIONS = AttentionOptions()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Everything that a backend is told besides q, k and v.

    Attributes:
        mask: The keys that each query sees, prepared.
        kv_index: The key and value head of each query head.
        dropout: The dropout mask of the probabilities [b, n, keys, keys], of which the queries have
            the rows of their positions.
        scale: Factor of the products of queries and keys. None: 1 / sqrt(d).
        softcap: Scores become softcap * tanh(score / softcap). 0: they do not.
    """

    mask: AttentionMask
    kv_index: list[int]
    dropout: DropoutMask = KEEP_ALL
    scale: float | None = None
    softcap: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether libraries can express it: no limits, no padding, no dropout and no soft-cap."""
        is_unmasked = self.mask.padding_mask is None and self.dropout.threshold == 0
        return self.mask.is_square and is_unmasked and self.softcap == 0

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of the products of queries and keys."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, in which a query sees all keys, or the causal ones.

    Args:
        window: Most keys that a query sees, its own included (sliding window). None: no limit.

    Shapes, errors and the rest: see `masked_attention`.
    """
    return masked_attention(q, k, v, AttentionMask(causal, window=window), backend=backend)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(scale q k^T) v over the keys that the mask shows, with dropout on the softmax.

    If there are fewer queries than keys and no positions, the queries have the last positions;
    torch's kernel computes them, whatever the backend. A query that sees no key (all padding)
    yields zeros, and no gradient.

    Shapes: q [b, n, s, d]; k, v [b, n_kv, keys, d] -> [b, n, s, d].
    Raises: ValueError for other shapes, for a window, first keys or positions without causal, or
    for dropout with fewer queries than keys and no positions; ConfigError if the probability of
    dropout is not in [0, 1), or the backend cannot run.
    Source: arXiv 1706.03762; grouped heads arXiv 2305.13245; windows arXiv 2004.05150.
    """
    _check(q, k, v, mask.padding_mask)
    _check_limits(q, mask)
    b, n, s, d = q.shape
    n_kv = k.shape[1]
    keys = k.shape[2]
    if n == 0:
        return q
    dropout = options.dropout
    spec = DropoutSpec(
        dropout.p, dropout.key, dropout.site, inner_start=options.head_start * keys * keys
    )
    call = AttentionCall(
        mask.prepared(keys),
        key_heads(options.kv_index, n, n_kv),
        make_mask(spec, (b, n, keys, keys), q.device),
        options.scale,
        options.softcap,
    )
    if s < keys and mask.positions is None:
        if call.dropout is not KEEP_ALL:
            raise ValueError(f"dropout needs as many queries as keys, got {_shapes(q, k, v)}")
        return attention_torch(q, k, v, call)
    shape = attention_class(d, grouped=n != n_kv)
    code = resolve("attention", backend, q, shape)
    return code(q, k, v, call)


def key_heads(given: Sequence[int] | None, n: int, n_kv: int) -> list[int]:
    """Return the key head of each of n query heads.

    Raises:
        ValueError: The given heads are none of the n_kv heads, or none are given and n_kv does not
            divide n.
    """
    if given is None:
        if n_kv == 0 or n % n_kv:
            raise ValueError(
                f"{n} query heads must be a multiple of {n_kv} key heads, unless kv_index is given"
            )
        return _neighbours(n, n_kv)
    if len(given) != n or not all(0 <= i < n_kv for i in given):
        raise ValueError(f"kv_index must have {n} entries from 0 to {n_kv - 1}, got {list(given)}")
    return list(given)


def attention_class(head_dim: int, *, grouped: bool) -> str:
    """Return the class of shapes for which one backend is the fastest."""
    return f"d{head_dim}{' grouped' * grouped}"


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Run torch's fused kernel (cuDNN's or FlashAttention's) if it has one, otherwise Triton's.

    torch's has neither dropout nor padding, first keys, positions, windows or soft-caps, and adds up
    dq in any order, so Triton's also runs if torch is to be deterministic.
    Shapes: see `attention`.
    """
    n = q.shape[1]
    n_kv = k.shape[1]
    d = q.shape[3]
    if (
        not call.is_plain
        or call.kv_index != _neighbours(n, n_kv)
        or d % 8
        or d > 256
        or q.numel() == 0
        or torch.are_deterministic_algorithms_enabled()
    ):
        return resolve("attention", "triton", q)(q, k, v, call)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=call.mask.causal, scale=call.scale, enable_gqa=n != n_kv
    )


def attention_torch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Run torch's fused kernel, which has no counter-based dropout and no soft-cap; with either, the
    full matrix of probabilities."""
    b, n, queries, d = q.shape
    n_kv, keys = k.shape[1:3]
    mask = call.mask
    if call.kv_index != list(range(n_kv)):
        are_neighbours = call.kv_index == _neighbours(n, n_kv)
        if are_neighbours and queries == 1 < keys and mask.is_square:
            # heads that share a key are queries of one head
            folded = q.reshape(b, n_kv, n // n_kv, d)
            one_each = replace(call, mask=replace(mask, causal=False), kv_index=list(range(n_kv)))
            return attention_torch(folded, k, v, one_each).reshape(b, n, 1, d)
        if are_neighbours:
            k, v = (x.unsqueeze(2).expand(-1, -1, n // n_kv, -1, -1).flatten(1, 2) for x in (k, v))
        else:
            index = torch.tensor(call.kv_index, device=q.device)
            k = k.index_select(1, index)
            v = v.index_select(1, index)
    if call.dropout is not KEEP_ALL or call.softcap:
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        scores = scores * call.scale_of(q)
        if call.softcap:
            scores = (scores / call.softcap).tanh() * call.softcap
        return _drop_rows(_softmax(scores, mask), call).to(q.dtype) @ v
    square = mask.padding_mask is None and mask.is_square
    if square and (queries in (1, keys) or not mask.causal):
        is_causal = mask.causal and queries == keys
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=call.scale)
    visible, blind = _visible(queries, keys, mask, q.device)
    y = F.scaled_dot_product_attention(q, k, v, visible, scale=call.scale)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _softmax(x: Tensor, mask: AttentionMask) -> Tensor:
    """Return the softmax over the keys that each query sees; zeros elsewhere."""
    visible, blind = _visible(x.shape[2], x.shape[3], mask, x.device)
    if visible is not None:
        x = x.masked_fill(~visible, float("-inf"))
    y = x.softmax(-1)
    return y if blind is None else y.masked_fill(blind, 0.0)


def _drop_rows(probabilities: Tensor, call: AttentionCall) -> Tensor:
    """Drop probabilities [b, n, queries, keys] by the mask's rows of the queries' positions."""
    positions = call.mask.positions
    if positions is None:
        return drop(probabilities, call.dropout)
    b, n, _, keys = probabilities.shape
    kept = drop(probabilities.new_ones(b, n, keys, keys), call.dropout)
    return probabilities * kept[:, :, positions.long()]


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
    if mask.window is not None:
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


def _check_limits(q: Tensor, mask: AttentionMask) -> None:
    if mask.window is not None and mask.window < 1:
        raise ValueError(f"window must be at least 1, got {mask.window}; None: no limit")
    if not mask.causal and not mask.is_square:
        raise ValueError("window, first_key and positions require causal = True")
    shapes = {
        "first_key": (mask.first_key, (q.shape[0], q.shape[2])),
        "positions": (mask.positions, (q.shape[2],)),
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
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return the output [b, s, n, d], and lse."""

    def backward(
        self, dout: Tensor, saved: SavedAttention, call: AttentionCall
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, each [b, s, heads, d]; dout is [b, n, s, d]."""


class LibraryPasses(NamedTuple):
    """The passes of a library of operators, which take plain arguments (kernels/attention.py)."""

    library: Any

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        return self.library.attention(q, k, v, *arguments_of(q, call))

    def backward(
        self, dout: Tensor, saved: SavedAttention, call: AttentionCall
    ) -> tuple[Tensor, ...]:
        return self.library.attention_backward(dout, *saved, *arguments_of(saved.q, call))


def arguments_of(q: Tensor, call: AttentionCall) -> tuple[Any, ...]:
    """Return the arguments of operators that describe the call. Rows of dropout's mask are as many
    elements apart as there are keys."""
    mask = call.mask
    return (
        mask.padding_mask,
        mask.first_key,
        mask.positions,
        call.kv_index,
        call.scale_of(q),
        call.softcap,
        mask.causal,
        mask.window or 0,
        *call.dropout[:5],
        call.dropout.start,
    )


class _Attention(Function):
    """Keeps q, k, v, the output, and a number a row; recomputes the mask of dropout."""

    @staticmethod
    def forward(
        ctx: Any, passes: AttentionPasses, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> Tensor:
        q = without_gaps(q)
        k = without_gaps(k)
        v = without_gaps(v)
        out, lse = passes.forward(q, k, v, call)
        mask = call.mask
        # saved tensors are checked for changes in place, and freed after the backward pass
        ctx.save_for_backward(q, k, v, out, lse, mask.padding_mask, mask.first_key, mask.positions)
        ctx.passes = passes
        ctx.has_tensors = mask.has_tensors
        ctx.call = (
            replace(call, mask=AttentionMask(mask.causal, window=mask.window))
            if ctx.has_tensors
            else call
        )
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, padding_mask, first_key, positions = ctx.saved_tensors
        call = ctx.call
        if ctx.has_tensors:
            bare = call.mask
            mask = AttentionMask(bare.causal, padding_mask, bare.window, first_key, positions)
            call = replace(call, mask=mask)
        grads = ctx.passes.backward(without_gaps(dout), SavedAttention(*saved), call)
        return None, *(grad.transpose(1, 2) for grad in grads), None


def attention_by(
    passes: AttentionPasses, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> Tensor:
    """Run a kernel's passes, differentiably. Shapes: see `attention`."""
    return apply(_Attention, passes, q, k, v, call)


def attention_fused(library: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    return attention_by(LibraryPasses(library), q, k, v, call)


def _output_and_sums(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return heads_inside(q), q.new_empty(q.shape[:-1], dtype=wide_type(q))


def _gradients(dout: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads_inside(q), heads_inside(k), heads_inside(k)


PASSES: Shapes = {
    "attention": _output_and_sums,
    "attention_backward": _gradients,
    "attention_hopper": _output_and_sums,
}
