"""Run micro-batches as CUDA graphs, because a CPU takes longer to launch a thousand small kernels
than a GPU takes to run them.

    first micro-batch of a kind     runs as usual: kernels are compiled, libraries set up
    second                          F, then B (or I, then W) are captured, and replayed
    all later ones                  inputs and dropout's counters are copied into place, F and B
                                    replayed

Gradients are reduced over replicas while the last backward of a batch runs: when a bucket of
gradients is final, the graph records an event, and the bucket's reduction waits for that event, not
for the complete graph. Micro-batches are of one kind if they run on the same stage and the same
buffer of weights, write the same buffer of gradients, and both or neither are the first of their
batch, which overwrites. Without a pipeline only one micro-batch at a time is between its F and its
B, so all kinds share memory. In a pipeline several are: each then has a place of its stage, with
separate memory and graphs. With a split backward, I leaves the factors of weight gradients in the
memory of the place, which stays taken until W, a third graph, has multiplied them. Graphs run on a
separate stream, as torch requires. Communication of tensor parallelism is captured, too.

A capture does not wait for the device (see capture.py). If one fails, its cause is logged, and this
rank runs kernel by kernel from then on, with the same results. Stages may differ in that, since
transfers between them are in no graph. Ranks of tp may not, because NCCL requires a collective to
be captured on all ranks or on none: they agree on every capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.comm import all_reduce
from hybridpar.grid import ProcessGrid, Traffic
from hybridpar.job import JobPlan
from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.models.metrics import each, metrics_of
from hybridpar.random import RandomKey
from hybridpar.runtime.capture import capture, first_cause
from hybridpar.runtime.stage import Stage

_log = logging.getLogger(__name__)


class Gradients(Protocol):
    """The gradients that a backward pass writes: see state.GradientAccumulator."""

    on_final: Callable[[str], None] | None
    collecting: dict[str, list[Any]] | None

    def arm(self, on_final: Callable[[str], None] | None) -> None: ...
    def buffer_index(self, batch: int) -> int: ...
    def missing(self, index: int) -> set[str]: ...
    def renew(self, index: int, names: Iterable[str]) -> None: ...
    def apply_with(
        self, add: Callable[[dict[str, list[Any]], int, Callable[[], None]], None]
    ) -> None: ...


Kind = tuple[int, int, int, bool]
"""Stage, buffer of weights, buffer of gradients, and whether a micro-batch is the first of its
batch."""
Buckets = Sequence[Collection[str]]


def recorder(
    job: JobPlan,
    stages: Mapping[int, Stage],
    gradients: Gradients,
    device: torch.device,
    buckets: Buckets,
    grid: ProcessGrid,
) -> MicroBatchGraphs | None:
    """Return the recorder of a rank's micro-batches on a GPU; None, and a line in the log, if it
    cannot record them."""
    if reason := unsupported(job, grid.pp.rank):
        _log.info("micro-batches run without CUDA graphs: %s", reason)
        return None
    return MicroBatchGraphs(job, stages, gradients, device, buckets, grid)


def num_places(num_ranks: int, num_stages: int) -> int:
    """Return how many micro-batches in flight on a stage have a place, if its rank has `num_stages`
    of them.

    1f1b has as many in flight as there are ranks; if a rank has several stages, the first ones have
    up to twice as many. A place takes memory once it is used.
    """
    return num_ranks if num_stages == 1 else 2 * num_ranks


def unsupported(job: JobPlan, rank: int | None = None) -> str | None:
    """Return why micro-batches of such a job cannot be recorded on a rank of its pipeline; None if
    they can.

    rank: None: any rank, if one of them offloads activations.
    """
    config = job.config
    parallel = config.parallel
    if parallel.pp * parallel.cp * parallel.tp > 1 and not config.train.graph_grids:
        return "with pp, cp or tp they have not run on a GPU (train.graph_grids = true tries it)"
    if config.model.routed_experts is not None:
        return "the number of rows of each expert differs from micro-batch to micro-batch"
    if parallel.cp > 1 and config.data.is_packed:
        return "the tokens of a rank of cp differ from micro-batch to micro-batch"
    if parallel.cp * parallel.tp > 1 and config.train.share_gpus:
        return "what tensor or context parallelism sends goes through the host's hands"
    if config.memory.is_limited or _offloads(job, rank):
        return "memory that leaves comes back elsewhere"
    if config.compression.takes_factors:
        return (
            f"compression.gradients = {config.compression.gradients} keeps what the gradients of "
            "weights are computed from"
        )
    return None


def _offloads(job: JobPlan, rank: int | None) -> bool:
    """Return whether this rank of the pipeline offloads activations; None: whether any rank
    does.
    """
    if job.config.memory.num_away == 0:
        return False
    ranks = range(job.shape.num_ranks) if rank is None else [rank]
    return any(map(job.num_away, ranks))


@dataclass
class _Addition:
    """A graph that adds to gradients."""

    graph: torch.cuda.CUDAGraph
    calls: Traffic  # communication of this graph
    missing: frozenset[str]  # parameters in `touched` that had no gradient before
    written: frozenset[str]  # parameters that had none before and have one since
    # parameters in the order in which their gradients become final
    reported: list[tuple[str, torch.cuda.Event | None]]

    def fits(self, missing: frozenset[str]) -> bool:
        """Return whether the graph may be replayed if these gradients are missing: it overwrites
        exactly those, and adds to others.
        """
        return missing & self.touched == self.missing

    @property
    def touched(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.reported)


@dataclass
class _Recorded:
    """The graphs of a kind of micro-batch on a place, and the tensors that they read and write."""

    stage: int
    place: int
    x: Tensor | None  # a leaf, whose gradient the backward makes
    inputs: dict[str, Tensor]
    key: RandomKey | None
    forward: torch.cuda.CUDAGraph
    out: Losses | Tensor
    edge: GradientEdge | None
    start: Tensor  # gradient that the backward starts from
    calls: Traffic  # communication of the forward
    backward: _Addition | None = None
    is_split: bool = False  # the backward leaves weight gradients to `weights`
    weights: _Addition | None = None
    made: Tensor | None = None  # gradient of x, which the backward computes
    num_uses: int = 0  # replays since the capture
    # Caches of the stage, kept alive because the graphs read them and the stage may replace them.
    buffers: list[Tensor] = field(default_factory=list)

    def takes(self, batch: MicroBatch) -> bool:
        """Return whether a micro-batch has the names, shapes and types of the captured one."""
        return batch.keys() == self.inputs.keys() and all(
            (one.shape, one.dtype) == (self.inputs[name].shape, self.inputs[name].dtype)
            for name, one in batch.items()
        )

    @torch.no_grad()
    def take(self, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> None:
        if self.x is not None:
            self.x.copy_(x)  # type: ignore[arg-type]  # all micro-batches of a stage have it
        for name, one in batch.items():
            self.inputs[name].copy_(one)
        if self.key is not None:
            assert key is not None
            self.key.counter.copy_(key.counter)


class MicroBatchGraphs:
    """Runs the forward and backward passes of a rank's stages into `gradients`.

    A forward of a model that is not `cuda_graph_safe` may read Python values that change, while a
    graph keeps the captured ones. So the first, second, fourth, eighth .. replay of each forward is
    compared with a run kernel by kernel.

    Args:
        job: The job's plan.
        stages: The rank's stages, by number.
        gradients: Accumulates the gradients.
        device: The GPU.
        buckets: Parameters that are reduced over replicas together, if reductions may start before
            a backward has ended.
        grid: The process grid.
    """

    def __init__(
        self,
        job: JobPlan,
        stages: Mapping[int, Stage],
        gradients: Gradients,
        device: torch.device,
        buckets: Buckets,
        grid: ProcessGrid,
    ):
        self._distrusts = not job.config.model.cuda_graph_safe
        # attributes of modules, by stage, before its first micro-batch
        self._attributes: dict[int, dict[str, Any]] = {}
        self._stages = stages
        self._gradients = gradients
        self._m = job.shape.num_microbatches
        self._buckets = buckets
        self._tp = grid.tp
        places = num_places(grid.pp.size, len(stages))
        # a capture may wait for their transfers
        self._has_neighbours = places > 1
        self._stream = torch.cuda.Stream(device)
        self._pools = {
            (stage, place): torch.cuda.graph_pool_handle()
            for stage in stages
            for place in range(places)
        }
        self._beside = torch.cuda.Stream(device)  # reductions start on it
        self._seen: set[Kind] = set()
        self._recorded: dict[tuple[Kind, int], _Recorded] = {}  # by place
        self._flight: dict[tuple[int, int], _Recorded] = {}  # by stage and micro-batch
        # micro-batches whose deferred weight gradients are not added yet
        self._waiting: list[tuple[dict[str, list[Any]], _Recorded]] = []
        self._newest: torch.cuda.CUDAGraph | None = None  # kept if its capture fails: see `capture`
        self._works = True
        gradients.apply_with(self._weight_gradients)
        self.num_replayed = 0
        """Micro-batches replayed so far."""
        self.num_captures = 0
        """Captures so far, including failed ones."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run work in this context after all earlier work, and before all later work."""
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def forward(
        self,
        stage: int,
        number: int,
        slot: int,
        x: Tensor | None,
        batch: MicroBatch,
        key: RandomKey | None,
    ) -> Losses | Tensor | None:
        """Return a stage's output for micro-batch `number` on the bound weights, which are in
        buffer `slot`; None: it is not replayed.
        """
        kind = stage, slot, self._gradients.buffer_index(number // self._m), number % self._m == 0
        place = self._free_place(stage)
        if not self._works and not self._flight and not self._waiting:
            self._recorded.clear()
        if not self._works or place is None or (x is None and self._stages[stage].is_frozen):
            return None
        if kind not in self._seen:
            self._seen.add(kind)
            self._attributes.setdefault(stage, _plain_attributes(self._stages[stage]))
            return None
        if (recorded := self._recorded.get((kind, place))) is None:
            recorded = self._attempt(lambda: self._record_forward(stage, place, x, batch, key))
            if recorded is None:
                return None
            self._recorded[kind, place] = recorded
        elif not recorded.takes(batch):
            return None
        else:
            recorded.take(x, batch, key)
            self._count(recorded.calls)
            recorded.num_uses += 1
        recorded.forward.replay()
        if self._distrusts and recorded.num_uses.bit_count() == 1 and self._is_changed(recorded):
            return None
        self._flight[stage, number] = recorded
        out = recorded.out
        return out.clone() if isinstance(out, Tensor) else each(out, Tensor.clone)

    def _is_changed(self, recorded: _Recorded) -> bool:
        """Return whether a replayed forward differs from a run kernel by kernel, on any rank of tp.
        If so, replays are disabled.
        """
        stage = recorded.stage
        before = self._attributes[stage]
        now = _plain_attributes(self._stages[stage])
        changed = [name for name in now if name not in before or before[name] != now[name]]
        if not self._sum_over_tp(len(changed)):
            out, _ = self._run(stage, recorded.x, recorded.inputs, recorded.key)
            if not self._sum_over_tp(int(not _are_equal(out, recorded.out))):
                return False
        what = "gives other numbers replayed than run kernel by kernel"
        if changed:
            what = f"changes {changed[0]}"
        self._drop(f"the forward of stage {stage} {what}, so it cannot be captured")
        if recorded.num_uses > 1:
            _log.warning(
                "steps since the last comparison may have been computed with what was captured: "
                "start again "
                "from an earlier checkpoint, with train.cuda_graphs = false"
            )
        return True

    def _free_place(self, stage: int) -> int | None:
        taken = {recorded.place for recorded in self._flight.values() if recorded.stage == stage}
        taken |= {recorded.place for _, recorded in self._waiting if recorded.stage == stage}
        return next(
            (place for at, place in self._pools if at == stage and place not in taken), None
        )

    def backward(self, stage: int, number: int, gradient: Tensor) -> Tensor | None:
        """Run the backward of a micro-batch whose forward was replayed; return the gradient of the
        stage's input.

        If the accumulator defers parts of weight gradients, the micro-batch keeps its place until
        they are added.
        """
        recorded = self._flight.pop((stage, number))
        buffer = self._gradients.buffer_index(number // self._m)
        waiting = self._gradients.collecting
        missing = frozenset(self._gradients.missing(buffer))
        recorded.start.copy_(gradient)
        if recorded.backward is None:
            if (
                not self._works
                or self._attempt(lambda: self._record_backward(recorded, buffer)) is None
            ):
                self._gradients.renew(buffer, missing)
                return self._run_again(recorded)
            assert recorded.backward is not None
            recorded.is_split = waiting is not None
        elif (waiting is not None and not recorded.is_split) or not recorded.backward.fits(missing):
            return self._run_again(recorded)
        else:
            self._count(recorded.backward.calls)
            if waiting is not None and recorded.weights is not None:
                waiting.update({name: [] for name in recorded.weights.touched})
        self._replay(recorded.backward, buffer)
        self.num_replayed += 1
        if waiting is not None:
            self._waiting.append((waiting, recorded))
        elif recorded.weights is not None:
            self._replay_weights(recorded.weights, buffer)
        return None if recorded.made is None else recorded.made.clone()

    def _weight_gradients(
        self, waiting: dict[str, list[Any]], buffer: int, add: Callable[[], None]
    ) -> None:
        """Add the deferred parts of weight gradients, by calling `add` or by replaying it."""
        found = [recorded for parts, recorded in self._waiting if parts is waiting]
        if not found:
            add()
            return
        (recorded,) = found
        self._waiting = [entry for entry in self._waiting if entry[0] is not waiting]
        if recorded.weights is not None:
            waiting.clear()
            self._replay_weights(recorded.weights, buffer)
            return
        if not waiting:
            return
        kept = {name: list(parts) for name, parts in waiting.items()}
        missing = frozenset(self._gradients.missing(buffer))
        if (
            not self._works
            or self._attempt(lambda: self._record_weights(recorded, buffer, add)) is None
        ):
            self._gradients.renew(buffer, missing)
            waiting.update(kept)
            add()
            return
        assert recorded.weights is not None
        self._replay(recorded.weights, buffer)

    def _replay_weights(self, weights: _Addition, buffer: int) -> None:
        missing = frozenset(self._gradients.missing(buffer))
        assert weights.fits(missing), (
            "another micro-batch of this kind began with other gradients missing"
        )
        self._count(weights.calls)
        self._replay(weights, buffer)

    def _replay(self, addition: _Addition, buffer: int) -> None:
        """Replay a graph that adds to gradients, and report the gradients that it makes final."""
        on_final = self._gradients.on_final
        is_beside = on_final is not None and len(self._buckets) > 0
        if is_beside:
            self._beside.wait_stream(self._stream)  # a bucket may have gradients of earlier work
        addition.graph.replay()
        self._gradients.missing(buffer).difference_update(addition.written)
        if on_final is None:
            return
        with torch.cuda.stream(self._beside) if is_beside else nullcontext():
            for name, event in addition.reported:
                if event is not None:
                    self._beside.wait_event(event)
                on_final(name)

    def _count(self, calls: Traffic) -> None:
        self._tp.traffic.calls.update(calls.calls)
        self._tp.traffic.num_bytes.update(calls.num_bytes)

    @contextmanager
    def _counting(self, calls: Traffic) -> Iterator[None]:
        """Add the communication in this context to `calls`; forget it after an exception, because
        it has not happened.
        """
        traffic = self._tp.traffic
        before = traffic.copy()
        try:
            yield
        except BaseException:
            traffic.restore(before)
            raise
        calls.add_since(before, traffic)

    def _attempt(self, record: Callable[[], _Recorded]) -> _Recorded | None:
        """Return what `record` captures; None, on all ranks of tp alike, if a capture failed on one
        of them.
        """
        self.num_captures += 1
        # Free PyTorch's cache to make room for the graph. This waits for the device, which a rank
        # that has posted receives must not do.
        if not self._has_neighbours:
            torch.cuda.empty_cache()
        failure: RuntimeError | None = None
        recorded = None
        try:
            recorded = record()
        except RuntimeError as error:
            failure = error
        if self._sum_over_tp(int(failure is not None)):
            cause = "on another rank of tp"
            if failure is not None:
                cause = f"({_describe(first_cause(failure))})"
            self._drop(f"a capture failed {cause}")
            return None
        return recorded

    def _sum_over_tp(self, number: int) -> int:
        if self._tp.size == 1:
            return number
        return int(all_reduce(torch.tensor(number, device=self._stream.device), self._tp))

    def _record_forward(
        self, stage: int, place: int, x: Tensor | None, batch: MicroBatch, key: RandomKey | None
    ) -> _Recorded:
        inputs = {name: one.clone() for name, one in batch.items()}
        x = None if x is None else x.detach().clone().requires_grad_()
        key = None if key is None else RandomKey(key.seed, key.counter.clone())
        calls = Traffic()
        graph = self._newest = torch.cuda.CUDAGraph()
        with self._counting(calls), self._recording(graph, stage, place):
            out, total = self._run(stage, x, inputs, key)
        out = out.detach() if isinstance(out, Tensor) else each(out, Tensor.detach)
        return _Recorded(
            stage,
            place,
            x,
            inputs,
            key,
            graph,
            out,
            get_gradient_edge(total),
            torch.empty_like(total),
            calls,
            buffers=list(self._stages[stage].buffers()),
        )

    def _record_backward(self, recorded: _Recorded, buffer: int) -> _Recorded:
        edge = recorded.edge
        assert edge is not None
        recorded.edge = None  # the recording holds the graph from now on

        def run() -> None:
            recorded.made = self._run_back(recorded, edge)

        recorded.backward = self._record_addition(recorded, buffer, run)
        _log.debug("recorded a micro-batch as CUDA graphs")
        return recorded

    def _record_weights(
        self, recorded: _Recorded, buffer: int, add: Callable[[], None]
    ) -> _Recorded:
        recorded.weights = self._record_addition(recorded, buffer, add)
        return recorded

    def _record_addition(
        self, recorded: _Recorded, buffer: int, run: Callable[[], None]
    ) -> _Addition:
        """Capture `run`, which adds to a buffer of gradients.

        An event follows the last gradient of each bucket. Gradients of buckets that other graphs
        also make final have an event at the end of this graph.
        """
        on_final = self._gradients.on_final
        missing = frozenset(self._gradients.missing(buffer))
        left = {name: names for names in map(set, self._buckets) for name in names}
        reported: list[tuple[str, torch.cuda.Event | None]] = []

        def report(name: str) -> None:
            event = None
            if name in left:
                left[name].remove(name)
                event = None if left[name] else _recorded_event()
            reported.append((name, event))

        calls = Traffic()
        graph = self._newest = torch.cuda.CUDAGraph()
        self._gradients.arm(report)
        try:
            with self._counting(calls), self._recording(graph, recorded.stage, recorded.place):
                run()
                if any(left.get(name) for name, _ in reported):
                    end = _recorded_event()
                    reported = [
                        (name, end if left.get(name) else event) for name, event in reported
                    ]
        finally:
            self._gradients.arm(on_final)
        touched = {name for name, _ in reported}
        return _Addition(
            graph, calls, missing & touched, missing - self._gradients.missing(buffer), reported
        )

    def _recording(
        self, graph: torch.cuda.CUDAGraph, stage: int, place: int
    ) -> AbstractContextManager[None]:
        return capture(graph, self._pools[stage, place], self._stream)

    def _drop(self, why: str) -> None:
        """Run kernel by kernel from now on. Micro-batches in flight keep the graphs they were
        replayed with.

        No graph is destroyed before these are done, because that would free cuBLAS workspaces that
        they use (capture.py).
        """
        self._works = False
        _log.warning("micro-batches run without CUDA graphs from now on: %s", why)

    def _run_again(self, recorded: _Recorded) -> Tensor | None:
        """Run a micro-batch kernel by kernel, with a second forward, on the inputs that its place
        holds.
        """
        if recorded.x is not None:
            recorded.x.grad = None  # left by a capture that failed
        if self._gradients.collecting is not None:
            self._gradients.collecting.clear()
        _, total = self._run(recorded.stage, recorded.x, recorded.inputs, recorded.key)
        return self._run_back(recorded, get_gradient_edge(total))

    def _run(
        self, stage: int, x: Tensor | None, inputs: MicroBatch, key: RandomKey | None
    ) -> tuple[Losses | Tensor, Tensor]:
        out = self._stages[stage](x, inputs, key)
        total = out if isinstance(out, Tensor) else sum(out.values())
        assert isinstance(total, Tensor)
        return out, total

    def _run_back(self, recorded: _Recorded, edge: GradientEdge) -> Tensor | None:
        backward_from(edge, recorded.start)
        if (x := recorded.x) is None:
            return None
        made = x.grad
        x.grad = None
        return made


def _recorded_event() -> torch.cuda.Event:
    """Return an event that the graph which is being captured records here."""
    event = torch.cuda.Event(external=True)
    event.record()
    return event


def _plain_attributes(stage: Stage) -> dict[str, Any]:
    """Return the numbers and strings among the attributes of modules, which a forward may
    change.
    """
    found: dict[str, Any] = {}
    for prefix, module in stage.named_modules():
        found |= {
            f"{prefix}.{name}": value
            for name, value in vars(module).items()
            if isinstance(value, int | float | str) and name != "training"
        }
    return found


def _are_equal(one: Losses | Tensor, other: Losses | Tensor) -> bool:
    """Return whether two outputs of a stage are equal, with NaN in the same places."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    others = other | metrics_of(other)
    return all(_are_equal(number, others[name]) for name, number in (one | metrics_of(one)).items())


def _describe(error: BaseException) -> str:
    """Return the first line of an error, after its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
