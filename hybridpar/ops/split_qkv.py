"""The split of the fused qkv product into heads, with rotary positions.

A row of the product holds groups of heads: the query heads of a group, its key, its value. The
forward pass makes views where it can. The backward pass joins the gradients of q, k and v again.
Triton does that in one pass, which also turns them back and sums the gradient of the bias.

b samples, s positions, n query heads, g groups (key and value heads), d head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.ops.backends.libraries import Shapes, without_gaps
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.rotary import POWERS, Frequencies, rotary


class RotarySettings(NamedTuple):
    """Rotary positions of queries and keys.

    Attributes:
        base: See `rotary`.
        features: Number of a head's first features that are turned.
        backend: Backend of `rotary`.
        frequencies: See `rotary`.
    """

    base: float
    features: int
    backend: str = "auto"
    frequencies: Frequencies = POWERS


def split_qkv(
    qkv: Tensor,
    groups: Sequence[int],
    *,
    bias: Tensor | None = None,
    turn: RotarySettings | None = None,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused product into queries, keys and values, and turn queries and keys to their
    positions.

    Args:
        qkv: The product, [b, s, rows], in which the bias has been added already.
        groups: Number of query heads of each group. All but the first and the last are of one size,
            the largest.
        bias: The bias [rows] that is to get its gradient here. The product was computed with
            `bias.detach()`.
        turn: None: no rotary positions.
        positions: int64 [s] or [b, s]. None: 0, 1, ...

    Returns:
        q [b, n, s, d], k and v [b, g, s, d].

    Raises: ValueError for shapes that do not fit; ConfigError if the backend cannot run.
    """
    _check(qkv, groups, bias)
    if not torch.is_grad_enabled():
        return _split(qkv, groups, turn, positions)
    code = resolve("split_qkv", backend, qkv)
    outputs: tuple[Tensor, Tensor, Tensor] = code(qkv, bias, list(groups), turn, positions)
    return outputs


def sums_bias(x: Tensor, backend: str = "auto") -> bool:
    """Whether the backend for tensors like `x` sums the gradient of the bias at no cost of its own.

    If not, the linear layer should do it, in its own backward pass.
    """
    return torch.is_grad_enabled() and resolve("split_qkv", backend, x) is not split_qkv_torch


def split_heads(qkv: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split the product into heads: views if groups are of one size, except for queries of
    several heads.

    Shapes: [b, s, rows] -> q [b, s, n, d], k and v [b, s, g, d].
    """
    b, s, _ = qkv.shape
    d = head_dim(qkv, groups)
    if len(set(groups)) == 1:
        # b and s as one: gradients of up to 4 dimensions are joined by one kernel; einops would add
        # 15 us
        q, k, v = qkv.reshape(b * s, len(groups), groups[0] + 2, d).split((groups[0], 1, 1), dim=2)
        q, k, v = (t.unflatten(0, (b, s)) for t in (q.flatten(1, 2), k.squeeze(2), v.squeeze(2)))
        return q, k, v
    slots = [slots for m in groups for slots in (m, 1, 1)]
    parts = rearrange(qkv, "b s (slots d) -> b s slots d", d=d).split(slots, dim=2)
    q, k, v = (torch.cat(parts[i::3], dim=2) for i in range(3))
    return q, k, v


def head_dim(qkv: Tensor, groups: Sequence[int]) -> int:
    """Return the features of a head; each group has one head for a key and one for a value."""
    return qkv.shape[-1] // (sum(groups) + 2 * len(groups))


def split_qkv_torch(
    qkv: Tensor,
    bias: Tensor | None,
    groups: list[int],
    turn: RotarySettings | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _split(qkv if bias is None else _WithBias.apply(qkv, bias), groups, turn, positions)


def _split(
    qkv: Tensor, groups: Sequence[int], turn: RotarySettings | None, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in split_heads(qkv, groups))
    if turn is not None:
        q = turn_heads(q, turn, positions)
        k = turn_heads(k, turn, positions)
    return q, k, v


def turn_heads(x: Tensor, turn: RotarySettings, positions: Tensor | None) -> Tensor:
    """Turn the first features of each head. Shapes: [b, n, s, d] -> the same."""
    settings: dict[str, Any] = {
        "frequencies": turn.frequencies,
        "positions": positions,
        "backend": turn.backend,
    }
    if turn.features == x.shape[-1]:
        return rotary(x, turn.base, **settings)
    first, rest = x.split((turn.features, x.shape[-1] - turn.features), dim=-1)
    return torch.cat((rotary(first, turn.base, **settings), rest), dim=-1)


def _check(qkv: Tensor, groups: Sequence[int], bias: Tensor | None) -> None:
    if not groups or min(groups) < 1 or any(m != max(groups) for m in groups[1:-1]):
        raise ValueError(
            "each group must have at least one query head, and every group between the first "
            "and the last as many as the largest, got "
            f"{list(groups)}"
        )
    if qkv.dim() != 3 or qkv.shape[-1] % (heads := sum(groups) + 2 * len(groups)):
        raise ValueError(
            f"qkv must be [b, s, rows] with rows a multiple of {heads} heads, got "
            f"{tuple(qkv.shape)}"
        )
    if bias is not None and (bias.shape != qkv.shape[-1:] or bias.dtype != qkv.dtype):
        raise ValueError(
            f"bias must be {qkv.dtype} [{qkv.shape[-1]}], got {bias.dtype} {tuple(bias.shape)}"
        )


class _WithBias(Function):
    """The product with its bias, whose gradient is a sum of its own."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor) -> Tensor:
        return qkv.view_as(qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor, Tensor | None]:
        return dqkv, dqkv.flatten(0, 1).sum(0) if ctx.needs_input_grad[1] else None


class _SplitQkv(Function):
    """Keeps the positions alone: the derivative of a rotation is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any,
        library: Any,
        qkv: Tensor,
        bias: Tensor | None,
        groups: list[int],
        turn: RotarySettings | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.library = library
        ctx.groups = groups
        ctx.rotation = (1.0, [], 1.0, 0)
        if turn is not None:
            values, magnitude = turn.frequencies
            ctx.rotation = (turn.base, list(values), magnitude, turn.features)
        ctx.positions = None if turn is None or positions is None else positions.contiguous()
        return _split(qkv, groups, turn, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        with_bias = ctx.needs_input_grad[2]
        dqkv, dbias = ctx.library.split_qkv_backward(
            without_gaps(dq),
            without_gaps(dk),
            without_gaps(dv),
            ctx.groups,
            with_bias,
            *ctx.rotation,
            ctx.positions,
        )
        return None, dqkv, dbias if with_bias else None, None, None, None


def _gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, groups: list[int], with_bias: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    b, n, s, d = dq.shape
    rows = (n + 2 * len(groups)) * d
    return dq.new_empty((b, s, rows)), dq.new_empty(rows if with_bias else 0)


split_qkv_fused = _SplitQkv.apply
PASSES: Shapes = {"split_qkv_backward": _gradients}
