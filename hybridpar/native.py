"""Finds the compiled extension `hybridpar._C`. The only place that imports it; nothing happens on import."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def missing() -> str | None:
    """Why the operators `torch.ops.hybridpar.*` cannot be used here; None when they can. Loads them on first use."""
    return _load()


def constant_when_traced(function: Callable[..., Any]) -> None:
    """What torch.compiler.assume_constant_result does, without importing the compiler: a second at every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


constant_when_traced(missing)


@functools.cache
def _load() -> str | None:
    try:
        importlib.import_module("hybridpar._C")
    except ImportError as error:
        return f"the extension hybridpar._C is not built or does not load ({error})"
    absent = [name for name in _FAKES if not hasattr(torch.ops.hybridpar, name)]
    if absent:
        return f"the extension hybridpar._C is older than this checkout (no {', '.join(absent)}); build it again"
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"hybridpar::{name}", fake)
    return None


def _bits_fake(key0: int, key1: int, step: int, sample: int, num_samples: int, rows: int, cols: int,
               stride: int, start: int) -> Tensor:
    return torch.empty((num_samples, rows, cols), dtype=torch.int32)


def _normal_fake(key0: int, key1: int, rows: int, cols: int, stride: int, start: int, double: bool) -> Tensor:
    return torch.empty((rows, cols), dtype=torch.float64 if double else torch.float32)


def _dropout_fake(x: Tensor, key0: int, key1: int, step: int, sample: int, threshold: int, scale: float,
                  stride: int, start: int) -> Tensor:
    return torch.empty_like(x)


# What tracing (torch.compile, meta tensors) needs to know of each operator: shape and type of what it returns.
_FAKES: dict[str, Callable[..., Tensor]] = {
    "philox_bits": _bits_fake,
    "philox_normal": _normal_fake,
    "philox_dropout": _dropout_fake,
}
