"""Reduced gradients that stay factors: each is multiplied out where it is read, and then dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from hybridpar.optim import ParameterSlot


@dataclass(frozen=True)
class FactoredGradient:
    """This rank's shard of a reduced gradient.

    Attributes:
        total: Returns a parameter's reduced gradient.
        name: The parameter.
        part: Elements (start, stop) of it that this rank owns; None: all.
    """

    total: Callable[[str], Tensor]
    name: str
    part: tuple[int, int] | None

    def multiplied_out(self) -> Tensor:
        """Return the shard, in the parameter's shape or, if it is a part, as a vector."""
        total = self.total(self.name)
        return total if self.part is None else total.view(-1)[slice(*self.part)]


def multiplied_out(gradient: Tensor | FactoredGradient) -> Tensor:
    """Return a gradient as a tensor."""
    return gradient if isinstance(gradient, Tensor) else gradient.multiplied_out()


def runs_of(slots: Sequence[ParameterSlot], factored: Collection[str]) -> list[list[int]]:
    """Group the slots of these parameters for updates one after the other, so that no more gradients
    are multiplied out at once than the largest one has elements.

    The groups depend on global shapes, so they are equal on all tp ranks that own the same slots.

    Returns:
        The numbers of the slots of each group.
    """
    sizes = {i: prod(slot.placement.shape) for i, slot in enumerate(slots) if slot.name in factored}
    most = max(sizes.values(), default=0)
    runs: list[list[int]] = []
    room = 0
    for i, size in sizes.items():
        if size > room:
            runs.append([])
            room = most
        runs[-1].append(i)
        room -= size
    return runs
