"""Runs micro-batches as CUDA graphs: a CPU takes longer to launch a thousand small kernels than a GPU to run them.

    first micro-batch of a kind     runs as usual: kernels are compiled, libraries set up
    second                          F, then B are recorded, and replayed
    all later ones                  inputs and dropout's counters are copied into place, F and B replayed

Gradients are summed over replicas beside the last backward of a batch: where a bucket of gradients is final, the graph
records an event, and the bucket's sum waits for that, not for the whole graph.

Micro-batches are of one kind if they run on the same buffer of weights and write the same buffer of gradients, and
both or neither are the first of their batch, which overwrites. Only one micro-batch at a time is between its F and its
B, so all kinds share memory. In a pipeline several are: each then has a place, with memory and graphs of its own.
Graphs run on a stream of their own, as torch needs. Communication of tensor parallelism is recorded, too.

A capture does not wait for the device (see capture.py). If one fails, its cause is logged, and this rank runs kernel by
kernel from then on, to the same numbers. Stages may differ in that, since transfers between them are in no graph. Ranks
of tp may not, as NCCL wants a collective captured on all ranks or on none: they agree on every capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.comm import all_reduce
from hybridpar.config import Config, ModelConfig
from hybridpar.grid import Axis, Traffic
from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.pipeline.plan.offload import num_away
from hybridpar.pipeline.plan.schedules import Sizes, schedule_of
from hybridpar.pipeline.run.capture import capture, first_cause
from hybridpar.pipeline.run.stage import Stage
from hybridpar.random import RandomKey

_log = logging.getLogger(__name__)


class Gradients(Protocol):
    """The gradients that a backward pass writes: see state.GradientAccumulator."""

    on_final: Callable[[str], None] | None

    def buffer_index(self, batch: int) -> int: ...
    def missing(self, index: int) -> set[str]: ...
    def renew(self, index: int, names: Iterable[str]) -> None: ...


Kind = tuple[int, int, bool]
Buckets = Sequence[Collection[str]]


def recorder(config: Config, stage: Stage, gradients: Gradients, device: torch.device,
             buckets: Buckets, tp: Axis, rank: int | None = None) -> MicroBatchGraphs | None:
    """Return the recorder of a job's micro-batches on a GPU; None, and a line in the log, if they cannot be recorded.

    rank: of the pipeline.
    """
    if reason := unsupported(config, rank):
        _log.info("micro-batches run without CUDA graphs: %s", reason)
        return None
    parallel = config.parallel
    return MicroBatchGraphs(stage, gradients, config.pipeline.num_microbatches, device, buckets, parallel.pp, tp)


def unsupported(config: Config, rank: int | None = None) -> str | None:
    """Why micro-batches of such a job cannot be recorded on a rank of its pipeline; None if they can.

    rank: None: of any rank, where activations leave on one of them.
    """
    parallel = config.parallel
    if config.pipeline.num_chunks > 1:
        return "stages of a rank take turns"
    if parallel.pp * parallel.tp > 1 and not config.train.graph_grids:
        return "with pp or tp they have not run on a GPU (train.graph_grids = true tries it)"
    if parallel.tp > 1 and (config.train.share_gpus or config.compression.tensor != "none"):
        return "what tensor parallelism sends goes through the host's hands"
    if config.memory.budget or _offloads(config, rank):
        return "memory that leaves comes back elsewhere"
    if config.pipeline.split_backward:
        return "pipeline.split_backward computes the gradients of weights apart"
    if config.compression.gradients == "sbpca":
        return "compression.gradients = sbpca keeps what the gradients of weights are computed from"
    if not isinstance(config.model, ModelConfig):
        return f"what {config.model.kind} does between kernels is not known"
    return None


def _offloads(config: Config, rank: int | None) -> bool:
    """Return whether activations of this rank of the pipeline, or of any, leave."""
    if config.memory.num_away == 0:
        return False
    schedule, sizes = schedule_of(config.pipeline), Sizes.of(config)
    ranks = range(sizes.num_ranks) if rank is None else [rank]
    return any(num_away(config.memory.num_away, schedule, sizes, one) for one in ranks)


@dataclass
class _Recorded:
    place: int
    x: Tensor | None  # a leaf, whose gradient the backward makes
    inputs: dict[str, Tensor]
    key: RandomKey | None
    forward: torch.cuda.CUDAGraph
    out: Losses | Tensor
    edge: GradientEdge | None
    start: Tensor  # of the backward
    calls: Traffic  # that the forward makes
    backward: torch.cuda.CUDAGraph | None = None
    back_calls: Traffic = field(default_factory=Traffic)
    made: Tensor | None = None  # by the backward, of x
    missing: frozenset[str] = frozenset()  # parameters without a gradient before this backward
    written: frozenset[str] = frozenset()
    reported: list[tuple[str, torch.cuda.Event | None]] = field(default_factory=list)

    @torch.no_grad()
    def take(self, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> None:
        if self.x is not None:
            self.x.copy_(x)  # type: ignore[arg-type]  # where one has it, all have
        for name, one in batch.items():
            self.inputs[name].copy_(one)
        if self.key is not None:
            assert key is not None
            self.key.counter.copy_(key.counter)


class MicroBatchGraphs:
    """Runs the forward and backward passes of `stage` into `gradients`.

    buckets: parameters that are summed over replicas together, if sums may begin before a backward is over.
    num_places: micro-batches in flight that have memory of their own; others are not replayed. More than one: the rank
    has neighbours, whose messages it may wait for.
    tp: the axis on which the stage communicates; None: it does not.
    """

    def __init__(self, stage: Stage, gradients: Gradients, num_microbatches: int, device: torch.device,
                 buckets: Buckets = (), num_places: int = 1, tp: Axis | None = None):
        self._stage, self._gradients, self._m, self._buckets = stage, gradients, num_microbatches, buckets
        self._tp = tp or Axis("tp")
        self._stream, self._pools = torch.cuda.Stream(device), [
            torch.cuda.graph_pool_handle() for _ in range(num_places)]
        self._beside = torch.cuda.Stream(device)  # where sums begin
        self._seen: set[Kind] = set()
        self._recorded: dict[tuple[Kind, int], _Recorded] = {}  # by place
        self._flight: dict[int, _Recorded] = {}  # by micro-batch
        self._newest: torch.cuda.CUDAGraph | None = None  # kept if its capture fails: see `capture`
        self._works = True
        self.num_replayed = 0
        """Micro-batches replayed so far."""
        self.num_captures = 0
        """Captures so far, failed ones among them."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While in it, work runs after all that came before, and before all that comes after."""
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def forward(self, number: int, slot: int, x: Tensor | None, batch: MicroBatch,
                key: RandomKey | None) -> Losses | Tensor | None:
        """The stage's output for micro-batch `number` on the bound weights, those of buffer `slot`; None: it is not
        replayed.
        """
        kind = self._kind(number, slot)
        taken = {recorded.place for recorded in self._flight.values()}
        place = next((place for place in range(len(self._pools)) if place not in taken), None)
        if not self._works or place is None:
            return None
        if kind not in self._seen:
            self._seen.add(kind)
            return None
        if (recorded := self._recorded.get((kind, place))) is None:
            recorded = self._attempt(lambda: self._record_forward(place, x, batch, key))
            if recorded is None:
                return None
            self._recorded[kind, place] = recorded
        elif any(one.shape != recorded.inputs[name].shape for name, one in batch.items()):
            return None
        else:
            recorded.take(x, batch, key)
            self._count(recorded.calls)
        recorded.forward.replay()
        self._flight[number] = recorded
        out = recorded.out
        return out.clone() if isinstance(out, Tensor) else {name: loss.clone() for name, loss in out.items()}

    def backward(self, number: int, gradient: Tensor) -> Tensor | None:
        """Runs the backward of a micro-batch whose forward was replayed; returns the gradient of the stage's input."""
        recorded = self._flight.pop(number)
        buffer = self._gradients.buffer_index(number // self._m)
        missing = frozenset(self._gradients.missing(buffer))
        recorded.start.copy_(gradient)
        if recorded.backward is None:
            if not self._works or self._attempt(lambda: self._record_backward(recorded)) is None:
                self._gradients.renew(buffer, missing)
                return self._run_again(recorded)
            recorded.missing, recorded.written = missing, missing - self._gradients.missing(buffer)
        else:
            self._count(recorded.back_calls)
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
        return None if recorded.made is None else recorded.made.clone()

    def _kind(self, number: int, slot: int) -> Kind:
        return slot, self._gradients.buffer_index(number // self._m), number % self._m == 0

    def _count(self, calls: Traffic) -> None:
        self._tp.traffic.calls.update(calls.calls)
        self._tp.traffic.num_bytes.update(calls.num_bytes)

    @contextmanager
    def _counting(self, calls: Traffic) -> Iterator[None]:
        """Note in `calls` the communication meanwhile; forget it if an exception ends it, as none of it happens."""
        traffic = self._tp.traffic
        before = traffic.calls.copy(), traffic.num_bytes.copy()
        try:
            yield
        except BaseException:
            traffic.calls, traffic.num_bytes = before
            raise
        calls.calls, calls.num_bytes = traffic.calls - before[0], traffic.num_bytes - before[1]

    def _attempt(self, record: Callable[[], _Recorded]) -> _Recorded | None:
        """Return what `record` captures; None, on all ranks of tp alike, if a capture failed on one of them."""
        self.num_captures += 1
        if len(self._pools) == 1:  # what PyTorch's cache keeps is room for the graph
            torch.cuda.empty_cache()  # waits for the device, which a rank that has posted receives must not
        failure: RuntimeError | None = None
        recorded = None
        try:
            recorded = record()
        except RuntimeError as error:
            failure = error
        num_failed = int(failure is not None)
        if self._tp.size > 1:
            num_failed = int(all_reduce(torch.tensor(num_failed, device=self._stream.device), self._tp))
        if num_failed:
            self._give_up(failure)
            return None
        return recorded

    def _record_forward(self, place: int, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> _Recorded:
        inputs = {name: one.clone() for name, one in batch.items()}
        x = None if x is None else x.detach().clone().requires_grad_()
        key = None if key is None else RandomKey(key.seed, key.counter.clone())
        calls = Traffic()
        graph = self._newest = torch.cuda.CUDAGraph()
        with self._counting(calls), self._recording(graph, place):
            out, total = self._run(x, inputs, key)
        out = out.detach() if isinstance(out, Tensor) else {name: loss.detach() for name, loss in out.items()}
        return _Recorded(place, x, inputs, key, graph, out, get_gradient_edge(total), torch.empty_like(total), calls)

    def _record_backward(self, recorded: _Recorded) -> _Recorded:
        edge, on_final = recorded.edge, self._gradients.on_final
        assert edge is not None
        graph = self._newest = torch.cuda.CUDAGraph()
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
            with self._counting(recorded.back_calls), self._recording(graph, recorded.place):
                recorded.made = self._run_back(recorded, edge)
        finally:
            self._gradients.on_final = on_final
        recorded.backward = graph
        _log.debug("recorded a micro-batch as CUDA graphs")
        return recorded

    def _recording(self, graph: torch.cuda.CUDAGraph, place: int) -> AbstractContextManager[None]:
        return capture(graph, self._pools[place], self._stream)

    def _give_up(self, failure: RuntimeError | None) -> None:
        """Run kernel by kernel from now on; micro-batches in flight keep what they were replayed with."""
        self._works = False
        self._recorded.clear()
        why = "on another rank of tp" if failure is None else _describe(first_cause(failure))
        _log.warning("micro-batches run without CUDA graphs from now on, as a capture failed: %s", why)

    def _run_again(self, recorded: _Recorded) -> Tensor | None:
        """Run a micro-batch kernel by kernel, forward for the second time, on the inputs that its place holds."""
        if recorded.x is not None:
            recorded.x.grad = None  # that of a capture that failed
        _, total = self._run(recorded.x, recorded.inputs, recorded.key)
        return self._run_back(recorded, get_gradient_edge(total))

    def _run(self, x: Tensor | None, inputs: MicroBatch, key: RandomKey | None) -> tuple[Losses | Tensor, Tensor]:
        out = self._stage(x, inputs, key)
        total = out if isinstance(out, Tensor) else sum(out.values())
        assert isinstance(total, Tensor)
        return out, total

    def _run_back(self, recorded: _Recorded, edge: GradientEdge) -> Tensor | None:
        backward_from(edge, recorded.start)
        if (x := recorded.x) is None:
            return None
        made, x.grad = x.grad, None
        return made


def _describe(error: BaseException) -> str:
    """Return the first line of an error, after its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
