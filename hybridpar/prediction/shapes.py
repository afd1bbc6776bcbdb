"""Results of common operators on meta tensors, without torch's meta kernels.

The meta kernels of these operators are in Python, and their first calls import sympy and the
compiler: 2 s in every command that predicts memory. Each rule says the same in a line, for tensors
of one floating-point type (and integers) whose dimensions are in order of their strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def result_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Tensor | None:
    """Return an operator's result on meta tensors, or None if there is no rule for it.

    Args:
        func: An operator that returns a new tensor.
        args: Its positional arguments.
        kwargs: Its other arguments.
        tensors: The tensors among the positional arguments.
    """
    rule = _RULES.get(func)
    if rule is None:
        return None
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if len(dtypes) != 1 or kwargs.get("dtype") not in (None, *dtypes):
        return None
    if rule is not _product and not all(map(_is_in_order, tensors)):
        return None
    shape = rule(*args)
    return None if shape is None else tensors[0].new_empty(shape, dtype=dtypes.pop())


def _is_in_order(tensor: Tensor) -> bool:
    """Return whether no later dimension has a larger stride: results are then contiguous."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for size, stride in sizes if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _product(*factors: Tensor) -> Sequence[int]:
    """Return the shape of a matrix product; a tensor before the factors is added to it."""
    *_, a, b = factors
    return (*a.shape[:-1], b.shape[-1])


def _broadcast(*operands: Tensor | float) -> Sequence[int]:
    tensors = [x for x in operands if isinstance(x, Tensor)]
    return torch.broadcast_tensors(*tensors)[0].shape


def _same(x: Tensor) -> Sequence[int]:
    return x.shape


def _sum(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Sequence[int]:
    reduced = {dim % x.dim() for dim in dims or range(x.dim())}
    sizes = enumerate(x.shape)
    if keepdim:
        return [1 if dim in reduced else size for dim, size in sizes]
    return [size for dim, size in sizes if dim not in reduced]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int] | None:
    shape = list(tensors[0].shape)
    if any(t.dim() != len(shape) for t in tensors):  # torch ignores empty ones
        return None
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return shape


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int]:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return shape


def _rows(table: Tensor, indices: Tensor, *_: Any) -> Sequence[int]:
    return (*indices.shape, *table.shape[1:])


def _indexed(table: Tensor, indices: Sequence[Tensor]) -> Sequence[int] | None:
    if len(indices) > 1 or indices[0].dtype is not torch.int64:  # a mask chooses by its values
        return None
    return _rows(table, indices[0])


def _slice_backward(gradient: Tensor, sizes: Sequence[int], *_: int) -> Sequence[int]:
    return sizes


_RULES: dict[Any, Callable[..., Sequence[int] | None]] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.addmm.default), _product),
    **dict.fromkeys(
        (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _broadcast
    ),
    **dict.fromkeys(
        (_aten.exp.default, _aten.log.default, _aten.neg.default, _aten.sqrt.default), _same
    ),
    **dict.fromkeys((_aten.zeros_like.default, _aten.empty_like.default), _same),
    _aten.sum.dim_IntList: _sum,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.embedding.default: _rows,
    _aten.index.Tensor: _indexed,
    _aten.slice_backward.default: _slice_backward,
}
