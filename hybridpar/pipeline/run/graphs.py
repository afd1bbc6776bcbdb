"""Micro-batches of a one-stage pipeline as CUDA graphs: to launch a thousand small kernels takes a CPU longer than to
run them takes a GPU.

    first micro-batch of a kind     runs as usual: kernels are compiled, libraries set up
    second                          F, then B are recorded, and replayed
    all later ones                  inputs, and what dropout counts by, are copied into place, F and B replayed

Sums of gradients over replicas go on beside the last backward of a batch: where a bucket of gradients is final, the
graph records an event, and the bucket's sum begins behind that, not behind the whole graph.

Micro-batches are of one kind if they run on the same buffer of weights and write the same buffer of gradients, where
they both are the first of their batches, which overwrite, or both are not. All kinds share memory: only one is between
its F and its B at any time. Everything runs on a stream of its own, as torch's recorded kernels must.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.config import Config, ModelConfig
from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.pipeline.run.stage import Stage
from hybridpar.random import RandomKey

_log = logging.getLogger(__name__)


class Gradients(Protocol):
    """The gradients that a backward pass writes: see state.GradientAccumulator."""

    on_final: Callable[[str], None] | None

    def buffer_index(self, batch: int) -> int: ...
    def missing(self, index: int) -> set[str]: ...


Kind = tuple[int, int, bool]
Buckets = Sequence[Collection[str]]


def recorder(config: Config, stage: Stage, gradients: Gradients, device: torch.device,
             buckets: Buckets) -> MicroBatchGraphs | None:
    """Recorder of a job's micro-batches on a GPU; None, and a line in the log, where they cannot be recorded."""
    if reason := unsupported(config):
        _log.info("micro-batches run without CUDA graphs: %s", reason)
        return None
    return MicroBatchGraphs(stage, gradients, config.pipeline.num_microbatches, device, buckets)


def unsupported(config: Config) -> str | None:
    """Why micro-batches of such a job cannot be recorded; None if they can."""
    parallel = config.parallel
    if parallel.pp > 1 or config.pipeline.num_chunks > 1:
        return "stages wait for each other between a micro-batch's kernels"
    if parallel.tp > 1:
        return "ranks of tensor parallelism wait for each other between a micro-batch's kernels"
    if config.memory.budget or config.memory.num_away not in (0, (0,)):
        return "memory that leaves comes back elsewhere"
    if config.pipeline.split_backward:
        return "pipeline.split_backward computes the gradients of weights apart"
    if config.compression.gradients == "sbpca":
        return "compression.gradients = sbpca keeps what the gradients of weights are computed from"
    if not isinstance(config.model, ModelConfig):
        return f"what {config.model.kind} does between kernels is not known"
    return None


@dataclass
class _Recorded:
    inputs: dict[str, Tensor]
    key: RandomKey | None
    forward: torch.cuda.CUDAGraph
    losses: Losses
    edge: GradientEdge | None
    start: Tensor  # of the backward
    backward: torch.cuda.CUDAGraph | None = None
    missing: frozenset[str] = frozenset()  # parameters without a gradient before this backward
    written: frozenset[str] = frozenset()
    reported: list[tuple[str, torch.cuda.Event | None]] = field(default_factory=list)

    def take(self, batch: MicroBatch, key: RandomKey | None) -> None:
        for name, x in batch.items():
            self.inputs[name].copy_(x)
        if self.key is not None:
            assert key is not None
            self.key.counter.copy_(key.counter)


class MicroBatchGraphs:
    """Runs the forward and backward passes of `stage`, which holds the whole model, into `gradients`.

    buckets: parameters by what is summed over replicas at once, where that may begin before a backward is over.
    """

    def __init__(self, stage: Stage, gradients: Gradients, num_microbatches: int, device: torch.device,
                 buckets: Buckets = ()):
        self._stage, self._gradients, self._m, self._buckets = stage, gradients, num_microbatches, buckets
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)  # where sums begin
        self._seen: dict[Kind, _Recorded | None] = {}
        self._current: tuple[int, _Recorded] | None = None
        self._works = True
        self.num_replayed = 0
        """Micro-batches so far."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Context in which work runs after all that came before, and before all that comes after."""
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def forward(self, number: int, slot: int, batch: MicroBatch, key: RandomKey | None) -> Losses | None:
        """The losses of a micro-batch on the weights that are bound, those of buffer `slot`; None: it is not replayed.

        `number` counts micro-batches. Only one is between its passes at any time: others meanwhile are not replayed.
        """
        kind = self._kind(number, slot)
        if not self._works or self._current is not None:
            return None
        if kind not in self._seen:
            self._seen[kind] = None
            return None
        if (recorded := self._seen[kind]) is None:
            try:
                recorded = self._seen[kind] = self._record_forward(batch, key)
            except RuntimeError as error:
                self._give_up(error)
                return None
        elif any(x.shape != recorded.inputs[name].shape for name, x in batch.items()):
            return None
        else:
            recorded.take(batch, key)
        recorded.forward.replay()
        self._current = number, recorded
        return {name: loss.clone() for name, loss in recorded.losses.items()}

    def backward(self, number: int, factor: float) -> bool:
        """The backward pass of a micro-batch, from `factor`; False: its forward pass was not replayed."""
        if self._current is None or self._current[0] != number:
            return False
        (_, recorded), self._current = self._current, None
        buffer = self._gradients.buffer_index(number // self._m)
        missing = frozenset(self._gradients.missing(buffer))
        recorded.start.fill_(factor)
        if recorded.backward is None:
            try:
                self._record_backward(recorded, buffer)
            except RuntimeError as error:
                self._give_up(error)
                self._gradients.missing(buffer).update(missing)
                self._run_again(recorded)
                return True
            recorded.missing, recorded.written = missing, missing - self._gradients.missing(buffer)
        assert recorded.backward is not None
        assert missing == recorded.missing, "another micro-batch of this kind began with other gradients missing"
        recorded.backward.replay()
        self.num_replayed += 1
        self._gradients.missing(buffer).difference_update(recorded.written)
        if (on_final := self._gradients.on_final) is not None:
            with torch.cuda.stream(self._beside) if self._buckets else nullcontext():
                for name, event in recorded.reported:
                    if event is not None:
                        self._beside.wait_event(event)
                    on_final(name)
        return True

    def _kind(self, number: int, slot: int) -> Kind:
        return slot, self._gradients.buffer_index(number // self._m), number % self._m == 0

    def _record_forward(self, batch: MicroBatch, key: RandomKey | None) -> _Recorded:
        inputs = {name: x.clone() for name, x in batch.items()}
        key = None if key is None else RandomKey(key.seed, key.counter.clone())
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph):
            losses, total = self._run(inputs, key)
        losses = {name: loss.detach() for name, loss in losses.items()}
        return _Recorded(inputs, key, graph, losses, get_gradient_edge(total), torch.empty_like(total))

    def _record_backward(self, recorded: _Recorded, buffer: int) -> None:
        edge, on_final, graph = recorded.edge, self._gradients.on_final, torch.cuda.CUDAGraph()
        assert edge is not None
        recorded.edge = None  # what it keeps is the recording's from now on
        left = {name: names for names in map(set, self._buckets) for name in names}

        def report(name: str) -> None:
            event = None
            if name in left:
                left[name].remove(name)
                if not left[name]:
                    event = torch.cuda.Event(external=True)
                    event.record()
            recorded.reported.append((name, event))

        self._gradients.on_final = report
        try:
            with self._recording(graph):
                backward_from(edge, recorded.start)
        finally:
            self._gradients.on_final = on_final
        recorded.backward = graph
        _log.debug("recorded a micro-batch as CUDA graphs")

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # other threads, which may be saving, go on
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _give_up(self, error: RuntimeError) -> None:
        self._works = False
        torch.cuda.synchronize(self._stream.device)
        _log.warning("micro-batches run without CUDA graphs, as one could not be recorded: %s",
                     str(error).splitlines()[0])

    def _run_again(self, recorded: _Recorded) -> None:
        _, total = self._run(recorded.inputs, recorded.key)
        backward_from(get_gradient_edge(total), recorded.start)

    def _run(self, inputs: MicroBatch, key: RandomKey | None) -> tuple[Losses, Tensor]:
        losses = self._stage(None, inputs, key)
        assert isinstance(losses, dict)
        total = sum(losses.values())
        assert isinstance(total, Tensor)
        return losses, total
