"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.ops.backends.libraries import Shapes, heads_inside, without_gaps
from hybridpar.ops.backends.registry import resolve


def rotary(
    x: Tensor,
    base: float = 10000.0,
    *,
    offset: int = 0,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Turn each pair (x[..., i], x[..., i + d/2]) by position * base^(-2i/d), LLaMA's split-
    halves order.

    Positions are offset, offset + 1, ..., or given. Angles are computed in float64.

    Shapes: x [b, n, s, d] with d even; positions [s] or [b, s] -> [b, n, s, d].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 2104.09864.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x must be [b, n, s, d] with d even, got {tuple(x.shape)}")
    b, _, s, _ = x.shape
    if positions is not None and positions.shape not in ((s,), (b, s)):
        raise ValueError(f"positions must be [{s}] or [{b}, {s}], got {tuple(positions.shape)}")
    return resolve("rotary", backend, x)(x, base, offset, positions)


def rotary_torch(x: Tensor, base: float, offset: int, positions: Tensor | None) -> Tensor:
    if positions is None:
        positions = torch.arange(offset, offset + x.shape[2], device=x.device)
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (torch.arange(half, dtype=torch.float64, device=x.device) / -half)
    angle = positions.double().unsqueeze(-1) * frequency  # [s, d/2] or [b, s, d/2]
    if angle.dim() == 3:
        angle = angle.unsqueeze(1)
    cos = angle.cos().to(dtype)
    sin = angle.sin().to(dtype)
    x1 = x[..., :half].to(dtype)
    x2 = x[..., half:].to(dtype)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class _Rotary(Function):
    """The derivative of a rotation is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any, library: Any, x: Tensor, base: float, offset: int, positions: Tensor | None
    ) -> Tensor:
        ctx.library = library
        ctx.settings = (base, offset, None if positions is None else positions.contiguous())
        return library.rotary(without_gaps(x), *ctx.settings, False).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            ctx.library.rotary(without_gaps(dy), *ctx.settings, True).transpose(1, 2),
            None,
            None,
            None,
        )


rotary_fused = _Rotary.apply
PASSES: Shapes = {"rotary": heads_inside}
