"""The Triton kernels (kernels/) as operators torch.ops.hybridpar_triton.*, for torch.compile to see from outside.

Names, arguments and results are those of csrc. In Triton's interpreter (TRITON_INTERPRET=1) they take tensors on the
CPU: hours where the compiled ones take a second, for tests.
"""

from __future__ import annotations

import functools
import importlib

import torch

from hybridpar.config import triton_is_interpreted
from hybridpar.native import FAKES, constant_when_traced
from hybridpar.ops.fused import PASSES

MODULES = {
    "philox": ("philox_dropout",),
    "norm": ("norm", "norm_backward", "add_norm", "add_norm_backward"),
    "residual": ("bias_dropout_add", "bias_dropout_add_backward"),
    "activation": ("bias_gelu", "bias_gelu_backward", "bias_swiglu", "bias_swiglu_backward"),
    "softmax": ("masked_softmax", "masked_softmax_backward"),
    "rotary": ("rotary",),
    "cross_entropy": ("cross_entropy", "cross_entropy_backward_"),
    "attention": ("attention", "attention_backward"),
    "embedding": ("embedding", "embedding_backward_"),
    "optimizer": ("adam_", "move_", "extrapolate_", "sum_squares"),
}
"""The kernels' modules, and the operators that each has."""
CHANGED = {
    "cross_entropy_backward_": ("gradient",),
    "embedding_backward_": ("gradient",),
    "adam_": ("means", "squares", "new", "working"),
    "move_": ("new", "working"),
    "extrapolate_": ("new", "previous", "working"),
}
"""The arguments that an operator writes."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {"embedding": (torch.float64, *NARROW), "optimizer": (torch.float64, torch.float32)}
"""What an operation's tensors may be, where not NARROW."""


def unsupported(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why Triton cannot run `op` on such tensors (None: in general, on this machine); None when it can."""
    interpreted = triton_is_interpreted()
    if device_type not in (None, "cpu" if interpreted else "cuda"):
        return "its interpreter runs on the CPU" if interpreted else f"runs on a GPU, not on {device_type}"
    if interpreted and dtype == torch.bfloat16:
        return "its interpreter computes bfloat16 wrongly"
    if dtype not in (None, *DTYPES.get(op, NARROW)):
        return f"has no {dtype} version"
    known = {name for names in MODULES.values() for name in names}
    if not known.issuperset(PASSES[op]):
        return f"has no version of {op}"
    if not interpreted and not torch.cuda.is_available():
        return "no GPU here"
    return _load()


@functools.cache
def _load() -> str | None:
    """Registers the operators; why that cannot be done, if it cannot."""
    library = torch.library.Library("hybridpar_triton", "DEF")
    for module, names in MODULES.items():
        try:
            kernels = importlib.import_module(f"hybridpar.kernels.{module}")
        except ImportError as error:
            return f"cannot be imported ({error})"
        for name in names:
            function = getattr(kernels, name)
            library.define(name + torch.library.infer_schema(function, mutates_args=CHANGED.get(name, ())))
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"hybridpar_triton::{name}", FAKES[name], lib=library)
    _libraries.append(library)
    return None


_libraries: list[torch.library.Library] = []
"""An operator lives as long as its library."""

constant_when_traced(unsupported)
