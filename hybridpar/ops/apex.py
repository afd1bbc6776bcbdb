"""NVIDIA apex's fused normalisation, where it is installed with its CUDA extensions.

apex comes from source (github.com/NVIDIA/apex); the package of that name on PyPI is an unrelated one.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from hybridpar.native import constant_when_traced


def unsupported(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why apex cannot run on such tensors (None: in general, on this machine); None when it can."""
    if device_type not in (None, "cuda"):
        return f"runs on a GPU, not on {device_type}"
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        return f"has no {dtype} version"
    try:
        _functions()
    except Exception as error:  # whatever a half-built apex throws while it is imported
        return f"apex's fused_layer_norm cannot be imported ({error})"
    return None if torch.cuda.is_available() else "no GPU here"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _functions().fused_layer_norm_affine(x, weight, bias, weight.shape, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _functions().fused_rms_norm_affine(x, weight, weight.shape, eps)


@functools.cache
def _functions() -> Any:
    """apex's module. Its Python part imports without the extension, which is the one that computes."""
    importlib.import_module("fused_layer_norm_cuda")
    return importlib.import_module("apex.normalization.fused_layer_norm")


constant_when_traced(unsupported)
