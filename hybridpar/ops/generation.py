"""Operators of generation: products of a few rows, and attention of one new token of each text.

Neither has a backward pass. b texts, n query heads, g groups (key and value heads), d head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.ops.backends.libraries import Shapes
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.split_qkv import RotarySettings, split_qkv

MOST_ROWS = 16
"""Rows of x from which on few_rows_linear's kernel is refused."""
LEAST_COLUMNS = 4
"""Columns of y that its kernel needs at least."""


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Return x W^T + b for few rows of x, in the time that it takes to read W.

    A row's result does not depend on the other rows.

    Shapes: x [.., i], weight [o, i], bias [o] -> [.., o].
    """
    if x.shape[:-1].numel() > MOST_ROWS or weight.shape[0] < LEAST_COLUMNS:
        return F.linear(x, weight, bias)
    return resolve("few_rows_linear", backend, x)(x, weight, bias)


def few_rows_linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def few_rows_linear_fused(library: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return library.few_rows_linear(x.contiguous(), weight.contiguous(), bias)


@dataclass(frozen=True, slots=True)
class NextToken:
    """How a layer attends to what it keeps of each text.

    Attributes:
        groups: Query heads of each group.
        window: Most keys that a query sees, its own included. 0: no limit.
        scale: Factor of the products of queries and keys.
        softcap: Scores become softcap * tanh(score / softcap). 0: they do not.
        turn: Rotary positions. None: there are none.
    """

    groups: tuple[int, ...]
    window: int
    scale: float
    softcap: float
    turn: RotarySettings | None


def next_token_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    how: NextToken,
    *,
    backend: str = "auto",
) -> Tensor:
    """Add the key and value of a new token of each text to those that are kept, and return what its
    queries attend to.

    Args:
        qkv: The fused product: of each group its queries, its key and its value.
        keys: Keys of earlier tokens, with their positions turned; the new one is written.
        values: Values of earlier tokens; the new one is written.
        positions: The position of each new token, int64.
        how: The rules.

    Shapes: qkv [b, 1, (n + 2 g) d]; keys and values [b, g, capacity, d]; positions [b, 1], or [1] of
    all texts -> [b, 1, n d].
    """
    return resolve("next_token_attention", backend, qkv)(qkv, keys, values, positions, how)


def next_token_attention_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, how: NextToken
) -> Tensor:
    b = len(qkv)
    q, k, v = split_qkv(qkv, how.groups, turn=how.turn, positions=positions, backend="torch")
    at = positions.flatten().expand(b)
    texts = torch.arange(b, device=qkv.device)
    keys[texts, :, at] = k.squeeze(2)
    values[texts, :, at] = v.squeeze(2)
    heads = torch.tensor(how.groups, device=qkv.device)
    shared = torch.arange(len(heads), device=qkv.device).repeat_interleave(heads)
    scores = (q @ keys[:, shared].mT).to(torch.promote_types(q.dtype, torch.float32)) * how.scale
    if how.softcap:
        scores = how.softcap * (scores / how.softcap).tanh()
    key = torch.arange(keys.shape[2], device=qkv.device)
    seen = key <= at[:, None]
    if how.window:
        seen &= key > at[:, None] - how.window
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights.to(q.dtype) @ values[:, shared]).transpose(1, 2).flatten(2)


def next_token_attention_fused(
    library: Any, qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, how: NextToken
) -> Tensor:
    rotation: tuple[float, Sequence[float], float, int] = (1.0, (), 1.0, 0)
    if how.turn is not None:
        frequencies, magnitude = how.turn.frequencies
        rotation = (how.turn.base, frequencies, magnitude, how.turn.features)
    return library.next_token_attention(
        qkv,
        keys,
        values,
        positions,
        how.groups,
        how.window,
        how.scale,
        how.softcap,
        *rotation,
    )


def has_kernels(x: Tensor, backend: str) -> bool:
    """Whether tensors like `x` have a faster way to attend than ops.attention with that backend."""
    if backend not in ("auto", "cpp") or torch.is_grad_enabled():
        return False
    code = resolve("next_token_attention", "auto", x)
    return code is not next_token_attention_torch


PASSES: Shapes = {
    "few_rows_linear": lambda x, weight, bias: x.new_empty((*x.shape[:-1], len(weight))),
    "next_token_attention": lambda qkv, keys, values, positions, groups, *_: qkv.new_empty(
        (len(qkv), 1, sum(groups) * keys.shape[-1])
    ),
}
