"""Planned memory of a run (train.planned_memory): when it is recorded and planned, and what became
of it.

A rank's steady state is a cycle of actions: a step, or as many steps as it takes until
micro-batches in flight lie as before. Two cycles are recorded once it is reached; then there is a
plan, which holds to the end of the run. Each action enters it at its own place, so what departs in
one costs nothing in the next, and a pipeline that fills has places, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path

import torch

from hybridpar.config import Config
from hybridpar.errors import ConfigError
from hybridpar.memory.arena import blocks_of, plan
from hybridpar.memory.events import Span, What
from hybridpar.memory.fragmentation import replay
from hybridpar.memory.planned import Allocator, Counts, CycleError, plan_cycle
from hybridpar.memory.predict import batches_to_peak
from hybridpar.pipeline.plan.action import PER_BATCH, PER_ITEM, Action
from hybridpar.train.engine import Engine
from hybridpar.train.folder import MEMORY
from hybridpar.train.launch import give_back_freed_memory
from hybridpar.train.memory_trace import predict_trace

_MOST_TRIES = 3
_MOST_STEPS = 8
"""Steps of a cycle at most; blocks of a longer one have places that are taken now and then."""


class PlannedMemory:
    """Plans the memory of an engine's training, whatever the number of stretches.

        planned = PlannedMemory(engine, say)
        with planned.active():
            engine.train(...)
        planned.close()

    `say`: told once there is a plan, or why there is none.
    """

    def __init__(self, engine: Engine, say: Callable[[str], None]):
        self._engine = engine
        self._say = say
        device = engine.device
        self._allocator = (
            Allocator.of_cpu()
            if device.type == "cpu"
            else Allocator.of_cuda(device.index or 0, torch.cuda.current_stream(device).cuda_stream)
        )
        self._allocator.forget()
        schedule = engine.schedule
        sizes = engine.sizes
        rank = engine.grid.pp.rank
        held = 1 if schedule.flush else schedule.max_live_activations(sizes, rank)
        steps = held // gcd(held, sizes.num_microbatches * sizes.chunks)
        self._steps = steps if steps <= _MOST_STEPS else 1
        self._wait = max(batches_to_peak(engine.config), 2)
        self._spans: dict[Hashable, int] = {}
        self._key: Hashable = None
        self._item = self._first = self._cycles = self._tries = 0
        self._is_recording = self._is_planned = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Plans while in it, or records. Nothing is in flight at both ends."""
        self._first = max(self._engine.batches_done, self._engine.schedule.sync_steps)
        listeners = self._engine.executor.listeners
        listeners.append(self._turn_to)
        try:
            yield
        finally:
            listeners.remove(self._turn_to)
            self._allocator.turn_to(-1)
            self._stop_recording()

    @property
    def counts(self) -> Counts:
        """What became of the requests since the plan was made."""
        return self._allocator.counts()

    def close(self, folder: Path | None = None) -> None:
        """Ends the plan. `folder`: a run's, where the counts are written down."""
        if folder is not None and self._is_planned:
            path = folder / MEMORY / f"planned{self._engine.grid.rank}.json"
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(asdict(self.counts)))
            except OSError as error:
                self._say(f"{path}: cannot be written ({error.strerror or error})")
        self._allocator.forget()

    def _turn_to(self, action: Action | None) -> None:
        if action is None:
            self._allocator.turn_to(-1)
            return
        key = self._place(action)
        if not self._is_planned and self._tries < _MOST_TRIES:
            self._record(key)
        self._allocator.turn_to(self._spans.get(key, -1))

    def _place(self, action: Action) -> Hashable:
        """The action's place in the cycle; of what moves items, that behind the action before
        it."""
        if action.kind in PER_ITEM:
            self._item += 1
            return self._key, self._item
        number = self._steps * (
            1 if action.kind in PER_BATCH else self._engine.sizes.num_microbatches
        )
        self._key = (action.kind, action.stage, action.microbatch % number, action.part)
        self._item = 0
        return self._key

    def _record(self, key: Hashable) -> None:
        if not self._is_recording:
            if self._engine.batches_done - self._first < self._wait:
                return
            self._is_recording = True
            self._allocator.record(True)
        if self._spans.setdefault(key, len(self._spans)) == 0:
            self._cycles += 1
            if self._cycles == 3:
                self._plan()

    def _plan(self) -> None:
        events = self._allocator.events()
        self._allocator.record(False)
        self._is_recording = False
        self._cycles = 0
        try:
            cycle = plan_cycle(events)
        except CycleError as error:
            self._spans = {}
            self._tries = self._tries + 1
            if self._tries == _MOST_TRIES:
                self._say(f"memory is not planned: {error}")
            return
        give_back_freed_memory()
        self._is_planned = self._allocator.plan(cycle)
        if not self._is_planned:
            self._tries = _MOST_TRIES
            self._say(
                f"memory is not planned: there are no {cycle.arena.num_bytes:,} bytes for the arena"
            )
            return
        steps = f"{self._steps} steps" if self._steps > 1 else "a step"
        self._say(
            f"memory is planned from step {self._engine.batches_done + 1} on: {len(cycle.sizes):,} "
            "blocks of "
            f"{steps} in {cycle.arena.num_bytes / 2**20:,.1f} MiB, "
            f"{cycle.arena.num_bytes / max(cycle.arena.bound, 1):.3f} of what is alive at once"
        )

    def _stop_recording(self) -> None:
        if self._is_recording:
            self._allocator.record(False)
            self._is_recording = False
            self._cycles = 0
            self._spans = {}


@dataclass(frozen=True)
class PlannedForecast:
    """What a plan makes of a rank's blocks, besides its state. Units: bytes.

    arena: of the plan. largest_live: of the blocks that are alive at once. reserved: by a modelled
    caching allocator.
    """

    rank: int
    arena: int
    largest_live: int
    reserved: int

    def __str__(self) -> str:
        live = max(self.largest_live, 1)
        mib = 2**20
        return (
            f"planned memory: on rank {self.rank} an arena of {self.arena / mib:,.1f} MiB has all "
            "blocks of a "
            f"step, {self.arena / live:.3f} of what is alive at once; a caching allocator would "
            "take "
            f"{self.reserved / mib:,.1f} MiB ({self.reserved / live:.3f})"
        )


def forecast_planned(config: Config, rank: int) -> PlannedForecast | None:
    """What train.planned_memory would make of a rank of the grid, by its predicted events; None
    where there are none.

    `config`: resolved.
    """
    if not config.train.planned_memory:
        return None
    try:
        spans = list(_passing(predict_trace(config, rank, steps=4)[1]))
    except ConfigError:  # it has no predicted events
        return None
    arena = plan(blocks_of(spans))
    usage = replay(event for span in spans for event in span.events)
    return PlannedForecast(rank, arena.num_bytes, usage.largest_live, usage.reserved)


def _passing(spans: Iterable[Span]) -> Iterator[Span]:
    """The events of blocks that training makes."""
    state: set[int] = set()
    for span in spans:
        if not span.action:
            state.update(
                event.block for event in span.events if event.what is What.MALLOC and not event.op
            )
        yield replace(span, events=[event for event in span.events if event.block not in state])


def describe(counts: list[Counts]) -> str:
    """What became of the plans of all ranks, as a line. counts: of each rank."""
    planned = [one for one in counts if one.num_bytes]
    if not planned:
        return (
            "memory was not planned: that takes more steps in a row without an evaluation or a "
            "checkpoint"
        )
    hits = sum(one.hits for one in planned)
    missed = sum(one.missed for one in planned)
    longer = sum(one.unplanned for one in planned)
    return (
        f"planned memory: {100 * hits / max(hits + missed, 1):.2f} % of {hits + missed:,} requests "
        "got their "
        f"places ({longer:,} more live too long for one), in at most "
        f"{max(one.num_bytes for one in planned) / 2**20:,.1f} MiB"
    )
