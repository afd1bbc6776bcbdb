"""The C++ operators (csrc/cpu) as differentiable functions: what the rows of the table named cpp run.

Each takes what its torch reference takes. Gradients are those of once: they cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hybridpar import native
from hybridpar.ops.dropout import Mask

_ops = torch.ops.hybridpar


def unsupported(device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why these cannot run on such tensors (None: in general, on this machine); None when they can."""
    if device_type not in (None, "cpu"):
        return f"runs on the CPU, not on {device_type}"
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"has no {dtype} version"
    return native.missing()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight, None, eps, False)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
        x = x.contiguous()
        y, stats = _ops.norm(x, weight, bias, eps, centre)
        ctx.save_for_backward(x, weight, stats)
        ctx.centre = centre
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _ops.norm_backward(dy.contiguous(), *ctx.saved_tensors, ctx.centre)
        return dx, dweight, dbias if ctx.centre else None, None, None


def add_norm(x: Tensor, bias_of_x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
             centre: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    return _AddNorm.apply(x, bias_of_x, residual, weight, bias, eps, centre, mask)


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_of_x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None,
                eps: float, centre: bool, mask: Mask) -> tuple[Tensor, Tensor]:
        y, total, stats = _ops.add_norm(x.contiguous(), bias_of_x, residual.contiguous(), weight, bias, eps, centre,
                                        *mask)
        ctx.save_for_backward(total, weight, stats)
        ctx.settings = (bias_of_x is not None, centre, mask)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats = ctx.saved_tensors
        with_bias, centre, mask = ctx.settings
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        dresidual, dx, dbias_of_x, dweight, dbias = _ops.add_norm_backward(
            dy, dtotal, total, weight, stats, with_bias, centre, *mask)
        return (dx if mask.threshold else dresidual, dbias_of_x if with_bias else None, dresidual, dweight,
                dbias if centre else None, None, None, None)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual, mask)


class _BiasDropoutAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
        ctx.with_bias, ctx.mask = bias is not None, mask
        return _ops.bias_dropout_add(x.contiguous(), bias, residual.contiguous(), *mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx, dbias = dtotal, None
        if ctx.with_bias or ctx.mask.threshold:
            dropped, dbias = _ops.bias_dropout_add_backward(dtotal.contiguous(), ctx.with_bias, *ctx.mask)
            dx = dropped if ctx.mask.threshold else dtotal
        return dx, dbias if ctx.with_bias else None, dtotal, None


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    return _Activation.apply(x, bias, _ops.bias_gelu, _ops.bias_gelu_backward)


def swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    return _Activation.apply(x, bias, _ops.bias_swiglu, _ops.bias_swiglu_backward)


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, forward: Any, backward: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.backward_op = backward
        return forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = ctx.backward_op(dy.contiguous(), x, bias)
        return dx, None if bias is None else dbias, None, None


def softmax(x: Tensor, scale: float, causal: bool, padding_mask: Tensor | None) -> Tensor:
    return _Softmax.apply(x, scale, causal, padding_mask)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, causal: bool, padding_mask: Tensor | None) -> Tensor:
        y = _ops.masked_softmax(x.contiguous(), None if padding_mask is None else padding_mask.contiguous(), scale,
                                causal)
        ctx.save_for_backward(y)
        ctx.settings = (scale, causal)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return _ops.masked_softmax_backward(dy.contiguous(), y, *ctx.settings), None, None, None


def rotary(x: Tensor, base: float, offset: int, positions: Tensor | None) -> Tensor:
    return _Rotary.apply(x, base, offset, positions)


class _Rotary(Function):
    """Its own inverse is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: float, offset: int, positions: Tensor | None) -> Tensor:
        ctx.settings = (base, offset, None if positions is None else positions.contiguous())
        return _ops.rotary(_rows(x), *ctx.settings, False).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _ops.rotary(_rows(dy), *ctx.settings, True).transpose(1, 2), None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding_mask: Tensor | None, kv_index: list[int],
              mask: Mask) -> Tensor:
    return _Attention.apply(q, k, v, causal, padding_mask, kv_index, mask)


class _Attention(Function):
    """Keeps q, k, v, the output, and a number a row; the mask of dropout is made again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, padding_mask: Tensor | None,
                kv_index: list[int], mask: Mask) -> Tensor:
        q, k, v = _rows(q), _rows(k), _rows(v)
        real = None if padding_mask is None else padding_mask.contiguous()
        ctx.settings = (kv_index, q.shape[-1] ** -0.5, causal, *mask[:6], mask.start)
        out, lse = _ops.attention(q, k, v, real, *ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse, real)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = _ops.attention_backward(_rows(dout), *ctx.saved_tensors, *ctx.settings)
        return *(grad.transpose(1, 2) for grad in grads), None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x itself, if its last dimension has no gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def dropout(x: Tensor, *mask: int | float) -> Tensor:
    return _ops.philox_dropout(x, *mask)


class cross_entropy:  # named as its operation
    """See ops.cross_entropy."""

    @staticmethod
    def statistics(logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
        return _ops.cross_entropy(logits, column, num_real, with_sum)

    @staticmethod
    def gradient_(logits: Tensor, column: Tensor, numbers: Tensor, num_real: int) -> None:
        _ops.cross_entropy_backward_(logits, column, numbers, num_real)
        torch.autograd.graph.increment_version(logits)


