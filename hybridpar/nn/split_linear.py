"""The differentiable function of a linear layer that is split over ranks.

It starts the communication of a backward pass as soon as it can, multiplies meanwhile, and hands
the gradients of weights to the training state. linear.py has the layers, and the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from hybridpar.autograd import once_differentiable
from hybridpar.comm import (
    all_gather,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from hybridpar.grid import Axis
from hybridpar.nn import fp8, matmul
from hybridpar.nn.binding import UNBOUND, ParameterBinding
from hybridpar.nn.recomputable import HiddenStates, Recomputable, RecomputeFn


class Adapter(NamedTuple):
    """The low-rank factors that a linear layer adds to its weight: W + scale B A.

    Shapes: a [r, i] and b [o, r], local parts.
    """

    a: Tensor
    b: Tensor
    scale: float
    a_binding: ParameterBinding = UNBOUND
    b_binding: ParameterBinding = UNBOUND


class Split(NamedTuple):
    """The split of a linear layer over ranks.

    Attributes:
        dx_axis: The axis over which dx is summed. None: it is complete.
        y_axis: The axis over which y is summed, before b is added. None: it is complete.
        sizes: Rows of each rank, if x (with dx_axis) or y (with y_axis) is its part of the sequence.
    """

    dx_axis: Axis | None
    y_axis: Axis | None
    sizes: Sequence[int] | None

    def communicates(self, x: Tensor) -> bool:
        """Whether the layer communicates, forward or in the backward pass of this input."""
        if self.y_axis is not None:
            return self.y_axis.size > 1
        assert self.dx_axis is not None
        return self.dx_axis.size > 1 and (x.requires_grad or self.sizes is not None)


class LinearOptions(NamedTuple):
    """The way in which a linear layer is computed.

    Attributes:
        split: Its split over ranks.
        binding: The objects that the training state binds to its weight.
        adapter: The low-rank factors that are added to its weight.
        make: Makes x again in the backward pass. None: x is kept.
    """

    split: Split
    binding: ParameterBinding = UNBOUND
    adapter: Adapter | None = None
    make: RecomputeFn | None = None


def split_linear(
    x: HiddenStates, weight: Tensor, bias: Tensor | None, options: LinearOptions
) -> Tensor:
    """Compute a split layer by torch's operator where that does as well, otherwise by ours."""
    make = None
    if isinstance(x, Recomputable):
        make = x.recompute_fn
        x = x.value
    if not torch.is_grad_enabled():  # autograd's call takes 9 us, a product of one row some 20
        return _product_and_adapter(x, weight, bias, options)[0]
    if make is not None:
        options = options._replace(make=make)
    adapter = options.adapter
    if adapter is not None:
        assert not weight.requires_grad, "the weight below an adapter is frozen"
        return _AdaptedLinear.apply(x, weight, bias, adapter.a, adapter.b, options)
    if options.make or options.split.communicates(x) or _is_ours(weight, options.binding):
        return _Linear.apply(x, weight, bias, options)
    return F.linear(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, binding: ParameterBinding) -> Tensor:
    """x W^T + b on this rank, outside of autograd; in fp8 where the weight has such a form."""
    quantized = binding.fp8_weight(weight)
    if quantized is not None:
        return fp8.linear(x, quantized, bias)
    return matmul.linear(x, weight, bias)


def _product_and_adapter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: LinearOptions,
) -> tuple[Tensor, Tensor | None]:
    """Compute a split layer outside of autograd; return y, and scale * x A^T if there is an adapter.

    Shapes: as `column_linear` or `row_linear`, and [.., r] with the rows of the product.
    """
    dx_axis, y_axis, sizes = options.split
    adapter = options.adapter
    if dx_axis is not None:
        x = _gathered(x, dx_axis, sizes)
    is_summed = y_axis is not None and y_axis.size > 1
    y = _product(x, weight, None if is_summed else bias, options.binding)
    low = None
    if adapter is not None:
        low = matmul.linear(x, adapter.a).mul_(adapter.scale)
        _add_product(y, low, adapter.b)
    if y_axis is None or not is_summed:
        return y, low
    y = all_reduce(y, y_axis) if sizes is None else reduce_scatter(y, y_axis, 1, sizes)
    return y if bias is None else y.add_(bias), low


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to y, in place. Shapes: y [.., o], x [.., i], weight [o, i]."""
    if matmul.by_float32(weight):
        y.add_(matmul.linear(x, weight))
    else:
        y.view(-1, y.shape[-1]).addmm_(_rows(x), weight.t())


def _gathered(x: Tensor, axis: Axis, sizes: Sequence[int] | None) -> Tensor:
    """Return the full sequence; with `sizes` it is gathered from the ranks' rows."""
    return x if sizes is None else all_gather(x, axis, 1, sizes)


def _start_sum(dx: Tensor, axis: Axis, sizes: Sequence[int] | None) -> Callable[[], Tensor]:
    """Start the all-reduce of `dx`, or its reduce-scatter; return a function that waits for the
    result."""
    if sizes is not None:
        return start_reduce_scatter(dx, axis, 1, sizes)
    work = all_reduce_async(dx, axis)

    def finish() -> Tensor:
        work.wait()
        return dx

    return finish


def _rows(x: Tensor) -> Tensor:
    """Flatten all but the last dimension. Shapes: [.., n] -> [rows, n]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _is_ours(weight: Tensor, binding: ParameterBinding) -> bool:
    """Whether nn.matmul's products, or its way to add up gradients, are better than torch's, or its
    factors wanted."""
    return (
        weight.dtype in (torch.float32, torch.float64)
        or matmul.by_float32(weight)
        or (binding.consumer is not None and binding.consumer.wants_factors)
        or bool(binding.fp8_weights)
        or matmul.sums_in_float32(weight.device.type, weight.dtype)
    )


class _Linear(Function):
    """Starts the sum of dx over ranks as soon as this rank's share is known, and computes dW and db
    meanwhile: also where other gradients of weights wait.

    The other ranks' rows of a split x arrive while dx is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LinearOptions,
    ) -> Tensor:
        keeps = ctx.needs_input_grad[1] and not options.make
        ctx.save_for_backward(x if keeps else None, weight)
        ctx.split = options.split
        # the leaf itself: recomputation would bring back a copy, without its .grad
        ctx.leaf = weight
        ctx.make = options.make
        ctx.consumer = options.binding.consumer
        ctx.fp8_weight = options.binding.fp8_weight(weight)
        return _product_and_adapter(x, weight, bias, options)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx_axis, y_axis, sizes = ctx.split
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # the tensors that x is made from are free once this has run, as saved tensors are
        make = ctx.make
        ctx.make = None
        own = dy
        dy = dy if y_axis is None else _gathered(dy, y_axis, sizes)
        factor = matmul.factor(_rows(dy))
        gather = None
        if wants_weight and dx_axis is not None and sizes is not None:
            gather = start_all_gather(make() if make else x, dx_axis, 1, sizes)
        dx = dw = db = finish = None
        if wants_x:
            if ctx.fp8_weight is None:
                dx = matmul.input_gradient(factor, weight)
            else:
                dx = fp8.input_gradient(_rows(dy), ctx.fp8_weight)
            dx = dx.view(*dy.shape[:-1], weight.shape[1])
            if dx_axis is not None:
                finish = _start_sum(dx, dx_axis, sizes)
                dx = None
        if wants_weight:
            if gather is not None:
                x = gather()
                gather = None
            elif make:
                x = make()
            dw = matmul.weight_gradient(
                factor,
                _rows(x),
                ctx.leaf,
                ctx.consumer,
                now=finish is not None and dx_axis.size > 1,
            )
        if wants_bias:
            db = _rows(own).sum(0)
        if finish is not None:
            dx = finish()
        return dx, dw, db, None


class _AdaptedLinear(Function):
    """A frozen linear layer with an adapter; see _Linear. It keeps x for the gradient of A, and
    x A^T for the gradient of B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        options: LinearOptions,
    ) -> Tensor:
        adapter = options.adapter
        make = options.make
        assert adapter is not None
        inside = options._replace(adapter=adapter._replace(a=a, b=b))
        y, low = _product_and_adapter(x, weight, bias, inside)
        trains_a, trains_b = ctx.needs_input_grad[3:5]
        ctx.save_for_backward(
            x if trains_a and not make else None, weight, a, b, low if trains_b else None
        )
        ctx.adapter = adapter
        ctx.split = options.split
        ctx.make = make if trains_a else None
        ctx.fp8_weight = options.binding.fp8_weight(weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        adapter = ctx.adapter
        dx_axis, y_axis, sizes = ctx.split
        wants_x, _, wants_bias, wants_a, wants_b = ctx.needs_input_grad[:5]
        make = ctx.make
        ctx.make = None
        own = dy
        dy = dy if y_axis is None else _gathered(dy, y_axis, sizes)
        factor = matmul.factor(_rows(dy))
        dlow = matmul.input_gradient(factor, b).mul_(adapter.scale)
        # with `sizes` the gradient of x A^T is summed by itself: A then meets its own rows alone
        is_apart = dx_axis is not None and sizes is not None
        dx = da = db = dbias = finish = None
        if wants_x:
            if ctx.fp8_weight is None:
                dx = matmul.input_gradient(factor, weight)
            else:
                dx = fp8.input_gradient(_rows(dy), ctx.fp8_weight)
            if not is_apart:
                _add_product(dx, dlow, a.t())
            dx = dx.view(*dy.shape[:-1], weight.shape[1])
            if dx_axis is not None:
                finish = _start_sum(dx, dx_axis, sizes)
                dx = None
        if wants_b:
            db = matmul.weight_gradient(factor, _rows(low), adapter.b, adapter.b_binding.consumer)
        if is_apart:
            dlow = _rows(reduce_scatter(dlow.view(*dy.shape[:-1], -1), dx_axis, 1, sizes))
        if wants_a:
            x = make() if make else x
            da = matmul.weight_gradient(
                matmul.factor(dlow), _rows(x), adapter.a, adapter.a_binding.consumer
            )
        if wants_bias:
            dbias = _rows(own).sum(0)
        if finish is not None:
            dx = finish()
            if is_apart:
                _add_product(dx, dlow, a.t())
        return dx, None, dbias, da, db, None
