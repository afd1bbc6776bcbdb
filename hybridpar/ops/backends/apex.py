"""NVIDIA apex's fused normalisation and AdamW, if it is installed with its CUDA extensions.

apex comes from source (github.com/NVIDIA/apex); the package of that name on PyPI is an unrelated
one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.ops.backends.registry import resolve
from hybridpar.ops.dropout import DropoutMask
from hybridpar.ops.norm import NormWeights
from hybridpar.ops.update import AdamStep, Passes, Tensors, Weights, blocks, grouped

_NORMS = "fused_layer_norm_cuda", "apex.normalization.fused_layer_norm"
_UPDATES = "amp_C", "apex.multi_tensor_apply"


def missing(op: str, *_: Any) -> str | None:
    """Return why apex cannot run `op` on this machine; None if it can."""
    extension, module = needed = _UPDATES if op == "optimizer" else _NORMS
    try:
        _modules(*needed)
    except Exception as error:  # whatever a half-built apex throws while it is imported
        return f"{module} or {extension} cannot be imported ({error})"
    return None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _modules(*_NORMS)[1].fused_layer_norm_affine(x, weight, bias, weight.shape, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _modules(*_NORMS)[1].fused_rms_norm_affine(x, weight, weight.shape, eps)


def add_norm(
    x: Tensor, bias_of_x: Tensor | None, residual: Tensor, norm: NormWeights, mask: DropoutMask
) -> tuple[Tensor, Tensor]:
    """Compute the sum, and then apex's norm of it, as apex has no operator for both."""
    total = resolve("bias_dropout_add", "auto", x)(x, bias_of_x, residual, mask)
    weight, bias, eps = norm
    if bias is None:
        return rms_norm(total, weight, eps), total
    return layer_norm(total, weight, bias, eps), total


class FusedAdam(Passes):
    """AdamW by the kernel of apex.optimizers.FusedAdam, in place, on a copy of the old weights.

    It knows neither Nesterov's momentum nor directions alone: the reference computes these, and
    every step that is not Adam's.
    """

    @staticmethod
    def adam(
        weights: Weights,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        decays: Sequence[float],
        lr: float,
        step: AdamStep,
    ) -> None:
        if step.nesterov is not None:
            return Passes.adam(weights, gradients, moments, decays, lr, step)
        amp, multi_tensor = _modules(*_UPDATES)
        with weights.updating() as values:
            for decay, columns in grouped(decays, gradients, values, *moments):
                for lists in blocks([[x for x in column if x.numel()] for column in columns]):
                    if isinstance(step.scale, Tensor) or step.scale != 1.0:
                        torch._foreach_mul_(lists[0], step.scale)
                    nothing_skipped = torch.zeros(1, dtype=torch.int32, device=lists[0][0].device)
                    multi_tensor.multi_tensor_applier(
                        amp.multi_tensor_adam,
                        nothing_skipped,
                        lists,
                        lr,
                        step.beta1,
                        step.beta2,
                        step.eps,
                        step.count,
                        _DECOUPLED,
                        _BIAS_CORRECTION,
                        decay,
                    )
                    for written in lists[1:]:
                        torch.autograd.graph.increment_version(written)
        return None


_DECOUPLED = _BIAS_CORRECTION = 1


@functools.cache
def _modules(extension: str, module: str) -> tuple[Any, Any]:
    """Return apex's extension, which computes, and its Python part, which imports without it."""
    return importlib.import_module(extension), importlib.import_module(module)
