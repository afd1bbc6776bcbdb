"""The tensors that an operator reads and writes, as its schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.memory.ghost import ARITHMETIC, tensors_in

_FRESH = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
                    "resize", "resize_as"})
"""Operators that write nothing to what they make."""
_OVERWRITES = frozenset({
    "copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "geometric", "log_normal",
    "cauchy", "_foreach_copy", "_foreach_zero"})
"""Operators that write over their first argument without reading it."""
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.index_add.default)
_LAST_OF_TORCH_TENSOR = torch.ops.aten.lift_fresh.default


class Use(NamedTuple):
    """The tensors that an operator reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]


class Operator:
    """The schema of an operator. is_view: all it makes shares memory with what it is given, and is no access.

    is_fresh: it writes nothing to what it makes. is_sum: autograd may sum gradients by it. casts: CPUs may copy what it
    is given for its arithmetic.
    """

    __slots__ = ("_arguments", "casts", "func", "is_fresh", "is_message", "is_sum", "is_view", "name", "operation")

    def __init__(self, func: Any):
        self.func = func
        self.name: str = func.name().partition(".")[0]
        self.operation = self.name.partition("::")[2].rstrip("_")
        self.is_fresh, self.casts = self.operation in _FRESH, self.operation in ARITHMETIC
        self.is_sum, self.is_message = func in _SUMS, func.namespace == "c10d"
        self._arguments = self._roles()
        makes = func._schema.returns
        self.is_view = (func is not _LAST_OF_TORCH_TENSOR and bool(makes)
                        and all(one.alias_info is not None for one in makes)
                        and not any(writes for *_, writes in self._arguments)
                        and torch.Tag.inplace_view not in func.tags)

    def _roles(self) -> tuple[tuple[int, str, bool, bool], ...]:
        """Of each argument with tensors: its position, its name, and whether the operator reads and writes it."""
        if self.func is _LAST_OF_TORCH_TENSOR or torch.Tag.inplace_view in self.func.tags:
            return ()
        takes_shape = self.operation.endswith("_like") or self.operation.startswith("new_")
        found = []
        for position, argument in enumerate(self.func._schema.arguments):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (takes_shape or (writes and (
                argument.is_out or (position == 0 and self.operation in _OVERWRITES))))
            if (reads or writes) and "Tensor" in str(argument.type):
                found.append((position, argument.name, reads, writes))
        return tuple(found)

    def use(self, args: Any, kwargs: Mapping[str, Any]) -> Use:
        """The use of these arguments."""
        if self.is_message:
            return _message_use(self.operation, args)
        use = Use([], [])
        for position, name, reads, writes in self._arguments:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None:
                tensors = (value,) if isinstance(value, Tensor) else tensors_in(value)
                if reads:
                    use.reads.extend(tensors)
                if writes:
                    use.writes.extend(tensors)
        return use


def adds_nothing(to: Any, other: Any) -> bool:
    """Whether a sum adds an empty sparse gradient (nn.matmul.nothing) to a dense tensor."""
    return (isinstance(other, Tensor) and other.layout is torch.sparse_coo and to.layout is torch.strided
            and not other._nnz())


def _message_use(operation: str, args: Any) -> Use:
    """The use of torch's own collectives and messages, whose schemas do not say it."""
    first = tensors_in(args[0])
    if operation == "send":
        return Use(first, [])
    if operation.startswith("recv"):
        return Use([], first)
    if operation in ("_allgather_base", "alltoall_base"):
        return Use(tensors_in(args[1]), first)
    return Use(first, first)
