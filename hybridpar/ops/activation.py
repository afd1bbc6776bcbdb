"""Activations of the feed-forward block, with the bias of the linear layer before them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridpar.ops.registry import resolve


def gelu(x: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Gaussian error linear unit of x + bias, in the tanh form that GPT and BERT were published with.

    Shapes: x [.., f], bias [f] -> [.., f].
    Raises: ValueError for another bias; ConfigError if the backend cannot run. Source: arXiv 1606.08415.
    """
    _check(x, bias)
    return resolve("gelu", backend, x)(x, bias)


def gelu_exact(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the normal distribution function of x, for x + bias: by the error function, in plain torch.

    Shapes: x [.., f], bias [f] -> [.., f]. Raises: ValueError for another bias. Source: arXiv 1606.08415.
    """
    _check(x, bias)
    return F.gelu(x if bias is None else x + bias)


def swiglu(x: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up of gate, up = the two halves of x + bias.

    Shapes: x [.., 2 f], bias [2 f] -> [.., f].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 2002.05202.
    """
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"the last size of x {tuple(x.shape)} must be even: gate, then up")
    _check(x, bias)
    return resolve("swiglu", backend, x)(x, bias)


def _check(x: Tensor, bias: Tensor | None) -> None:
    if bias is not None and (x.dim() < 1 or bias.shape != x.shape[-1:]):
        raise ValueError(f"x {tuple(x.shape)} needs bias of its last size, got {tuple(bias.shape)}")


def gelu_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def swiglu_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up
