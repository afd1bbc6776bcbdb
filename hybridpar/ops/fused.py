"""The fused operators as differentiable functions: what the rows of the table named cpp, triton and cuda run.

Each takes what its torch reference takes. `passes` is where its passes are: torch.ops.hybridpar (csrc),
torch.ops.hybridpar_triton (kernels), or a module that has some of them, with equal signatures. Gradients are those of
once: they cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar import native
from hybridpar.autograd import once_differentiable
from hybridpar.ops.dropout import Mask

PASSES = {
    "layer_norm": ("norm", "norm_backward"),
    "rms_norm": ("norm", "norm_backward"),
    "add_norm": ("add_norm", "add_norm_backward"),
    "bias_dropout_add": ("bias_dropout_add", "bias_dropout_add_backward"),
    "gelu": ("bias_gelu", "bias_gelu_backward"),
    "swiglu": ("bias_swiglu", "bias_swiglu_backward"),
    "rotary": ("rotary",),
    "attention": ("attention", "attention_backward"),
    "softmax": ("masked_softmax", "masked_softmax_backward"),
    "cross_entropy": ("cross_entropy", "cross_entropy_backward_"),
    "dropout": ("philox_dropout",),
    "embedding": ("embedding", "embedding_backward_"),
    "optimizer": ("adam_", "move_", "extrapolate_", "sum_squares"),
}
"""What each operation needs of a library."""


def cpp_unsupported(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why C++ cannot run `op` on such tensors (None: in general, on this machine); None when it can."""
    if device_type not in (None, "cpu"):
        return f"runs on the CPU, not on {device_type}"
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"has no {dtype} version"
    return native.missing()


def cuda_unsupported(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why CUDA C++ cannot run `op` on such tensors (None: in general, on this machine); None when it can."""
    if device_type not in (None, "cuda"):
        return f"runs on a GPU, not on {device_type}"
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"has no {dtype} version"
    if reason := native.missing() or native.missing_cuda():
        return reason
    for name in PASSES[op]:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"hybridpar::{name}", "CUDA"):
            return f"has no version of {op}"
    return None if torch.cuda.is_available() else "no GPU here"


class Fused:
    """One library's operators."""

    def __init__(self, passes: Any) -> None:
        self._ops = passes
        self.cross_entropy = _CrossEntropy(self._ops)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _Norm.apply(self._ops, x, weight, bias, eps, True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _Norm.apply(self._ops, x, weight, None, eps, False)

    def add_norm(self, x: Tensor, bias_of_x: Tensor | None, residual: Tensor, weight: Tensor,
                 bias: Tensor | None, eps: float, centre: bool, mask: Mask) -> tuple[Tensor, Tensor]:
        return _AddNorm.apply(self._ops, x, bias_of_x, residual, weight, bias, eps, centre, mask)

    def bias_dropout_add(self, x: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
        return _BiasDropoutAdd.apply(self._ops, x, bias, residual, mask)

    def gelu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _Activation.apply(x, bias, self._ops.bias_gelu, self._ops.bias_gelu_backward)

    def swiglu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _Activation.apply(x, bias, self._ops.bias_swiglu, self._ops.bias_swiglu_backward)

    def softmax(self, x: Tensor, scale: float, causal: bool, padding_mask: Tensor | None) -> Tensor:
        return _Softmax.apply(self._ops, x, scale, causal, padding_mask)

    def rotary(self, x: Tensor, base: float, offset: int, positions: Tensor | None) -> Tensor:
        return _Rotary.apply(self._ops, x, base, offset, positions)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, padding_mask: Tensor | None, kv_index: list[int],
                  mask: Mask) -> Tensor:
        return _Attention.apply(self._ops, q, k, v, causal, padding_mask, kv_index, mask)

    def dropout(self, x: Tensor, *mask: Any) -> Tensor:
        return self._ops.philox_dropout(x, *mask)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
        ctx.ops = ops
        x = x.contiguous()
        y, stats = ops.norm(x, weight, bias, eps, centre)
        ctx.save_for_backward(x, weight, stats)
        ctx.centre = centre
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.ops.norm_backward(dy.contiguous(), *ctx.saved_tensors, ctx.centre)
        return None, dx, dweight, dbias if ctx.centre else None, None, None


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, bias_of_x: Tensor | None, residual: Tensor, weight: Tensor,
                bias: Tensor | None, eps: float, centre: bool, mask: Mask) -> tuple[Tensor, Tensor]:
        ctx.ops = ops
        y, total, stats = ops.add_norm(x.contiguous(), bias_of_x, residual.contiguous(), weight, bias, eps, centre,
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
        dresidual, dx, dbias_of_x, dweight, dbias = ctx.ops.add_norm_backward(
            dy, dtotal, total, weight, stats, with_bias, centre, *mask)
        return (None, dx if mask.threshold else dresidual, dbias_of_x if with_bias else None, dresidual, dweight,
                dbias if centre else None, None, None, None)


class _BiasDropoutAdd(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
        ctx.ops = ops
        ctx.with_bias, ctx.mask = bias is not None, mask
        return ops.bias_dropout_add(x.contiguous(), bias, residual.contiguous(), *mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx, dbias = dtotal, None
        if ctx.with_bias or ctx.mask.threshold:
            dropped, dbias = ctx.ops.bias_dropout_add_backward(dtotal.contiguous(), ctx.with_bias, *ctx.mask)
            dx = dropped if ctx.mask.threshold else dtotal
        return None, dx, dbias if ctx.with_bias else None, dtotal, None


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


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, scale: float, causal: bool, padding_mask: Tensor | None) -> Tensor:
        ctx.ops = ops
        y = ops.masked_softmax(x.contiguous(), None if padding_mask is None else padding_mask.contiguous(), scale,
                               causal)
        ctx.save_for_backward(y)
        ctx.settings = (scale, causal)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return None, ctx.ops.masked_softmax_backward(dy.contiguous(), y, *ctx.settings), None, None, None


class _Rotary(Function):
    """Its own inverse is its derivative."""

    @staticmethod
    def forward(ctx: Any, ops: Any, x: Tensor, base: float, offset: int, positions: Tensor | None) -> Tensor:
        ctx.ops = ops
        ctx.settings = (base, offset, None if positions is None else positions.contiguous())
        return ops.rotary(_rows(x), *ctx.settings, False).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.ops.rotary(_rows(dy), *ctx.settings, True).transpose(1, 2), None, None, None


class _Attention(Function):
    """Keeps q, k, v, the output, and a number a row; the mask of dropout is made again."""

    @staticmethod
    def forward(ctx: Any, ops: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, padding_mask: Tensor | None,
                kv_index: list[int], mask: Mask) -> Tensor:
        ctx.ops = ops
        q, k, v = _rows(q), _rows(k), _rows(v)
        real = None if padding_mask is None else padding_mask.contiguous()
        ctx.settings = (kv_index, q.shape[-1] ** -0.5, causal, *mask[:5], mask.start)
        out, lse = ops.attention(q, k, v, real, *ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse, real)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.ops.attention_backward(_rows(dout), *ctx.saved_tensors, *ctx.settings)
        return None, *(grad.transpose(1, 2) for grad in grads), None, None, None, None


class _CrossEntropy:
    """See ops.cross_entropy."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def statistics(self, logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
        return self._ops.cross_entropy(logits, column, num_real, with_sum)

    def gradient_(self, gradient: Tensor, logits: Tensor, column: Tensor, numbers: Tensor, num_real: int) -> None:
        self._ops.cross_entropy_backward_(gradient, logits, column, numbers, num_real)
        torch.autograd.graph.increment_version(gradient)


def _rows(x: Tensor) -> Tensor:
    """x itself, if its last dimension has no gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


compiled = Fused(torch.ops.hybridpar)
triton = Fused(torch.ops.hybridpar_triton)
