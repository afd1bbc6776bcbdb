"""The passes outside of autograd, for gpu_ops: an optimizer's step, the norm, Muon's iteration,
gradients of an embedding and of weights, and the codecs of messages and gradients.

Each side of a race starts from the same tensors and computes the same thing, which is compared
before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.ops import Size
from hybridpar import ops
from hybridpar.nn.matmul import sums_in_float32
from hybridpar.ops.backends import registry
from hybridpar.ops.sparse import place_bytes
from hybridpar.ops.update import AdamStep, Weights
from hybridpar.optim import newton_schulz as iteration
from hybridpar.state.compression.codec import BlockQuantized, Codec
from hybridpar.state.compression.methods.dct import TopK

LAYERS = 4
LR = 0.1  # so that a step is most of what is compared


@dataclass(frozen=True)
class Pass:
    """`sides`: what does it, by name; a call returns what it wrote."""

    name: str
    sides: dict[str, Callable[[], list[Tensor]]]
    num_bytes: float
    flops: float = 0.0


def passes(size: Size, dtype: torch.dtype, device: str) -> Iterator[Pass]:
    """One at a time, for memory's sake. The optimizer's are those of float32 masters with a working
    copy in `dtype`."""
    yield adamw(size, dtype, device)
    yield norm(size, device)
    yield newton_schulz(size, dtype, device)
    yield embedding(size, dtype, device)
    yield from messages(size, dtype, device)
    yield sparse(size, device)
    if dtype != torch.float32:
        yield weight_gradient(size, dtype, device)


def able(op: str, device: str, dtype: torch.dtype) -> list[str]:
    return [row.name for row in registry.backends(op) if row.unsupported(device, dtype) is None]


def parameters(size: Size, device: str) -> list[Tensor]:
    """Shapes of an embedding and some layers."""
    h = size.hidden
    layer = [
        (3 * h, h),
        (3 * h,),
        (h, h),
        (h,),
        (4 * h, h),
        (4 * h,),
        (h, 4 * h),
        (h,),
        (h,),
        (h,),
        (h,),
        (h,),
    ]
    return [
        torch.randn(shape, device=device) * 0.02 for shape in [(size.vocab, h), *layer * LAYERS]
    ]


def adamw(size: Size, dtype: torch.dtype, device: str) -> Pass:
    """Ours reads one version of the weights and writes another and the working copy; PyTorch's
    writes over one."""
    old, gradients = parameters(size, device), parameters(size, device)
    step = AdamStep(0.5, 0.9, 0.999, 1e-8, 1)
    decays = [0.01] * len(old)
    low = dtype != torch.float32

    def ours(backend: str) -> Callable[[], list[Tensor]]:
        new, *moments = ([torch.zeros_like(x) for x in old] for _ in range(3))
        weights = Weights(old, new, [torch.empty_like(x, dtype=dtype) for x in old] if low else ())
        # the torch passes use gradients up
        own, kernels = [x.clone() for x in gradients], ops.optimizer(old[0], backend)
        return lambda: kernels.adam(weights, own, tuple(moments), decays, LR, step) or new

    def theirs(optimizer: Callable[..., Any], **kind: bool) -> Callable[[], list[Tensor]]:
        leaves = [x.clone().requires_grad_() for x in old]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient * 0.5
        stepper = optimizer(leaves, lr=LR, weight_decay=0.01, **kind)
        return lambda: stepper.step() or leaves

    sides = {name: ours(name) for name in able("optimizer", device, torch.float32)}
    sides |= {
        "AdamW(fused)": theirs(torch.optim.AdamW, fused=True),
        "foreach": theirs(torch.optim.AdamW, foreach=True),
    }
    try:
        from apex.optimizers import FusedAdam

        sides["apex"] = theirs(FusedAdam)
    except Exception as error:  # whatever a missing or half-built apex throws
        print(f"no apex.optimizers.FusedAdam ({error})")
    return Pass("AdamW", sides, sum(x.numel() for x in old) * (28 + low * dtype.itemsize))


def norm(size: Size, device: str) -> Pass:
    gradients = parameters(size, device)

    def ours(backend: str) -> Callable[[], list[Tensor]]:
        kernels = ops.optimizer(gradients[0], backend)
        return lambda: [kernels.sum_squares(gradients).sum().sqrt()]

    sides = {name: ours(name) for name in able("optimizer", device, torch.float32)}
    sides["foreach"] = lambda: [
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    ]
    return Pass("gradient norm", sides, sum(4 * x.numel() for x in gradients))


def newton_schulz(size: Size, dtype: torch.dtype, device: str) -> Pass:
    """Newton-Schulz of the widest layer: symmetric products whole, and as one triangle of
    blocks."""
    x = torch.randn(
        1 if device == "cpu" else LAYERS, size.hidden, 4 * size.hidden, device=device
    ).to(dtype)

    def ours(blocks: int) -> list[Tensor]:
        with patch.dict(iteration.BLOCKS, {device: blocks}):
            return [iteration.newton_schulz(x.clone())]

    sides = {
        "whole": partial(ours, 1),
        "2 rows of blocks": partial(ours, 2),
        "4 rows of blocks": partial(ours, 4),
    }
    if dtype == torch.bfloat16:  # what torch.optim.Muon has of any type
        from torch.optim._muon import _zeropower_via_newtonschulz as theirs

        sides["torch.optim.Muon"] = lambda: [
            theirs(matrix, iteration.COEFFICIENTS, iteration.STEPS, iteration.EPS) for matrix in x
        ]
    return Pass(
        "Newton-Schulz",
        sides,
        2 * x.nbytes,
        2 * len(x) * iteration.newton_schulz_cost(*x.shape[1:]),
    )


def embedding(size: Size, dtype: torch.dtype, device: str) -> Pass:
    """The embedding's backward, of words as frequent as in a language, added to a float32
    gradient."""
    rows = size.vocab
    h = size.hidden
    often = 1 / torch.arange(1, rows + 1, device=device)
    ids = torch.multinomial(often, size.tokens, replacement=True)
    dy = torch.randn(size.tokens, h, device=device).to(dtype)
    touched = len(ids.unique())

    def ours(backend: str) -> Callable[[], list[Tensor]]:
        kernels, gradient = ops.embedding(dy, backend), torch.zeros(rows, h, device=device)
        return lambda: kernels.add_gradient_(gradient, dy, ids, None, False) or [gradient]

    total = torch.zeros(rows, h, device=device)
    sides = {name: ours(name) for name in able("embedding", device, dtype)}
    sides["index_add_"] = lambda: [total.index_add_(0, ids, dy.float())]
    return Pass(
        "embedding backward",
        sides,
        dy.numel() * dy.element_size() + 2 * 4 * touched * h + 8 * size.tokens,
    )


def messages(size: Size, dtype: torch.dtype, device: str) -> Iterator[Pass]:
    """An activation as bytes and back, by each codec that has passes; nothing of PyTorch's does
    that."""
    x = torch.randn(size.tokens, size.hidden, device=device).to(dtype)
    out = torch.empty_like(x)
    codecs: dict[str, tuple[str, Callable[[str], Codec]]] = {
        "int8": ("quantize", lambda backend: BlockQuantized(8, backend=backend)),
        "int4, rotated": (
            "quantize",
            lambda backend: BlockQuantized(4, rotate=True, backend=backend),
        ),
        "dct 0.1": ("largest", lambda backend: TopK(0.1, dtype, backend=backend)),
    }

    def through(codec: Codec) -> list[Tensor]:
        message = codec.encode(x)
        codec.decode_(out, message)
        return [message, out]

    for name, (op, make) in codecs.items():
        sides = {backend: partial(through, make(backend)) for backend in able(op, device, dtype)}
        yield Pass(
            f"message as {name}",
            sides,
            2 * x.nbytes + 2 * len(x) * make("auto").row_bytes(size.hidden),
        )


def sparse(size: Size, device: str) -> Pass:
    """A hundredth of a gradient's elements found, packed and added, with what is left."""
    x = torch.randn(4 * size.hidden, size.hidden, device=device)
    k = x.numel() // 100

    def pack(backend: str) -> Callable[[], list[Tensor]]:
        passes, left, total = ops.sparse(x, backend), torch.empty_like(x), torch.empty_like(x)

        def work() -> list[Tensor]:
            threshold = passes.threshold(left.copy_(x), k)
            count = passes.count(left, threshold)
            values = x.new_empty(count)
            places = torch.empty(place_bytes(x.numel(), count), dtype=torch.uint8, device=device)
            passes.pack_(left, threshold, values, places)
            passes.add_(total, values, places, True)
            return [left, total]

        return work

    sides = {name: pack(name) for name in able("sparse", device, torch.float32)}
    return Pass(
        "sparse gradient", sides, 9 * x.nbytes
    )  # copied, four digits, counted twice, taken off, zeros


def weight_gradient(size: Size, dtype: torch.dtype, device: str) -> Pass:
    """dy^T x of the widest layer, added to a float32 gradient."""
    t = size.tokens
    h = size.hidden
    x, dy = (
        torch.randn(t, h, device=device).to(dtype),
        torch.randn(t, 4 * h, device=device).to(dtype),
    )
    gradients = [torch.zeros(4 * h, h, device=device) for _ in range(2)]
    sides = {"product, then add": lambda: [gradients[0].add_(dy.t() @ x)]}
    if sums_in_float32(device, dtype):
        sides["addmm"] = lambda: [
            torch.addmm(gradients[1], dy.t(), x, out_dtype=torch.float32, out=gradients[1])
        ]
    return Pass(
        "weight gradient",
        sides,
        dtype.itemsize * (x.numel() + dy.numel()) + 8 * 4 * h * h,
        8 * t * h * h,
    )
