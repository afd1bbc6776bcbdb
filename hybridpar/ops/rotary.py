"""Rotary position embedding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import apply, once_differentiable
from hybridpar.ops.backends.libraries import Shapes, heads_inside, without_gaps
from hybridpar.ops.backends.registry import SCALED, resolve


class Frequencies(NamedTuple):
    """Rotary frequencies that are no powers of a base: of a scaled model (nn.rotary).

    Attributes:
        values: Angle per position of each pair of features.
        magnitude: Factor of the rotated features.
    """

    values: tuple[float, ...] = ()
    magnitude: float = 1.0


POWERS = Frequencies()
"""No other frequencies: the powers of the base."""


def rotary(
    x: Tensor,
    base: float = 10000.0,
    *,
    frequencies: Frequencies = POWERS,
    offset: int = 0,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Turn each pair (x[..., i], x[..., i + d/2]) by position * base^(-2i/d), LLaMA's split-
    halves order.

    Positions are offset, offset + 1, ..., or given. Angles are computed in float64.

    Args:
        frequencies: Angle per position of each pair, in place of the powers of `base`.

    Shapes: x [b, n, s, d] with d even; positions [s] or [b, s] -> [b, n, s, d].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 2104.09864.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x must be [b, n, s, d] with d even, got {tuple(x.shape)}")
    b, _, s, _ = x.shape
    if positions is not None and positions.shape not in ((s,), (b, s)):
        raise ValueError(f"positions must be [{s}] or [{b}, {s}], got {tuple(positions.shape)}")
    if frequencies.values and len(frequencies.values) != x.shape[-1] // 2:
        raise ValueError(
            f"frequencies must be {x.shape[-1] // 2}, one for each pair of features, got "
            f"{len(frequencies.values)}"
        )
    needs = SCALED if frequencies.values else ()
    code = resolve("rotary", backend, x, needs=needs)
    return code(x, base, frequencies, offset, positions)


def rotary_torch(
    x: Tensor, base: float, frequencies: Frequencies, offset: int, positions: Tensor | None
) -> Tensor:
    if positions is None:
        positions = torch.arange(offset, offset + x.shape[2], device=x.device)
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    if frequencies.values:
        frequency = torch.tensor(frequencies.values, dtype=torch.float64, device=x.device)
    else:
        frequency = base ** (torch.arange(half, dtype=torch.float64, device=x.device) / -half)
    angle = positions.double().unsqueeze(-1) * frequency  # [s, d/2] or [b, s, d/2]
    if angle.dim() == 3:
        angle = angle.unsqueeze(1)
    cos = angle.cos()
    sin = angle.sin()
    if frequencies.magnitude != 1:
        cos = cos * frequencies.magnitude
        sin = sin * frequencies.magnitude
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    x1 = x[..., :half].to(dtype)
    x2 = x[..., half:].to(dtype)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class _Rotary(Function):
    """The derivative of a rotation is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any,
        library: Any,
        x: Tensor,
        base: float,
        frequencies: Frequencies,
        offset: int,
        positions: Tensor | None,
    ) -> Tensor:
        ctx.library = library
        places = None if positions is None else positions.contiguous()
        ctx.settings = (base, list(frequencies.values), frequencies.magnitude, offset, places)
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
            None,
        )


rotary_fused = partial(apply, _Rotary)
PASSES: Shapes = {"rotary": heads_inside}
