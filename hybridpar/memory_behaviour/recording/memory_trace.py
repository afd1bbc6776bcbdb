"""Memory events of training, recorded while an engine runs, or predicted by an engine on ghosts.

The prediction runs the engine's own code and schedule on tensors without memory, with simulated
neighbours. So any machine can predict what a rank of any grid would record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar import native
from hybridpar.config import Config
from hybridpar.config.compression_methods import other_gradients
from hybridpar.data.loader import Loader
from hybridpar.errors import ConfigError, config_error
from hybridpar.grid import place_of, sizes_of
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.analysis.excerpt import Times, retimed
from hybridpar.memory_behaviour.events import Header, Span
from hybridpar.memory_behaviour.recording.allocator_history import compare
from hybridpar.memory_behaviour.recording.extended_trace import NotAlikeError, Stretch, extend
from hybridpar.memory_behaviour.recording.recorder import HOST_CLOCK, DeviceClock, Recorder
from hybridpar.memory_behaviour.trace_file import header_line, read_trace, span_line
from hybridpar.nn.placement import partial_rows
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.prediction.footprint import sample_microbatch
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_chunks import GHOSTS, ghost_memory
from hybridpar.prediction.predict import default_device
from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.runtime.slow_tier import SlowTier
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import COMPUTE
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.proof.check import PlanError
from hybridpar.state.residency.shares import WholeChunk
from hybridpar.train.engine import Actions, Engine, Residency
from hybridpar.train.folder import MEMORY
from hybridpar.train.reporting.records import Records

Write = Callable[[Span], object]
_MOST_ENTRIES = 1_000_000
_MOST_SPANS = 256
"""Largest number of actions that are buffered while the disk is full."""


class EngineRecorder:
    """A recorder of an engine's training, over any number of `train` calls.

    recorder = EngineRecorder(engine, write)
    with recorder.active():
        engine.train(recorder.loader(loader), ...)
    recorder.close()

    Allocates the optimizer's state in the constructor. The creation of micro-batches is not
    recorded. While the recorder is open, this thread does the work of the host threads.
    """

    def __init__(self, engine: Engine, write: Write):
        self.is_open = True
        clock = (
            DeviceClock()
            if engine.device.type == "cuda" and torch.cuda.is_available()
            else HOST_CLOCK
        )
        self._recorder = Recorder(write, engine.shape.num_microbatches, clock)
        self._executor = engine.executor
        self._executor.listeners.append(self._recorder.begin)
        state = engine.state
        tp = engine.grid.tp
        state.allocate()
        self._host = state.host
        self._host.work_here(True)
        for slot in state.slots:
            partial_rows(slot.placement, tp.name, tp.rank)  # the function caches its result
        for kind in state.kinds:
            for i, tensor in enumerate(kind.memory()):
                self._recorder.adopt(f"{kind.column} {i}", [tensor])
            self._recorder.name_tensors(kind.places())
        self._told: list[tuple[list[Any], Callable[[Any], None]]] = [
            (engine.moves.accesses.memory.listeners, self._chunk_came_or_went),
            (engine.moves.activations.listeners, self._kept_came_or_went),
        ]
        for listeners, listener in self._told:
            listeners.append(listener)
        self._hooks = [
            hook
            for number, block in _blocks(engine)
            for hook in (
                block.register_forward_pre_hook(lambda *_, number=number: self._enter(number)),  # type: ignore[misc]
                block.register_forward_hook(lambda *_: self._enter(-1)),
            )
        ]

    def _chunk_came_or_went(self, chunk: WholeChunk) -> None:
        self._recorder.resized(chunk.kind.replace("/", " "), chunk.tensor)

    def _kept_came_or_went(self, content: Tensor) -> None:
        self._recorder.resized("activations", content)

    def _enter(self, layer: int) -> None:
        self._recorder.enter_layer(layer)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record inside this context, or until `close`."""
        if not self.is_open:
            yield
            return
        self._recorder.__enter__()
        try:
            yield
        finally:
            if self._recorder.is_active:
                self._recorder.__exit__(None, None, None)

    def loader(self, loader: Loader) -> Loader:
        """Wrap `loader`, so that its micro-batches are recorded by name."""
        return _Unseen(loader, self._recorder)

    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Record a message that does not go through the dispatcher."""
        self._recorder.communicate(op, reads, writes)

    def close(self) -> None:
        """End the recording, even in the middle of training; operators then run at full speed
        again."""
        if self.is_open:
            self.is_open = False
            if self._recorder.is_active:
                self._recorder.__exit__(None, None, None)
            self._executor.listeners.remove(self._recorder.begin)
            self._host.work_here(False)
            for listeners, listener in self._told:
                listeners.remove(listener)
            for hook in self._hooks:
                hook.remove()
            self._recorder.close()


def has_history(device: torch.device) -> bool:
    """Return whether torch's allocator of the device can record a history."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_allocator_backend() == "native"
    )


class AllocatorHistory:
    """The history of a GPU's caching allocator from now on, without stacks, for comparison with a
    recording."""

    def __init__(self, device: torch.device):
        self._device = device
        torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_ENTRIES)

    def compare(self, path: Path) -> str:
        """End the history, and return how far a trace agrees with it. Raises: DataError if the file
        is not a trace."""
        history = torch.cuda.memory._snapshot()["device_traces"][self._device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        if len(history) >= _MOST_ENTRIES:
            return (
                f"the allocator's history is longer than {_MOST_ENTRIES:,} entries, and was not "
                "compared"
            )
        return str(compare(read_trace(path)[1], history))


class MemoryLog:
    """The file of this rank's memory events: `train.record_memory` steps, from the first one on.

    Args:
        say: Called with a message if the file cannot be written.
    """

    def __init__(self, engine: Engine, resumed: int, say: Callable[[str], None]):
        grid = engine.grid
        config = engine.config
        self._last = resumed + config.train.record_memory
        self._name = f"rank{grid.rank}.jsonl"
        self._say = say
        self._path = config.run.folder / MEMORY / self._name
        self._records = Records(config.run.folder / MEMORY, say)
        self._records.begin(self._name, 0, most=_MOST_SPANS)
        header = Header(
            grid.rank, str(engine.device), dict(grid.place), more={"first_step": resumed + 1}
        )
        self._append(header_line(header))
        if engine.device.type == "cpu" and (reason := native.missing_recorder()):
            say(
                "memory events are recorded in Python, which takes some 20 us an operator more: "
                f"{reason}"
            )
        self._recorder = EngineRecorder(engine, lambda span: self._append(span_line(span)))
        self._history = AllocatorHistory(engine.device) if has_history(engine.device) else None
        self.loader = self._recorder.loader
        self.active = self._recorder.active

    def _append(self, line: str) -> None:
        self._records.append(self._name, line.encode())

    def after_step(self, step: int) -> None:
        """Record the end of a step; must be called after every update."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """End the recording, if it has not ended."""
        if self._recorder.is_open:
            self._recorder.close()
            self._records.close()
            if self._history is not None:
                self._say(self._history.compare(self._path))


def _blocks(engine: Engine) -> Iterator[tuple[int, nn.Module]]:
    """Yield the model's blocks on this rank, with their numbers."""
    return ((int(number), block) for number, block in engine.stage.blocks.items())


class _Unseen:
    """A loader of which only the results are recorded."""

    def __init__(self, inner: Loader, recorder: Recorder):
        self._inner = inner
        self._recorder = recorder

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        if not self._recorder.is_active:
            return self._inner.microbatch(batch, index)
        self._recorder.pause(True)
        try:
            made = self._inner.microbatch(batch, index)
        finally:
            self._recorder.pause(False)
        self._recorder.adopt("batch", made.values())
        return made

    def first_sample(self, index: int) -> int:
        return self._inner.first_sample(index)

    def num_targets(self, batch: int) -> int:
        return self._inner.num_targets(batch)


class SampleLoader:
    """A loader of equal micro-batches of full sequences."""

    def __init__(self, config: Config):
        self._sample = sample_microbatch(config)
        # the loader's source provides these
        del self._sample["num_targets"], self._sample["num_samples"]
        self._samples = config.train.micro_batch_size * config.parallel.replicas
        model = config.model
        b = config.train.micro_batch_size
        if model.text_format is not None:
            targets = int((self._sample["labels"] >= 0).sum())
        else:
            targets = sum(model.num_targets(model.sample(n, 0)) for n in range(b))
        self._targets = max(1, targets) * config.pipeline.num_microbatches
        self._num_microbatches = config.pipeline.num_microbatches

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._sample.items()}

    def first_sample(self, index: int) -> int:
        return index * self._samples

    def num_targets(self, batch: int) -> int:
        return self._targets


def predict_timed_trace(
    config: Config, rank: int, times: Times, *, steps: int = 2
) -> tuple[Header, list[Span]]:
    """Return what `predict_trace` returns, at these times (see `retimed`).

    Of batches and micro-batches that are alike only few are traced.

    Raises: ConfigError as `predict_trace`.
    """
    job = JobPlan(config)
    place = place_of(rank, sizes_of(config.parallel))["pp"]
    if (stretch := _stretch(job, place, steps)) is not None:
        pipeline = replace(config.pipeline, num_microbatches=stretch.short)
        few = replace(config, pipeline=pipeline)
        done: list[Action] = []
        # a batch that short may break a rule
        with suppress(NotAlikeError, ConfigError, PlanError):
            short = JobPlan(few)
            batches = stretch.batches[0]
            header, spans = predict_trace(few, rank, steps=batches, done=done)
            if done == list(lower(short.schedule, short.shape, place, 0, batches)):
                planned = list(lower(job.schedule, job.shape, place, 0, steps))
                return header, extend(spans, done, planned, stretch, times)
    header, spans = predict_trace(config, rank, steps=steps)
    return header, list(retimed(spans, times))


def _stretch(job: JobPlan, rank: int, steps: int) -> Stretch | None:
    """Return how many batches and micro-batches of a pipeline rank show all that the others do;
    None if all of them are traced.
    """
    shape = job.shape
    m = shape.num_microbatches
    ahead = job.schedule.warmup(shape, rank)
    moves = job.config.memory.is_limited or job.state_policy(1, 1).moves or job.num_away(rank)
    if moves or job.options.sync_steps or job.schedule.order:
        return None
    edge = (ahead if ahead < m else 0) + job.send_window + _BESIDE
    found = Stretch.to(m, edge, shape.num_ranks if shape.virtual_stages > 1 else 1)
    # so that a batch leaves no sends unfinished but its own
    if job.schedule.flush and steps > _BATCHES and m >= job.send_window:
        return replace(found or Stretch(m, m, m, 1), batches=(_BATCHES, steps))
    return found and replace(found, batches=(steps, steps))


_BATCHES = 3
"""Batches of a trace that shows all: the first one, one in between, and the last one."""
_BESIDE = 2
"""Micro-batches at the ends of a batch that are unlike the others beside the warm-up: receives are
posted ahead, and the first and the last micro-batch find and leave other gradients."""


def predict_trace(
    config: Config, rank: int = 0, *, steps: int = 2, done: list[Action] | None = None
) -> tuple[Header, list[Span]]:
    """Return the memory events of the first steps of training on a rank of the configuration's
    grid, without computing anything.

    Times have no meaning (see analysis.excerpt.retimed). With memory.limit or memory.budget all state is resident.

    Args:
        config: A resolved configuration; this machine need not have its device.
        rank: The rank.
        steps: Number of steps.
        done: Receives the actions that the rank runs.

    Raises:
        ConfigError: compression.gradients is a method whose operators depend on computed values.
    """
    if config.compression.depends_on_values:
        raise config_error(
            "compression.gradients",
            config.compression.gradients,
            "not supported: its memory events depend on the values of gradients. Record a run "
            "instead (train.record_memory); `hybridpar check` predicts the peak",
            other_gradients(lambda row: not row.depends_on_values),
        )
    device = default_device(config)
    config = replace(config, train=replace(config.train, cuda_graphs=False))
    spans: list[Span] = []
    recorder: EngineRecorder | None = None

    def note(op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        if recorder is not None:
            recorder.communicate(op, reads, writes)

    grid = silent_grid(config, rank, note)
    loader = SampleLoader(config)
    with Tracker(device) as tracker:

        def watched(actions: Actions) -> Actions:
            for action in actions:
                # these actions read the values of integers only in the micro-batch
                tracker.make_ghosts_of_integers(action.kind in COMPUTE)
                if done is not None:
                    done.append(action)
                yield action

        job = JobPlan(config)
        states = job.state_policy(1, 1)
        memory = ghost_memory(states, tracker.device, stays=True)
        tier = SlowTier() if job.num_away(grid.pp.rank) else None
        residency = Residency(memory, offloader=ActivationOffloader(tier, GHOSTS))
        engine = Engine(job, grid, tracker.device, wrap_plan=watched, residency=residency)
        recorder = EngineRecorder(engine, spans.append)
        with recorder.active():
            engine.train(recorder.loader(loader), steps, lambda result: None)
        recorder.close()
    return Header(rank, str(device), dict(grid.place), predicted=True), spans
