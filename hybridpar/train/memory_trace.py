"""Memory events of training, recorded while an engine runs, or predicted by an engine that runs on ghosts.

The prediction is the engine's own code, schedule and all, on tensors without memory, with neighbours that are silent.
So it is what a rank of any grid would record, on whatever machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.memory.events import Header, Span
from hybridpar.memory.footprint import sample_microbatch
from hybridpar.memory.ghost import Tracker
from hybridpar.memory.predict import default_device
from hybridpar.memory.recorder import Recorder
from hybridpar.memory.silent import silent_grid
from hybridpar.train.engine import Engine

Write = Callable[[Span], object]


class EngineRecorder:
    """Records what an engine's training does to memory, whatever the number of stretches.

        recorder = EngineRecorder(engine, write)
        with recorder.active():
            engine.train(recorder.loader(loader), ...)
        recorder.close()

    Takes the memory of the optimizer's state now. Micro-batches are made unseen.
    """

    def __init__(self, engine: Engine, write: Write):
        self._recorder = Recorder(write, lambda: engine.executor.current, engine.sizes.num_microbatches)
        engine.state.allocate()
        for kind in engine.state.kinds:
            for i, tensor in enumerate(kind.memory()):
                self._recorder.adopt(f"{kind.column} {i}", [tensor])
        self._hooks = [hook for number, block in _blocks(engine) for hook in (
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number)),  # type: ignore[misc]
            block.register_forward_hook(lambda *_: self._enter(-1)))]

    def _enter(self, layer: int) -> None:
        self._recorder.layer = layer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Records while in it; ends early where `close` is called."""
        with self._recorder:
            yield

    def loader(self, loader: Loader) -> Loader:
        """`loader`, whose micro-batches are told by name."""
        return _Unseen(loader, self._recorder)

    def communicate(self, op: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A message that dispatch does not see."""
        self._recorder.communicate(op, reads, writes)

    def close(self) -> None:
        """Ends the recording; operators cost what they did before."""
        for hook in self._hooks:
            hook.remove()
        self._recorder.close()


def _blocks(engine: Engine) -> Iterator[tuple[int, nn.Module]]:
    """The model's blocks on this rank, with their numbers."""
    return ((int(number), block) for number, block in engine.stage.blocks.items())


class _Unseen:
    """A loader of which only the results are recorded."""

    def __init__(self, inner: Loader, recorder: Recorder):
        self._inner, self._recorder = inner, recorder

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        self._recorder.paused = True
        try:
            made = self._inner.microbatch(batch, index)
        finally:
            self._recorder.paused = False
        self._recorder.adopt("batch", made.values())
        return made

    def first_sample(self, index: int) -> int:
        return self._inner.first_sample(index)

    def num_targets(self, batch: int) -> int:
        return self._inner.num_targets(batch)


class SampleLoader:
    """Micro-batches of full sequences, all alike."""

    def __init__(self, config: Config):
        self._sample = sample_microbatch(config)
        self._samples = config.train.micro_batch_size * config.parallel.dp
        self._targets = max(1, int((self._sample["labels"] >= 0).sum())) * config.pipeline.num_microbatches
        self._num_microbatches = config.pipeline.num_microbatches

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._sample.items()}

    def first_sample(self, index: int) -> int:
        return index * self._samples

    def num_targets(self, batch: int) -> int:
        return self._targets


def predict_trace(config: Config, rank: int = 0, *, steps: int = 2,
                  device: torch.device | None = None) -> tuple[Header, list[Span]]:
    """The memory events of the first steps of training on a rank of the configuration's grid. Nothing is computed.

    `config`: resolved. `device`: need not be on this machine; None: the one that the configuration names.
    """
    device = device or default_device(config)
    config = replace(config, train=replace(config.train, cuda_graphs=False))
    spans: list[Span] = []
    recorder: EngineRecorder | None = None

    def note(op: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        if recorder is not None:
            recorder.communicate(op, reads, writes)

    grid, loader = silent_grid(config, rank, note), SampleLoader(config)
    with Tracker(device) as tracker:
        engine = Engine(config, grid, tracker.device)
        recorder = EngineRecorder(engine, spans.append)
        with recorder.active():
            tracker.ghost_integers = True
            engine.train(recorder.loader(loader), steps, lambda result: None)
        recorder.close()
    return Header(rank, str(device), dict(grid.place), predicted=True), spans
