"""What happens on the residual stream: normalisation over the last dimension, the addition before it, and both."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridpar.ops.dropout import Mask, drop, make_mask
from hybridpar.ops.registry import resolve
from hybridpar.random import RandomKey


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


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *,
             centre: bool = True, bias_of_x: Tensor | None = None, p: float = 0.0, key: RandomKey | None = None,
             site: int = 0, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Layer norm (`centre`) or RMS norm of total = residual + dropout(x + bias_of_x); returns it and the total.

    The mask of dropout is that of `dropout(x, p, key, site)`; no key: nothing is dropped.

    Shapes: x and residual [b, .., h], weight, bias, bias_of_x [h] -> both [b, .., h].
    Raises: ValueError for other shapes, or a bias without `centre`; ConfigError if p is not in [0, 1), or the backend
    cannot run.
    """
    vectors = {"weight": weight, "bias": bias, "bias_of_x": bias_of_x}
    _check(x, **{name: vector for name, vector in vectors.items() if vector is not None})
    if residual.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape")
    if (bias is None) == centre:
        raise ValueError("a layer norm has a bias, an RMS norm has none")
    mask = make_mask(x.shape, x.device, p, key, site)
    return resolve("add_norm", backend, x)(x, bias_of_x, residual, weight, bias, eps, centre, mask)


def bias_dropout_add(x: Tensor, residual: Tensor, bias: Tensor | None = None, *, p: float = 0.0,
                     key: RandomKey | None = None, site: int = 0, backend: str = "auto") -> Tensor:
    """residual + dropout(x + bias), with the mask of `dropout(x, p, key, site)`; no key: nothing is dropped.

    Shapes: x and residual [b, .., h], bias [h] -> [b, .., h].
    Raises: ValueError for other shapes; ConfigError if p is not in [0, 1), or the backend cannot run.
    """
    if bias is not None:
        _check(x, bias=bias)
    if residual.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must have the same shape")
    return resolve("bias_dropout_add", backend, x)(x, bias, residual, make_mask(x.shape, x.device, p, key, site))


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm_torch(x: Tensor, bias_of_x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None,
                   eps: float, centre: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    total = bias_dropout_add_torch(x, bias_of_x, residual, mask)
    y = rms_norm_torch(total, weight, eps) if bias is None else layer_norm_torch(total, weight, bias, eps)
    return y, total


def bias_dropout_add_torch(x: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
    return residual + drop(x if bias is None else x + bias, mask)


def _check(x: Tensor, **vectors: Tensor) -> None:
    last = x.shape[-1:]
    for name, vector in vectors.items():
        if not last or vector.shape != last:
            raise ValueError(f"x {tuple(x.shape)} needs {name} of its last size, got {tuple(vector.shape)}")
