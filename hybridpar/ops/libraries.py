"""The libraries of passes that fused operations are made of, and why one cannot be used here.

    torch.ops.hybridpar          C++ (csrc/cpu); some passes in CUDA C++, too (csrc/cuda)
    torch.ops.hybridpar_triton   Triton (kernels/), with the same names, arguments and results

In Triton's interpreter (TRITON_INTERPRET=1) its passes take tensors on the CPU: hours where the compiled ones take a
second, for tests. torch.compile sees a pass from outside, by a function of its arguments that returns empty tensors of
the shapes and types that the pass returns: PASSES of the operation's module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.config import triton_is_interpreted
from hybridpar.ops import registry

Shapes = Mapping[str, Callable[..., Any]]
"""Type of PASSES: passes by name, and what returns empty tensors like theirs."""


def like(x: Tensor, *_: Any) -> Tensor:
    """An empty tensor of the shape and type of a pass's first argument, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def heads_inside(x: Tensor, *_: Any) -> Tensor:
    """The result [b, s, n, d] of a pass whose first argument is [b, n, s, d]."""
    b, n, s, d = x.shape
    return x.new_empty((b, s, n, d))


def nothing(*_: Any) -> None:
    """The result of a pass that writes to its arguments."""


def wide_type(x: Tensor) -> torch.dtype:
    """The type that passes compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_gaps(x: Tensor) -> Tensor:
    """x, or a copy if there are gaps in its last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def cpp_missing(op: str, *_: Any) -> str | None:
    """Why the C++ passes of `op` cannot be used; None when they can."""
    return _known(native.missing(), "hybridpar", op)


def cuda_missing(op: str, *_: Any) -> str | None:
    """Why the CUDA C++ passes of `op`, of which one has its name, cannot be used; None when they can."""
    reason = _known(native.missing_cuda(), "hybridpar", op)
    return reason or (None if has_cuda(op) else f"has no version of {op}")


def has_cuda(name: str) -> bool:
    """Whether the pass torch.ops.hybridpar.<name> has a CUDA version, in extensions that are loaded."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"hybridpar::{name}", "CUDA")


def triton_missing(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why the Triton passes of `op` cannot take such tensors; None when they can."""
    interpreted = triton_is_interpreted()
    if device_type not in (None, "cpu" if interpreted else "cuda"):
        return "its interpreter runs on the CPU" if interpreted else f"runs on a GPU, not on {device_type}"
    if interpreted and dtype == torch.bfloat16:
        return "its interpreter computes bfloat16 wrongly"
    if not interpreted and not torch.cuda.is_available():
        return "no GPU here"
    return _known(_register_triton(), "hybridpar_triton", op)


@functools.cache
def _register_triton() -> str | None:
    """Registers what modules of kernels/ list as OPERATORS: name -> arguments that it writes; why not, if it cannot."""
    library = torch.library.Library("hybridpar_triton", "DEF")
    package = importlib.import_module("hybridpar.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        try:
            kernels = importlib.import_module(f"hybridpar.kernels.{module.name}")
        except ImportError as error:
            return f"cannot be imported ({error})"
        for name, written in getattr(kernels, "OPERATORS", {}).items():
            function = getattr(kernels, name)
            library.define(name + torch.library.infer_schema(function, mutates_args=written))
            library.impl(name, function, "CompositeExplicitAutograd")
    _libraries.append(library)
    return None


_libraries: list[torch.library.Library] = []
"""Operators live as long as their library."""


def _known(reason: str | None, library: str, op: str) -> str | None:
    """The reason; where there is none, torch.compile and meta tensors know the passes of op's module from here on."""
    if reason is None:
        _register_shapes(library, registry.backends(op)[-1].path.partition(":")[0])
    return reason


@functools.cache
def _register_shapes(library: str, module: str) -> None:
    passes = getattr(torch.ops, library)
    for name, shapes in importlib.import_module(module).PASSES.items():
        if hasattr(passes, name):
            torch.library.register_fake(f"{library}::{name}", shapes)
