"""The tensors that an operator reads and writes, according to its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.prediction.ghost import ARITHMETIC, tensors_in

_FRESH = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "resize",
        "resize_as",
    }
)
"""Operators that do not write to the tensors that they make."""
_OVERWRITES = frozenset(
    {
        "copy",
        "fill",
        "zero",
        "normal",
        "uniform",
        "random",
        "bernoulli",
        "exponential",
        "geometric",
        "log_normal",
        "cauchy",
        "_foreach_copy",
        "_foreach_zero",
    }
)
"""Operators that overwrite their first argument without reading it."""
_IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
_SUMS = (*_IN_PLACE, torch.ops.aten.add_.Tensor)
_LAST_OF_TORCH_TENSOR = torch.ops.aten.lift_fresh.default


Role = tuple[int, str, bool, bool]


class OperatorAccess(NamedTuple):
    """The tensors that an operator reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]


class Operator:
    """The schema of an operator.

    Args:
        is_view: Whether all results share memory with an argument, which counts as no access.
        is_fresh: Whether it does not write to its results.
        is_sum: Whether autograd may use it to sum gradients.
        casts: Whether CPUs may copy its arguments for arithmetic.
    """

    __slots__ = ("casts", "func", "is_fresh", "is_sum", "is_view", "name", "operation", "roles")

    def __init__(self, func: Any):
        self.func = func
        self.name: str = func.name().partition(".")[0]
        self.operation = self.name.partition("::")[2].rstrip("_")
        self.is_fresh = self.operation in _FRESH
        self.casts = self.operation in ARITHMETIC
        self.is_sum = func in _SUMS
        self.roles = _message_roles(self.operation) if func.namespace == "c10d" else self._roles()
        """The arguments with tensors: position, name, and whether the operator reads
        and writes it."""
        makes = func._schema.returns
        self.is_view = (
            func is not _LAST_OF_TORCH_TENSOR
            and bool(makes)
            and all(one.alias_info is not None for one in makes)
            and not any(writes for *_, writes in self.roles)
            and torch.Tag.inplace_view not in func.tags
        )

    def _roles(self) -> tuple[Role, ...]:
        if self.func is _LAST_OF_TORCH_TENSOR or torch.Tag.inplace_view in self.func.tags:
            return ()
        takes_shape = self.operation.endswith("_like") or self.operation.startswith("new_")
        found = []
        for position, argument in enumerate(self.func._schema.arguments):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not (
                takes_shape
                or (
                    writes
                    and (argument.is_out or (position == 0 and self.operation in _OVERWRITES))
                )
            )
            if (reads or writes) and "Tensor" in str(argument.type):
                found.append((position, argument.name, reads, writes))
        return tuple(found)

    def use(self, args: Any, kwargs: Mapping[str, Any]) -> OperatorAccess:
        """Return the tensors that the operator reads and writes with these arguments."""
        use = OperatorAccess([], [])
        for position, name, reads, writes in self.roles:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None:
                tensors = (value,) if isinstance(value, Tensor) else tensors_in(value)
                if reads:
                    use.reads.extend(tensors)
                if writes:
                    use.writes.extend(tensors)
        return use


def adds_nothing(to: Any, other: Any) -> bool:
    """Return whether a sum adds an empty sparse gradient (nn.matmul.nothing) to a dense tensor."""
    return (
        isinstance(other, Tensor)
        and other.layout is torch.sparse_coo
        and to.layout is torch.strided
        and not other._nnz()
    )


def in_place_form(func: Any) -> Any:
    """Return the operator by which autograd makes a sum in place (see
    ghost.is_in_place_without_a_mode)."""
    return _IN_PLACE[func]


def described(
    name: str, overload: str
) -> tuple[str, bool, bool, bool, bool, int, list[tuple[int, bool, bool]]]:
    """Return an Operator in the form that csrc/recorder takes, by its name in the dispatcher, such
    as "aten::add" and "Tensor".

    Returns:
        Name as JSON, is_view, is_fresh, is_sum, casts, the number of positional arguments; and for
        each argument with tensors its position, and whether the operator reads and writes it.
    """
    namespace, _, plain = name.partition("::")
    operator = Operator(
        getattr(getattr(getattr(torch.ops, namespace), plain), overload or "default")
    )
    positional = sum(not argument.kwarg_only for argument in operator.func._schema.arguments)
    return (
        json.dumps(operator.name),
        operator.is_view,
        operator.is_fresh,
        operator.is_sum,
        operator.casts,
        positional,
        [(position, reads, writes) for position, _, reads, writes in operator.roles],
    )


def _message_roles(operation: str) -> tuple[Role, ...]:
    """Return the roles of torch's collectives and messages, whose schemas do not have them."""
    if operation in ("_allgather_base", "alltoall_base"):
        return (0, "", False, True), (1, "", True, False)
    return ((0, "", not operation.startswith("recv"), operation != "send"),)
