"""Activations of the feed-forward block, with the bias of the linear layer before them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import apply, once_differentiable
from hybridpar.ops.backends.libraries import Shapes, like
from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.norm import check_vectors


def gelu(x: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Return the Gaussian error linear unit of x + bias, in the tanh form that GPT and BERT use.

    Shapes: x [.., f], bias [f] -> [.., f].
    Raises: ValueError for another bias; ConfigError if the backend cannot run.
    Source: arXiv 1606.08415.
    """
    check_vectors(x, bias=bias)
    return resolve("gelu", backend, x)(x, bias)


def gelu_exact(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x times the normal distribution function of x, for x + bias, in plain torch.

    It uses the error function.
    Shapes: x [.., f], bias [f] -> [.., f]. Raises: ValueError for another bias.
    Source: arXiv 1606.08415.
    """
    check_vectors(x, bias=bias)
    return F.gelu(x if bias is None else x + bias)


def swiglu(x: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Return silu(gate) * up for gate, up = the two halves of x + bias.

    Shapes: x [.., 2 f], bias [2 f] -> [.., f].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 2002.05202.
    """
    _check_gate_and_up(x, bias)
    return resolve("swiglu", backend, x)(x, bias)


def geglu(x: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Return gelu(gate) * up for gate, up = the two halves of x + bias; gelu in its tanh form.

    Shapes: x [.., 2 f], bias [2 f] -> [.., f].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 2002.05202.
    """
    _check_gate_and_up(x, bias)
    return resolve("geglu", backend, x)(x, bias)


def _check_gate_and_up(x: Tensor, bias: Tensor | None) -> None:
    """Require that x has two halves, and a bias of its size. Raises: ValueError."""
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"the last size of x {tuple(x.shape)} must be even: gate, then up")
    check_vectors(x, bias=bias)


def gelu_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def swiglu_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(x, bias)
    return F.silu(gate) * up


def geglu_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(x, bias)
    return F.gelu(gate, approximate="tanh") * up


def _gate_and_up(x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return the two halves of x + bias. Shapes: [.., 2 f], [2 f] -> twice [.., f]."""
    return (x if bias is None else x + bias).chunk(2, dim=-1)


def gelu_fused(library: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return apply(_Activation, x, bias, library.bias_gelu, library.bias_gelu_backward)


def swiglu_fused(library: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return apply(_Activation, x, bias, library.bias_swiglu, library.bias_swiglu_backward)


def geglu_fused(library: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return apply(_Activation, x, bias, library.bias_geglu, library.bias_geglu_backward)


class _Activation(Function):
    """Keeps x alone, and recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, forward: Any, backward: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.backward_pass = backward
        return forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = ctx.backward_pass(dy.contiguous(), x, bias)
        return dx, None if bias is None else dbias, None, None


def _gradients(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return like(x), x.new_empty(0 if bias is None else bias.shape)


def _half(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


PASSES: Shapes = {
    "bias_gelu": like,
    "bias_gelu_backward": _gradients,
    "bias_swiglu": _half,
    "bias_swiglu_backward": _gradients,
    "bias_geglu": _half,
    "bias_geglu_backward": _gradients,
}
