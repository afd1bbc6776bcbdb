"""Collectives with gradients: a tensor passes between 'equal on every rank' and 'a part on each'.

On an axis of size 1 each is the identity. The arguments and the gradients that arrive are never
written to, except by `reduce_from_`, which works in place on its argument.

Source: Megatron-LM (arXiv 1909.08053), section 3: f is `copy_to`, g is `reduce_from`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm.collectives import all_gather, all_reduce, reduce_scatter
from hybridpar.grid import Axis

Move = Callable[..., Tensor]


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Pass a replicated tensor to computations that differ from rank to rank.

    Collectives: forward none, backward one all-reduce.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum over ranks, replicated; every rank must continue with the same computation.

    Collectives: forward one all-reduce, backward none.
    """
    if axis.size == 1:
        return x
    return _ReduceFrom.apply(x.clone(memory_format=torch.contiguous_format), axis)


def reduce_from_(x: Tensor, axis: Axis) -> Tensor:
    """Run `reduce_from` in place, for an `x` that was just computed and that nothing else holds or
    saves.
    """
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Gather the parts of all ranks along `dim`; every rank must continue with the same
    computation.

    Shapes: see `collectives.all_gather`. Collectives: forward one all-gather, backward none (own
    slice).
    """
    return x if axis.size == 1 else _Moved.apply(x, axis, dim % x.dim(), sizes, all_gather, _own)


def scatter_to(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's slice along `dim` of a replicated tensor.

    Args:
        sizes: Extents of all ranks' slices; None: they are equal.

    Shapes: [.., sum(sizes), ..] -> [.., sizes[rank], ..].
    Collectives: forward none, backward one all-gather.
    """
    if axis.size == 1:
        return x
    dim %= x.dim()
    if sizes is None:
        assert x.shape[dim] % axis.size == 0, (
            f"scatter_to of {x.shape[dim]} over {axis.size} ranks needs sizes"
        )
        sizes = [x.shape[dim] // axis.size] * axis.size
    assert sum(sizes) == x.shape[dim], f"scatter_to of extent {x.shape[dim]} into sizes {sizes}"
    return _Moved.apply(x, axis, dim, sizes, _own, all_gather)


def gather_sequence(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """Gather all rows (dimension 1) for computations that differ from rank to rank.

    Shapes: [b, sizes[rank], ..] -> [b, sum(sizes), ..].
    Collectives: forward one all-gather, backward one reduce_scatter.
    """
    return x if axis.size == 1 else _Moved.apply(x, axis, 1, sizes, all_gather, reduce_scatter)


def scatter_sequence(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """Return this rank's rows (dimension 1) of the sum over ranks.

    Shapes: [b, sum(sizes), ..] -> [b, sizes[rank], ..].
    Collectives: forward one reduce_scatter, backward one all-gather.
    """
    return x if axis.size == 1 else _Moved.apply(x, axis, 1, sizes, reduce_scatter, all_gather)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient may be shared with other consumers, or expanded from fewer elements: reduce a
        # copy.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Moved(Function):
    """Returns `there(x, axis, dim, sizes)`, whose gradient is moved by `back`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        dim: int,
        sizes: Sequence[int] | None,
        there: Move,
        back: Move,
    ) -> Tensor:
        ctx.back = partial(back, axis=axis, dim=dim, sizes=sizes)
        return there(x, axis, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None, None, None, None


def _own(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """Return this rank's slice."""
    length = x.shape[dim] // axis.size if sizes is None else sizes[axis.rank]
    return x.narrow(dim, axis.rank * length if sizes is None else sum(sizes[: axis.rank]), length)
