"""The squared norm of a rank's gradients, segment by segment as they become final."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hybridpar.grid import Axis
from hybridpar.nn.placement import reduce_shared_gradients
from hybridpar.optim import ParameterSlot
from hybridpar.optim.norm import counted, sums_of_squares
from hybridpar.state.layout import FlatLayout
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, BufferUsage, block_of
from hybridpar.state.residency.shares import Shares
from hybridpar.state.residency.uses import layout_run


class Squares:
    """Sums of squares of the gradients that this rank counts: `views` of a buffer or of its shards,
    one for each slot.

    They are added block by block in one order, so a stage has equal bits however it is cut into
    segments.
    """

    def __init__(
        self,
        gradients: Buffer | Shares,
        partition: Partition,
        slots: Sequence[ParameterSlot],
        views: Sequence[Tensor],
        tp: Axis,
        backend: str,
    ):
        self._tp = tp
        self._backend = backend
        self._views = [(view, slot.placement) for view, slot in zip(views, slots, strict=True)]
        self._tensors: dict[int, list[Tensor]] = {}  # by part
        self._sums: dict[int, Tensor] = {}  # the same, of those that are known
        order: dict[int, list[int]] = {}
        starts = [owned.start for owned in partition.owned]
        number = 0
        uses = partition.uses

        def run(i: int) -> object:
            return block_of(slots[i].name), layout_run(slots[i].placement), uses(slots[i].name)

        for _, members in groupby(range(len(slots)), run):
            own = list(members)
            use = uses(slots[own[0]].name)
            start = starts[own[0]]
            part = use.parts[0]
            layout, base = _home(gradients, use, start)
            with gradients.memory.viewing(views[own[0]]):
                tensors = layout.joined(
                    counted([views[i] for i in own], [slots[i] for i in own]), base
                )
            self._tensors.setdefault(part, []).extend(tensors)
            order.setdefault(part, []).extend(range(number, number + len(tensors)))
            number += len(tensors)
        self._order = torch.tensor([i for part in sorted(order) for i in order[part]]).argsort()

    def add(self, part: int) -> None:
        """Compute the squares of a segment whose gradients are reduced over replicas.

        Collectives: for part 0, one all-reduce over tp if its ranks share rows.
        """
        if part == 0:
            reduce_shared_gradients(self._views, self._tp)
        self._sums[part] = sums_of_squares(self._tensors.get(part, ()), self._backend)

    def total(self) -> Tensor:
        """Return the sum of all squares, including segments that were not added, as a float64
        scalar; forget what was added.

        Collectives: as `add`.
        """
        for part in sorted({0, *self._tensors} - self._sums.keys()):
            self.add(part)
        sums = [self._sums[part] for part in sorted(self._sums)]
        self._sums = {}
        if len(sums) == 1:
            return sums[0].sum()
        found = torch.cat(sums)
        return found[self._order.to(found.device)].sum()


def _home(gradients: Buffer | Shares, use: BufferUsage, start: int) -> tuple[FlatLayout, int]:
    """Return the layout of gradients of a use, and the element at which their memory starts. start:
    offset of one of them in the flat buffer.
    """
    if isinstance(gradients, Shares):
        if gradients.has(use):
            return gradients.buffer.layout, gradients.base(use)
        gradients = gradients.whole
    return gradients.layout, max(
        c.start for c in gradients.chunks if c.use == use and c.start <= start <= c.stop
    )
