"""Layer normalisation and root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridpar.ops.registry import resolve


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, backend: str = "auto") -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    Shapes: x [..., h], weight [h], bias [h] -> [..., h].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 1607.06450.
    """
    _check(x, weight=weight, bias=bias)
    return resolve("layer_norm", backend, x)(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Shapes: x [..., h], weight [h] -> [..., h].
    Raises: ValueError for other shapes; ConfigError if the backend cannot run.
    Source: arXiv 1910.07467.
    """
    _check(x, weight=weight)
    return resolve("rms_norm", backend, x)(x, weight, eps)


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _check(x: Tensor, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if x.dim() < 1 or vector.shape != x.shape[-1:]:
            raise ValueError(f"x {tuple(x.shape)} needs {name} of its last size, got {tuple(vector.shape)}")
