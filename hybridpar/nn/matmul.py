"""The matrix products of a linear layer, forward and backward, by the library that is fastest for them.

On CPUs torch hands float32 products to MKL, and bfloat16 ones to oneDNN. On an AMD EPYC with AVX-512 oneDNN's float32
products are faster where the weight is the second factor: by 9% (106 against 97 GFLOP/s on one core, 1024x512x2048). On
an Intel Xeon they are slower, by 3 to 15% (GPT steps: 0 to 6%), and so they are on an EPYC with AVX2 alone, by 10 to
20% (35 shapes of 64 to 1024 rows); each call takes 40 us more.
The weight's gradient is best added by the product itself (`addmm_`): no temporary, no pass over memory to add it.

Where a CPU has no instructions for bfloat16 or float16, torch's products of them take nine times as long as those of
float32 (an AMD EPYC with AVX2: 131 against 14.7 ms, 512x512x2048). An Intel Xeon of the fifth generation whose AMX is
switched off has AVX512-BF16, at half the speed of float32's products: 83 against 155 GFLOP/s on one core. In both cases
the factors are converted, the product is float32's and is rounded once, which is what the instructions do: 15.1 ms on
the EPYC, 135 to 147 GFLOP/s on the Xeon.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.cpu import cpu_fields

SINK = "gradient_sink"
"""Attribute of a leaf: takes parts of its gradient, by `add(write)`, at any time in a backward.

write(gradient, overwrite) adds to the gradient, or is the first to write it. Whoever sets it promises that gradients
are wanted in `.grad` only, never from torch.autograd.grad.
"""

ONEDNN_FLOPS = 5e7
"""Operations from which what oneDNN saves is more than what its call takes: 9% of 0.45 ms, 40 us. An estimate:
the share was measured with AVX-512, the call with AVX2."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, outside of autograd. Shapes: x [.., i], weight [o, i], bias [o] -> [.., o]."""
    if by_float32(weight):
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(weight.dtype)
    if (x.dtype == torch.float32 and x.device.type == "cpu" and 2 * x.numel() * weight.shape[0] >= ONEDNN_FLOPS
            and _prefers_onednn()):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def factor(dy: Tensor) -> Tensor:
    """`dy` in the type that it is multiplied in, for who multiplies it twice."""
    return dy.float() if by_float32(dy) else dy


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W, outside of autograd; dy may be a `factor`. Shapes: dy [rows, o], weight [o, i] -> [rows, i]."""
    return linear(dy, weight.t())


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dy^T x as autograd is to have it: where the leaf has a SINK, already added, and nothing in its stead.

    Shapes: dy [rows, o] (or its `factor`), x [rows, i] -> [o, i].
    """
    sink = getattr(weight, SINK, None)
    a, b = factor(dy).t(), factor(x)
    if sink is None:
        return (a @ b).to(x.dtype)

    def write(gradient: Tensor, overwrite: bool) -> None:
        if gradient.dtype == torch.float32 and sums_in_float32(b.device.type, b.dtype):
            if overwrite:
                torch.mm(a, b, out_dtype=torch.float32, out=gradient)
            else:
                torch.addmm(gradient, a, b, out_dtype=torch.float32, out=gradient)
        elif gradient.dtype != b.dtype:
            product = a @ b
            gradient.copy_(product) if overwrite else gradient.add_(product)
        elif overwrite:
            torch.mm(a, b, out=gradient)
        else:
            gradient.addmm_(a, b)

    sink.add(write)
    return nothing(weight)


def nothing(weight: Tensor) -> Tensor:
    """What a backward returns in the stead of a gradient that a SINK has taken.

    An empty sparse tensor, which autograd adds at no cost, and then runs the leaf's hooks: once, when all gradients of
    this backward have come, also where the weight was used elsewhere too.
    """
    empty = torch.sparse_coo_tensor(  # type: ignore[call-arg]  # this overload is missing from the stubs
        size=weight.shape, dtype=weight.dtype, device=weight.device, check_invariants=False)
    return empty


def by_float32(x: Tensor) -> bool:
    """Whether products of tensors like this one are computed in float32, for want of instructions, or of fast ones."""
    return x.device.type == "cpu" and not _has_fast_instructions(x.dtype)


@cache
def sums_in_float32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch adds products of this type to a float32 tensor without rounding them: on CUDA, since torch 2.11."""
    return device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.dtype_out", "CUDA") for name in ("mm", "addmm"))


@cache
def _has_fast_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies this type faster than float32. Others than x86 are taken at torch's word."""
    if dtype not in (torch.bfloat16, torch.float16) or platform.machine() not in ("x86_64", "AMD64"):
        return True
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    vectors = torch.cpu._is_avx512_bf16_supported() and cpu_fields().get("vendor_id") != "GenuineIntel"
    return vectors or torch.cpu._is_amx_tile_supported()


@cache
def _prefers_onednn() -> bool:
    return (cpu_fields().get("vendor_id") == "AuthenticAMD" and torch.backends.mkldnn.is_available()
            and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT")
            and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
