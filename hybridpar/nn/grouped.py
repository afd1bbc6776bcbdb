"""Linear layers of several experts, each of which multiplies its own rows of one tensor.

    x       [ a a a b c c ]        rows sorted by expert, of which expert e has counts[e]
    y       [ a W_a | b W_b | c W_c ]

The products write into one tensor, and one autograd Function covers them all: a layer of 64 experts
has as many nodes as a layer of one. An expert without rows multiplies nothing.

Each product is a call of its own. On a Hopper or Blackwell GPU a bfloat16 x takes one call of
`torch.nn.functional.grouped_mm` instead, if the weights are equally far apart in memory, as the
weights of a layer's experts in the training state are: so none is copied. Gradients of weights are
added to their sums one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from hybridpar.autograd import once_differentiable
from hybridpar.nn import matmul
from hybridpar.nn.binding import GradientConsumer
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from hybridpar.nn.recomputable import HiddenStates, RecomputeFn, recompute_fn_of, value_of

_ALIGN_BYTES = 16
"""Addresses and rows of factors must be multiples of this for `grouped_mm`."""


def grouped_linear(
    x: HiddenStates,
    counts: Sequence[int],
    layers: Sequence[ColumnParallelLinear] | Sequence[RowParallelLinear],
) -> Tensor:
    """Return the products of each layer's `weight` with its rows.

    Args:
        x: Rows, sorted by layer.
        counts: Number of rows of each layer.
        layers: Layers without biases, whose weights have one shape.

    Shapes: [rows, i], weights [o, i] -> [rows, o].
    """
    weights = [layer.weight for layer in layers]
    if not torch.is_grad_enabled():
        return _products(value_of(x), counts, weights)
    consumers = tuple(layer.binding("weight").consumer for layer in layers)
    group = _Group(tuple(counts), consumers, recompute_fn_of(x))
    y: Tensor = _GroupedLinear.apply(value_of(x), group, *weights)
    return y


@dataclass(frozen=True)
class _Group:
    """Numbers of rows, takers of the weights' gradients, and the function that computes x again."""

    counts: tuple[int, ...]
    consumers: tuple[GradientConsumer | None, ...]
    make: RecomputeFn | None


def _products(x: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Return x W^T of each group of rows. Shapes: as `grouped_linear`."""
    if len(x) and _has_grouped_mm(x):
        stack = _stacked(weights)
        if stack is not None:
            return _by_grouped_mm(x, counts, stack)
    y = x.new_empty(len(x), weights[0].shape[0])
    parts = zip(x.split(list(counts)), y.split(list(counts)), weights, counts, strict=True)
    for rows, out, weight, count in parts:
        if count:
            matmul.linear_into(rows, weight, out)
    return y


def _has_grouped_mm(x: Tensor) -> bool:
    """Return whether torch has a kernel for all groups: bfloat16 from sm_90 to sm_100. On other
    GPUs its `grouped_mm` is a loop that waits for the numbers of rows."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _stacked(weights: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor of all weights, which shares their memory; None if they are not equally far
    apart there, or not where the kernel can read them.

    Shapes: [o, i] each -> [n, o, i].
    """
    first, *others = weights
    if not others:
        return None
    step = others[0].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for number, weight in enumerate(weights):
        same = weight.untyped_storage().data_ptr() == storage
        at = first.storage_offset() + number * step
        if not same or weight.storage_offset() != at or weight.stride() != first.stride():
            return None
    lengths = (step, *first.shape)
    aligned = all(length * first.element_size() % _ALIGN_BYTES == 0 for length in lengths)
    if step <= 0 or not aligned or first.data_ptr() % _ALIGN_BYTES:
        return None
    return first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()))


def _by_grouped_mm(x: Tensor, counts: Sequence[int], stack: Tensor) -> Tensor:
    """Return x W^T of each group by one kernel. Shapes: x [rows, i], stack [n, o, i] -> [rows, o]."""
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=x.device)
    return F.grouped_mm(x.contiguous(), stack.transpose(1, 2), offs=ends)


class _GroupedLinear(Function):
    """The products of all groups; keeps x, unless it is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, *weights: Tensor) -> Tensor:
        wants_weights = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(x if wants_weights and not group.make else None, *weights)
        ctx.group = group
        # the leaves themselves: recomputation would bring back copies, without their .grad
        ctx.leaves = weights
        return _products(x, group.counts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group = ctx.group
        leaves = ctx.leaves
        # the tensors that x is made from are free once this has run, as saved tensors are
        ctx.group = ctx.leaves = None
        factor = matmul.factor(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            transposed = [weight.t() for weight in weights]
            dx = _products(factor, group.counts, transposed).to(dy.dtype)
        dw: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            if group.make:
                x = group.make()
            dys = factor.split(group.counts)
            xs = x.split(group.counts)
            for number, (leaf, consumer) in enumerate(zip(leaves, group.consumers, strict=True)):
                if ctx.needs_input_grad[2 + number]:
                    dw[number] = matmul.weight_gradient(dys[number], xs[number], leaf, consumer)
        return dx, None, *dw
