"""Traces made by hand: what a rank of a small pipeline does with its blocks, the same in every
step."""

from __future__ import annotations

from collections import defaultdict

from hybridpar.memory_behaviour.events import Header, MemoryEvent, Span, What
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.schedule_table import PipelineShape

KIB = 2**10
TAKES = {Kind.F: 0.010, Kind.B: 0.020, Kind.UPDATE: 0.005}
"""Seconds of an action; all others take none."""
HEADER = Header(rank=1, device="cpu", place={"pp": 1, "dp": 0, "tp": 0})


class _Writer:
    """Blocks and events in the order in which they are made; an event lasts a hundredth of a
    millisecond."""

    def __init__(self) -> None:
        self.blocks = 0
        self.sizes = {}
        self.events = []
        self.now = 0.0

    def __call__(
        self, what: What, block: int, op: str = "", layer: int = -1, name: str = ""
    ) -> None:
        self.now += 1e-5
        self.events.append(MemoryEvent(what, block, self.sizes[block], op, self.now, layer, name))

    def make(self, num_bytes: int, op: str, layer: int = -1, name: str = "") -> int:
        block = self.blocks
        self.blocks = self.blocks + 1
        self.sizes[block] = num_bytes
        self(What.MALLOC, block, op, layer, name)
        if not name:
            self(What.WRITE, block, op, layer)
        return block

    def span(self, step: int, action: Action | None) -> Span:
        start = self.events[0].time - 1e-5 if self.events else self.now
        self.now = max(self.now, start + (TAKES.get(action.kind, 0.0) if action else 0.0))
        events = self.events
        self.events = []
        return Span(step, str(action or ""), start, self.now, events)


def trace(
    steps: int = 2,
    *,
    layers: int = 3,
    schedule: str = "1f1b",
    ranks: int = 2,
    rank: int = 1,
    unit: int = 256 * KIB,
) -> list[Span]:
    """A rank with so many layers, 4 micro-batches a step. A layer keeps 2 units of one and has
    temporaries of 3.

    Weights and gradients have 4 units a layer, the optimizer's state 8.
    """
    sizes = PipelineShape(ranks, 4)
    write = _Writer()
    weights, gradients, moments = (
        write.make(n * unit * layers, "", name=name)
        for n, name in ((4, "weights 0"), (4, "gradients 0"), (8, "optimizer 0"))
    )
    spans = [write.span(1, None)]
    kept: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for action in lower(schedule, sizes, rank, 0, steps):
        m = action.microbatch
        if action.kind is Kind.F:
            for layer in range(layers):
                write(What.READ, weights, "aten::mm", layer)
                temporary = write.make(3 * unit, "aten::mm", layer)
                kept[m].append((write.make(2 * unit, "aten::gelu", layer), layer))
                write(What.READ, temporary, "aten::gelu", layer)
                write(What.FREE, temporary)
        elif action.kind is Kind.B:
            for block, layer in reversed(kept.pop(m)):
                write(What.READ, weights, "aten::mm", layer)
                write(What.READ, block, "aten::gelu_backward", layer)
                write(What.WRITE, gradients, "aten::addmm_", layer)
                small = write.make(KIB, "aten::sum", layer)
                write(What.FREE, small)
                write(What.FREE, block)
        elif action.kind is Kind.UPDATE:
            for block in (gradients, moments):
                write(What.READ, block, "hybridpar::adamw")
            for block in (moments, weights):
                write(What.WRITE, block, "hybridpar::adamw")
        step = (
            m
            if action.kind in (Kind.REDUCE, Kind.NORM, Kind.UPDATE)
            else m // sizes.num_microbatches
        ) + 1
        spans.append(write.span(step, action))
    return spans


__all__ = ["HEADER", "KIB", "TAKES", "trace"]
