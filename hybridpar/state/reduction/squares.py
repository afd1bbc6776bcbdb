"""The squared norm of a rank's gradients, segment by segment as they become final."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import groupby

import torch
from torch import Tensor

from hybridpar.grid import Axis
from hybridpar.nn.placement import reduce_shared_gradients
from hybridpar.optim import ParameterSlot
from hybridpar.optim.norm import counted, sums_of_squares
from hybridpar.state.factored import FactoredGradient, multiplied_out
from hybridpar.state.layout import FlatLayout
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, block_of
from hybridpar.state.residency.shares import Shares
from hybridpar.state.residency.uses import layout_run


class Squares:
    """Sums of squares of the gradients that this rank counts: `views` of a buffer or of its shards,
    or factors, one for each slot.

    They are added block by block in one order, so a stage has equal bits however it is cut into
    segments. Gradients that came as factors are summed one by one, wherever they are.

    Args:
        gradients: The buffer or the shards that the views are of.
        partition: The shards that this rank updates.
        slots: Their parameters.
        views: Their gradients.
        tp: The axis over which shared rows are reduced.
        backend: The backend of the kernels.
    """

    def __init__(
        self,
        gradients: Buffer | Shares,
        partition: Partition,
        slots: Sequence[ParameterSlot],
        views: Sequence[Tensor | FactoredGradient],
        tp: Axis,
        backend: str,
        *,
        factored: Container[str] = (),
    ):
        self._tp = tp
        self._backend = backend
        self._views = [
            (view, slot.placement)
            for view, slot in zip(views, slots, strict=True)
            if isinstance(view, Tensor)
        ]
        self._tensors: dict[int, list[Tensor]] = {}  # by part
        self._factors: dict[int, list[tuple[FactoredGradient, ParameterSlot]]] = {}  # likewise
        self._sums: dict[int, Tensor] = {}  # of both, of those that are known
        order: dict[int, list[int]] = {}
        of_factors: dict[int, list[int]] = {}
        starts = [owned.start for owned in partition.owned]
        number = 0
        uses = partition.uses

        def home(i: int) -> tuple[FlatLayout, int]:
            return gradients.home(uses(slots[i].name), starts[i])

        def run(i: int) -> object:
            name = slots[i].name
            if name in factored:
                return name
            return block_of(name), layout_run(slots[i].placement), uses(name), home(i)[1]

        for _, members in groupby(range(len(slots)), run):
            own = list(members)
            part = uses(slots[own[0]].name).parts[0]
            view = views[own[0]]
            if not isinstance(view, Tensor):
                if slots[own[0]].counts:
                    self._factors.setdefault(part, []).append((view, slots[own[0]]))
                    of_factors.setdefault(part, []).append(number)
                    number += 1
                continue
            layout, base = home(own[0])
            tensors = [multiplied_out(views[i]) for i in own]
            with gradients.memory.viewing(view):
                tensors = layout.joined(counted(tensors, [slots[i] for i in own]), base)
            self._tensors.setdefault(part, []).extend(tensors)
            order.setdefault(part, []).extend(range(number, number + len(tensors)))
            number += len(tensors)
        parts = sorted({*order, *of_factors})
        numbers = [i for part in parts for i in (*order.get(part, ()), *of_factors.get(part, ()))]
        self._order = torch.tensor(numbers).argsort()

    def add(self, part: int) -> None:
        """Compute the squares of a segment whose gradients are reduced over replicas.

        Collectives: for part 0, one all-reduce over tp if its ranks share rows.
        """
        if part == 0:
            reduce_shared_gradients(self._views, self._tp)
        found = []
        if part in self._tensors or part not in self._factors:
            found.append(sums_of_squares(self._tensors.get(part, ()), self._backend))
        for gradient, slot in self._factors.get(part, ()):
            own = counted([gradient.multiplied_out()], [slot])
            found.append(sums_of_squares(own, self._backend).sum().view(1))
        self._sums[part] = torch.cat(found)

    def total(self) -> Tensor:
        """Return the sum of all squares, including segments that were not added, as a float64
        scalar; forget what was added.

        Collectives: as `add`.
        """
        for part in sorted({0, *self._tensors, *self._factors} - self._sums.keys()):
            self.add(part)
        sums = [self._sums[part] for part in sorted(self._sums)]
        self._sums = {}
        if len(sums) == 1 and not self._factors:
            return sums[0].sum()
        found = torch.cat(sums)
        return found[self._order.to(found.device)].sum()
