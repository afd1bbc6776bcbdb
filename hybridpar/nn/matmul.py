"""The matrix products of a linear layer, forward and backward, by the library that is fastest for
them.

On CPUs torch gives float32 products to MKL and bfloat16 ones to oneDNN. On an AMD EPYC with AVX-512
oneDNN is faster for float32: twice as fast on a Zen 5 (family 26; 218 against 95 GFLOP/s on one
core, 1024x1024x4096; the weight's gradient 158 to 198 against 98, with a pass of its own to add
it), 9% on a Zen 4 (family 25) if the weight is the second factor. It is slower on an Intel Xeon, by
3 to 15%, and on an EPYC with AVX2 alone, by 10 to 20%. MKL adds a weight's gradient in the product
itself (`addmm_`), without a temporary.

On a CPU without instructions for bfloat16 or float16, torch's products of them take nine times as
long as in float32 (an AMD EPYC with AVX2: 131 against 14.7 ms, 512x512x2048). A Xeon whose AMX is
off has AVX512-BF16, at half the speed of float32. On both we convert the factors, multiply in
float32 and round once, as the instructions do: 15.1 ms on the EPYC, 135 to 147 GFLOP/s on the Xeon.
"""

from __future__ import annotations

import math
import platform
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.cpu import cpu_fields
from hybridpar.nn.binding import GradientConsumer
from hybridpar.ops import few_rows_linear
from hybridpar.ops.generation import MOST_ROWS

ONEDNN_BLOCK = 2**22
"""Elements of a weight's gradient that oneDNN computes at a time, before they are added: 16 MiB,
half of a third-level cache. All 51 million of a vocabulary of 50,304 at once: 109 GFLOP/s; in
blocks 169."""

ADD_BLOCK = 2**18
"""Elements of another type that are added at a time on a CPU, where torch first copies all of them
to the sum's type: 16 million of bfloat16 take 64 MiB more, in blocks 1 MiB."""


_GENERATED = (torch.float32, torch.bfloat16)
"""Types of which products of a few rows have a kernel that is faster than torch's."""


class Product(NamedTuple):
    """dy^T x, a part of the gradient of a weight. Shapes: dy [rows, o] (or its `factor`), x [rows,
    i]."""

    dy: Tensor
    x: Tensor

    def add_to(self, gradient: Tensor, overwrite: bool) -> None:
        """See `GradientPart`."""
        a = factor(self.dy).t()
        b = factor(self.x)
        if gradient.dtype == torch.float32 and sums_in_float32(b.device.type, b.dtype):
            if overwrite:
                torch.mm(a, b, out_dtype=torch.float32, out=gradient)
            else:
                torch.addmm(gradient, a, b, out_dtype=torch.float32, out=gradient)
        elif _is_large(b, len(a), _onednn().weight_gradient):
            step = max(1, ONEDNN_BLOCK // b.shape[1])
            for part, rows in zip(gradient.split(step), a.split(step), strict=True):
                product = _by_onednn(rows, b.t())
                part.copy_(product) if overwrite else part.add_(product)
        elif gradient.dtype != b.dtype:
            product = a @ b
            gradient.copy_(product) if overwrite else add_(gradient, product)
        elif overwrite:
            torch.mm(a, b, out=gradient)
        else:
            gradient.addmm_(a, b)


def add_(total: Tensor, part: Tensor) -> None:
    """Adds `part`, which is dense, to `total`, in blocks (ADD_BLOCK). Shapes: the same; types may
    differ."""
    if part.dtype == total.dtype or part.numel() <= ADD_BLOCK or not _is_on_cpu(part):
        total.add_(part)
        return
    rows = max(1, ADD_BLOCK * len(part) // part.numel())
    for into, block in zip(total.split(rows), part.split(rows), strict=True):
        into.add_(block)


class _OneDNN(NamedTuple):
    """Operations from which a float32 product is faster by oneDNN than by MKL, whose call takes 10
    to 40 us less."""

    product: float
    weight_gradient: float


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, outside of autograd. Shapes: x [.., i], weight [o, i], bias [o] -> [.., o]."""
    if by_float32(weight):
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(
            weight.dtype
        )
    if x.dim() == 3 and x.shape[1] == 1 and len(x) <= MOST_ROWS and x.dtype in _GENERATED:
        return few_rows_linear(x, weight, bias)  # a token of each text is generated
    if _is_large(x, weight.shape[0], _onednn().product):
        return _by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x W^T to `out`, outside of autograd. Shapes: x [rows, i], weight [o, i], out [rows, o]."""
    if by_float32(weight):
        out.copy_(F.linear(x.float(), weight.float()))
    elif _is_large(x, weight.shape[0], _onednn().product):
        out.copy_(_by_onednn(x, weight))
    else:
        torch.mm(x, weight.t(), out=out)


def factor(dy: Tensor) -> Tensor:
    """`dy` in the type that it is multiplied in, for who multiplies it twice."""
    return dy.float() if by_float32(dy) else dy


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W, outside of autograd; dy may be a `factor`. Shapes: dy [rows, o], weight [o, i] ->
    [rows, i]."""
    return linear(dy, weight.t())


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, consumer: GradientConsumer | None, *, now: bool = False
) -> Tensor:
    """Return dy^T x as autograd is to have it: `nothing` if a consumer takes it.

    Shapes: dy [rows, o] (or its `factor`), x [rows, i] -> [o, i].

    Args:
        dy: Gradient of the layer's output.
        x: The layer's input.
        weight: The leaf.
        consumer: Takes the gradient; None: autograd does.
        now: See `GradientConsumer.add`.
    """
    if consumer is not None:
        consumer.add(Product(dy, x), now)
        return nothing(weight)
    a = factor(dy).t()
    b = factor(x)
    return (_by_onednn(a, b.t()) if _is_large(b, len(a), _onednn().weight_gradient) else a @ b).to(
        x.dtype
    )


def nothing(weight: Tensor) -> Tensor:
    """Return the value that a backward has for autograd if a consumer has taken the gradient.

    An empty sparse tensor, which autograd adds at no cost, and then runs the leaf's hooks: once,
    when all gradients of this backward have come, also where the weight was used elsewhere too.
    """
    empty = torch.sparse_coo_tensor(  # type: ignore[call-arg]  # this overload is missing from the stubs
        size=weight.shape, dtype=weight.dtype, device=weight.device, check_invariants=False
    )
    return empty


def by_float32(x: Tensor) -> bool:
    """Whether products of tensors like this one are computed in float32, for want of instructions,
    or of fast ones."""
    if x.dtype is torch.float32:
        return False
    return _is_on_cpu(x) and not _has_fast_instructions(x.dtype)


def _is_on_cpu(x: Tensor) -> bool:
    """Whether a tensor is computed with on a CPU. What stands for one of a GPU where there is none
    (prediction/ghost.py) says so: `stands_for_cuda`."""
    return x.device.type == "cpu" and not getattr(x, "stands_for_cuda", False)


@cache
def sums_in_float32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch adds products of this type to a float32 tensor without rounding them: on CUDA,
    since torch 2.11."""
    return (
        device_type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and all(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.dtype_out", "CUDA")
            for name in ("mm", "addmm")
        )
    )


@cache
def _has_fast_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies this type faster than float32. Others than x86 are taken at
    torch's word."""
    if dtype not in (torch.bfloat16, torch.float16) or platform.machine() not in (
        "x86_64",
        "AMD64",
    ):
        return True
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    vectors = (
        torch.cpu._is_avx512_bf16_supported() and cpu_fields().get("vendor_id") != "GenuineIntel"
    )
    return vectors or torch.cpu._is_amx_tile_supported()


def _is_large(x: Tensor, columns: int, operations: float) -> bool:
    """Whether the product of float32 factors on a CPU, `x` the one, and that many columns takes as
    many operations."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and 2 * x.numel() * columns >= operations
    )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. Copies a strided x, as the operator itself would, unseen by who counts memory."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, bias, "none", [], ""
    )
    return product


@cache
def _onednn() -> _OneDNN:
    """From what size on oneDNN is the faster one for float32 here."""
    fields = cpu_fields()
    if (
        fields.get("vendor_id") != "AuthenticAMD"
        or not torch.backends.mkldnn.is_available()
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return _OneDNN(math.inf, math.inf)
    if int(fields.get("cpu family", "0")) >= 26:
        return _OneDNN(
            2e6, 4e6
        )  # measured: 25 us for 64x128x128 either way, 43 against 46 us for 128x128x128
    return _OneDNN(5e7, math.inf)  # an estimate: 9% of 0.45 ms are 40 us
