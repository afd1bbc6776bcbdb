"""The residual stream: normalisation over the last dimension, the addition before it, and both."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import apply, once_differentiable
from hybridpar.ops.backends.libraries import Shapes, like, wide_type
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.dropout import NO_DROPOUT, DropoutMask, DropoutSpec, drop, make_mask
from hybridpar.ops.dropout import dropout as drop_rows


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    Shapes: x [..., h], weight [h], bias [h] -> [..., h].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 1607.06450.
    """
    check_vectors(x, weight=weight, bias=bias)
    return resolve("layer_norm", backend, x)(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Shapes: x [..., h], weight [h] -> [..., h].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 1910.07467.
    """
    check_vectors(x, weight=weight)
    return resolve("rms_norm", backend, x)(x, weight, eps)


class NormWeights(NamedTuple):
    """The parameters of a norm: of layer norm with a bias, otherwise of RMS norm.

    Shapes: weight and bias [h].
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5


def add_norm(
    x: Tensor,
    residual: Tensor,
    norm: NormWeights,
    *,
    bias_of_x: Tensor | None = None,
    dropout: DropoutSpec = NO_DROPOUT,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the norm of total = residual + dropout(x + bias_of_x), and the total.

    Shapes: x and residual [b, .., h], bias_of_x [h] -> both [b, .., h].
    Raises: ValueError for other shapes; ConfigError if dropout's p is not in [0, 1), or the backend
    cannot run.
    """
    check_vectors(x, weight=norm.weight, bias=norm.bias, bias_of_x=bias_of_x)
    _check_residual(x, residual)
    if dropout.lies_apart:
        total = bias_dropout_add(x, residual, bias_of_x, dropout=dropout)
        if norm.bias is None:
            return rms_norm(total, norm.weight, norm.eps), total
        return layer_norm(total, norm.weight, norm.bias, norm.eps), total
    mask = make_mask(dropout, x.shape, x.device)
    return resolve("add_norm", backend, x)(x, bias_of_x, residual, norm, mask)


def bias_dropout_add(
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    dropout: DropoutSpec = NO_DROPOUT,
    backend: str = "auto",
) -> Tensor:
    """Return residual + dropout(x + bias).

    Shapes: x and residual [b, .., h], bias [h] -> [b, .., h].
    Raises: ValueError for other shapes; ConfigError if dropout's p is not in [0, 1), or the backend
    cannot run.
    """
    check_vectors(x, bias=bias)
    _check_residual(x, residual)
    if dropout.lies_apart:
        return residual + drop_rows(x if bias is None else x + bias, dropout)
    mask = make_mask(dropout, x.shape, x.device)
    return resolve("bias_dropout_add", backend, x)(x, bias, residual, mask)


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm_torch(
    x: Tensor, bias_of_x: Tensor | None, residual: Tensor, norm: NormWeights, mask: DropoutMask
) -> tuple[Tensor, Tensor]:
    total = bias_dropout_add_torch(x, bias_of_x, residual, mask)
    weight, bias, eps = norm
    if bias is None:
        return rms_norm_torch(total, weight, eps), total
    return layer_norm_torch(total, weight, bias, eps), total


def bias_dropout_add_torch(
    x: Tensor, bias: Tensor | None, residual: Tensor, mask: DropoutMask
) -> Tensor:
    return residual + drop(x if bias is None else x + bias, mask)


def check_vectors(x: Tensor, **vectors: Tensor | None) -> None:
    """Require vectors as long as x's last dimension. Raises: ValueError."""
    for name, vector in vectors.items():
        if vector is not None and (x.dim() < 1 or vector.shape != x.shape[-1:]):
            raise ValueError(
                f"{name} must have the last size of x {tuple(x.shape)}, got {tuple(vector.shape)}"
            )


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape"
        )


def layer_norm_fused(library: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return apply(_Norm, library, x, weight, bias, eps, True)


def rms_norm_fused(library: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return apply(_Norm, library, x, weight, None, eps, False)


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centre: bool,
    ) -> Tensor:
        x = x.contiguous()
        y, stats = library.norm(x, weight, bias, eps, centre)
        ctx.save_for_backward(x, weight, stats)
        ctx.library = library
        ctx.centre = centre
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.library.norm_backward(
            dy.contiguous(), *ctx.saved_tensors, ctx.centre
        )
        return None, dx, dweight, dbias if ctx.centre else None, None, None


class _FusedAddNorm(NamedTuple):
    """Arguments of `_AddNorm` besides tensors."""

    library: Any
    eps: float
    mask: DropoutMask


class _AddNorm(Function):
    """Keeps the total, the weight, and two numbers a row; recomputes the mask of dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias_of_x: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fused: _FusedAddNorm,
    ) -> tuple[Tensor, Tensor]:
        library, eps, mask = fused
        centre = bias is not None
        y, total, stats = library.add_norm(
            x.contiguous(), bias_of_x, residual.contiguous(), weight, bias, eps, centre, *mask
        )
        ctx.save_for_backward(total, weight, stats)
        ctx.library = library
        ctx.with_bias = bias_of_x is not None
        ctx.centre = centre
        ctx.mask = mask
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        dresidual, dx, dbias_of_x, dweight, dbias = ctx.library.add_norm_backward(
            dy, dtotal, total, weight, stats, ctx.with_bias, ctx.centre, *ctx.mask
        )
        return (
            dx if ctx.mask.threshold else dresidual,
            dbias_of_x if ctx.with_bias else None,
            dresidual,
            dweight,
            dbias if ctx.centre else None,
            None,
        )


def add_norm_fused(
    library: Any,
    x: Tensor,
    bias_of_x: Tensor | None,
    residual: Tensor,
    norm: NormWeights,
    mask: DropoutMask,
) -> tuple[Tensor, Tensor]:
    fused = _FusedAddNorm(library, norm.eps, mask)
    return apply(_AddNorm, x, bias_of_x, residual, norm.weight, norm.bias, fused)


class _BiasDropoutAdd(Function):
    @staticmethod
    def forward(
        ctx: Any, library: Any, x: Tensor, bias: Tensor | None, residual: Tensor, mask: DropoutMask
    ) -> Tensor:
        ctx.library = library
        ctx.with_bias = bias is not None
        ctx.mask = mask
        return library.bias_dropout_add(x.contiguous(), bias, residual.contiguous(), *mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx = dtotal
        dbias = None
        if ctx.with_bias or ctx.mask.threshold:
            dropped, dbias = ctx.library.bias_dropout_add_backward(
                dtotal.contiguous(), ctx.with_bias, *ctx.mask
            )
            dx = dropped if ctx.mask.threshold else dtotal
        return None, dx, dbias if ctx.with_bias else None, dtotal, None


def _stats(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(), 2), dtype=wide_type(x))


def _dropped(dtotal: Tensor, with_bias: bool, *mask: Any) -> tuple[Tensor, Tensor]:
    threshold = mask[3]
    dx = like(dtotal) if threshold else dtotal.new_empty(0)
    dbias = dtotal.new_empty(dtotal.shape[-1] if with_bias else 0)
    return dx, dbias


bias_dropout_add_fused = partial(apply, _BiasDropoutAdd)
PASSES: Shapes = {
    "norm": lambda x, *_: (like(x), _stats(x)),
    "norm_backward": lambda dy, x, weight, *_: (like(x), like(weight), like(weight)),
    "add_norm": lambda x, *_: (like(x), like(x), _stats(x)),
    "add_norm_backward": lambda dy, dtotal, total, weight, stats, with_bias, centre, *mask: (
        like(total),
        *_dropped(total, with_bias, *mask),
        like(weight),
        like(weight),
    ),
    "bias_dropout_add": like,
    "bias_dropout_add_backward": _dropped,
}
