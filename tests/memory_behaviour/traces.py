"""Traces made up for tests: what a rank of a pipeline does with its memory, along the actions of a
real schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from hybridpar.memory_behaviour.events import MemoryEvent, Span, What
from hybridpar.memory_behaviour.recording.recorder import Recorder
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import PER_BATCH, Kind
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.schedule_table import find_schedule

KEPT = {
    "norm": 16,
    "qkv": 48,
    "attention": 16,
    "stats": 1,
    "sum": 16,
    "ffn": 64,
    "gelu": 64,
    "mask": 5,
}
"""Memory that a layer keeps for its backward, in sixteenths of an activation."""


@dataclass
class Rank:
    """A rank of a pipeline. unit: bytes of a sixteenth of an activation. recompute: layers keep
    their input alone."""

    schedule: str = "interleaved"
    sizes: PipelineShape = field(default_factory=lambda: PipelineShape(4, 8, 2))
    rank: int = 0
    num_layers: int = 3
    unit: int = 70_000
    recompute: bool = False
    split: bool = False
    num_batches: int = 2

    def __post_init__(self) -> None:
        self.events: list[MemoryEvent] = []
        self.sizes_of: dict[int, int] = {}
        self.clock = 0.0
        self.count = 0
        self.layer = -1
        self.held: dict[tuple[str, int, int], list[int]] = {}

    def new(self, units: int, op: str, name: str = "") -> int:
        block = self.count
        self.count = self.count + 1
        self.sizes_of[block] = units * self.unit
        self._add(What.MALLOC, block, "" if name else op, name)
        if not name:
            self._add(What.WRITE, block, op)
        return block

    def read(self, *blocks: int, op: str = "aten::mm") -> None:
        for block in blocks:
            self._add(What.READ, block, op)

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self._add(What.FREE, block, "")
            del self.sizes_of[block]

    def _add(self, what: What, block: int, op: str, name: str = "") -> None:
        self.clock += 1e-4
        self.events.append(
            MemoryEvent(what, block, self.sizes_of[block], op, self.clock, self.layer, name)
        )

    def spans(self) -> Iterator[Span]:
        """The blocks at the start, then one span for each action."""
        stages = self.sizes.stages_of(self.rank)
        self.state = {
            (name, stage): self.new(12 * 16 * self.num_layers, "", name)
            for stage in stages
            for name in ("weights 0", "gradients 0", "optimizer 0")
        }
        yield self._span(1, "", 0.0)
        for action in lower(
            find_schedule(self.schedule).with_options(split=self.split),
            self.sizes,
            self.rank,
            0,
            self.num_batches,
        ):
            start = self.clock
            self.act(action)
            batch = (
                action.microbatch
                if action.kind in PER_BATCH
                else action.microbatch // self.sizes.num_microbatches
            )
            yield self._span(1 + batch, str(action), start)

    def _span(self, step: int, action: str, start: float) -> Span:
        span = Span(step, action, start, self.clock, self.events)
        self.events = []
        return span

    def act(self, action: Action) -> None:
        kind = action.kind
        stage = action.stage
        key = (stage, action.microbatch)
        self.layer = -1
        if kind is Kind.UPDATE:
            for stage in self.sizes.stages_of(self.rank):
                scratch = self.new(40, "aten::mul")
                self.read(
                    *(
                        self.state[name, stage]
                        for name in ("weights 0", "gradients 0", "optimizer 0")
                    )
                )
                self.free(scratch)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            self.held[(kind.value, *key)] = [self.new(16, "aten::empty")]
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            self.read(*self.held[(kind.value, *key)], op="send")
            self.free(*self.held.pop((kind.value, *key)))
        elif kind is Kind.F:
            self._forward(stage, key)
        elif kind in (Kind.B, Kind.I):
            self._backward(kind, stage, key)
        elif kind is Kind.W:
            for factor in self.held.pop(("factors", *key)):
                self.read(factor, self.state["gradients 0", stage])
                self.free(factor)

    def _layer(self) -> list[int]:
        kept = []
        for name, units in KEPT.items():
            scratch = self.new(units // 2 + 1, "aten::empty")
            kept.append(self.new(units, f"aten::{name}"))
            self.free(scratch)
        return kept

    def _forward(self, stage: int, key: tuple[int, int]) -> None:
        x = self.held.pop(("RECV_F", *key), None) or [self.new(16, "aten::embedding")]
        kept = [x]
        for layer in range(self.num_layers):
            self.layer = layer
            self.read(self.state["weights 0", stage], kept[-1][-1])
            made = self._layer()
            if self.recompute:
                self.free(*made)
                made = [self.new(16, "aten::add")]
            kept.append(made)
        self.held[("kept", *key)] = [block for made in kept for block in made]
        if stage < self.sizes.num_stages - 1:
            self.held[("SEND_F", *key)] = [self.new(16, "aten::add")]

    def _backward(self, kind: Kind, stage: int, key: tuple[int, int]) -> None:
        kept = self.held.pop(("kept", *key))
        gradient = self.held.pop(("RECV_B", *key), None) or [self.new(16, "aten::loss")]
        factors = []
        per_layer = 1 if self.recompute else len(KEPT)
        for layer in reversed(range(self.num_layers)):
            self.layer = layer
            mine = kept[-per_layer:]
            kept = kept[:-per_layer]
            made = self._layer() if self.recompute else []
            for block in reversed(made or mine):
                wide = self.new(self.sizes_of[block] // self.unit, "aten::mm")
                self.read(block, self.state["weights 0", stage], *gradient)
                if kind is Kind.B:
                    self.read(self.state["gradients 0", stage])
                elif self.sizes_of[block] == 16 * self.unit:
                    factors.append(self.new(16, "aten::mm"))
                self.free(block, wide)
            if made:
                self.free(*mine)
            self.free(*gradient)
            gradient = [self.new(16, "aten::mm")]
        self.free(*kept, *gradient)
        if kind is Kind.I:
            self.held[("factors", *key)] = factors
        if stage:
            self.held[("SEND_B", *key)] = [self.new(16, "aten::mm")]


def random_spans(random: Random, num_steps: int, *, num_actions: int = 4) -> Iterator[Span]:
    """Blocks made, used and freed at random, some for ever, with equal times among them."""
    living: dict[int, int] = {}
    clock = 0.0
    count = 0
    for step in range(1, num_steps + 1):
        for number in range(num_actions):
            start = clock
            events = []
            for _ in range(random.randrange(8)):
                clock += random.choice((0.0, 1e-6, 1e-3, 0.5))
                what = random.choice(list(What)) if living else What.MALLOC
                block = count if what is What.MALLOC else random.choice(list(living))
                if what is What.MALLOC:
                    living[block], count = random.choice((0, 1, 512, 4096, 10_000)), count + 1
                events.append(
                    MemoryEvent(
                        what,
                        block,
                        living[block],
                        "aten::add",
                        clock,
                        random.randrange(-1, 3),
                        random.choice(("", "", "weights 0")) if what is What.MALLOC else "",
                    )
                )
                if what is What.FREE:
                    del living[block]
            kind = random.choice(("F", "B", "UPDATE", "RECV_F"))
            yield Span(step, f"{kind}{step * num_actions + number}@0", start, clock, events)


def recording() -> tuple[list[Span], Recorder]:
    """A recorder, and the spans that it hands over."""
    spans: list[Span] = []
    return spans, Recorder(spans.append)


def events(spans: list[Span]) -> list[MemoryEvent]:
    """All events in order."""
    return [event for span in spans for event in span.events]
