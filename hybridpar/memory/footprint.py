"""What one pipeline stage takes, found by running its own code on ghosts: no formula here knows what a layer does.

    built       weights, master, gradients, optimizer                      there from start to end
    forward     [ input ][ kept by autograd ........ ][ more at its peak ]
    backward    [ input ][ kept, ever less ][ its own ][ gradient out ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.config import Config
from hybridpar.grid import Axis, ProcessGrid, sizes_of
from hybridpar.memory.ghost import Tracker
from hybridpar.models.build import DTYPES, Recomputation, build_blocks
from hybridpar.models.cost import LABELLED
from hybridpar.nn.placement import reduce_shared_gradients
from hybridpar.optim import ParameterSlot, optimizer_of, squared_norm
from hybridpar.pipeline.run.stage import Stage
from hybridpar.random import RandomKey
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.partition import Partition, make_routes
from hybridpar.state.weights import Ownership, StageParameters, WeightStore


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a stage takes. Units: bytes.

    weights: all working versions. gradients: all buffers. kept: what a micro-batch leaves between its forward and its
    backward, besides its input. output: its output, where that is not kept anyway. message: an activation between
    stages. forward, first_backward (of a batch), backward, norm, update: the most that each takes above what was there
    when it began. waiting: what a micro-batch keeps between the two parts of a split backward; weight_gradients: the
    most that the second one takes; first_backward and backward are then the first part's.
    """

    weights: int
    master: int
    gradients: int
    optimizer: int
    kept: int
    output: int
    message: int
    forward: int
    first_backward: int
    backward: int
    norm: int
    update: int
    waiting: int = 0
    weight_gradients: int = 0


@dataclass(frozen=True, slots=True)
class Buffers:
    """How many the schedule needs."""

    versions: int
    gradients: int


def trace_stage(
    config: Config, blocks: range, recompute: Recomputation, buffers: Buffers, device: torch.device
) -> Footprint:
    """Builds the stage of `blocks`, runs two micro-batches and one update; takes and computes nothing.

    Of the tp ranks and the replicas it is the first, whose share is the largest where a split is uneven. `device`: may
    be a kind of device that this machine does not have.
    """
    batch = sample_microbatch(config)
    with Tracker(device) as tracker:
        traced = _TracedStage(config, blocks, recompute, buffers, tracker)
        batch = {name: tensor.to(tracker.device) for name, tensor in batch.items()}
        tracker.ghost_integers = True  # a forward looks into the micro-batch only
        kept, output, forward = traced.forward(batch)
        first_backward, waiting = traced.backward(first=True)
        weight_gradients = traced.apply()
        traced.forward(batch)
        backward, _ = traced.backward(first=False)
        weight_gradients = max(weight_gradients, traced.apply())
        tracker.ghost_integers = False
        return Footprint(
            **traced.static(), kept=kept, output=output, message=traced.message_bytes, forward=forward,
            first_backward=first_backward, backward=backward, norm=traced.norm(), update=traced.update(),
            waiting=waiting, weight_gradients=weight_gradients)


class _TracedStage:
    """A stage of ghosts, and what Engine and Executor do with one."""

    def __init__(self, config: Config, blocks: range, recompute: Recomputation, buffers: Buffers, tracker: Tracker):
        model, dtype, device = config.model, DTYPES[config.train.dtype], tracker.device
        self.config, self.tracker = config, tracker
        self.tp = silent_axis("tp", config.parallel.tp)
        built = build_blocks(model, self.tp, blocks, kernels=config.kernels, dtype=dtype)
        self.stage = Stage(built, recompute)
        parameters = StageParameters(self.stage, dtype)
        placements = parameters.placements
        grid = ProcessGrid.imagined(sizes_of(config.parallel), 0, lambda _, ranks: _SilentGroup(0, len(ranks)))  # type: ignore[call-arg]
        owned = Partition(parameters.layout, make_routes(config, placements, grid)).owned
        self.weights = WeightStore(
            parameters, Ownership(owned), buffers.versions, device, predict=config.optim.staleness == "prediction")
        self.accumulator = GradientAccumulator(
            parameters.layout, device, num_buffers=buffers.gradients, defers=config.pipeline.split_backward)
        self.slots = [ParameterSlot(o.name, placements[o.name], grid.place, o.part, o.shared) for o in owned]
        self.optimizer = optimizer_of(config, self.slots, self.tp)
        self.optimizer.allocate(device, self.weights.master_dtype)
        shape = (config.train.micro_batch_size, model.seq_length, model.hidden_size)
        self.receives, self.sends = 0 not in blocks, model.num_blocks - 1 not in blocks
        self._message = lambda: torch.zeros(shape, dtype=dtype, device=device)
        self.message_bytes = _num_bytes(self._message())
        self._input: Tensor | None
        self._empty: int
        self._edge: GradientEdge

    def static(self) -> dict[str, int]:
        """What is there all the time, by name."""
        return {
            "weights": sum(map(_num_bytes, self.weights.buffers)),
            "gradients": sum(map(_num_bytes, self.accumulator.buffers)),
            "master": 0 if self.weights.master is None else _num_bytes(self.weights.master),
            "optimizer": sum(map(_num_bytes, self.optimizer.state_tensors().values()))}

    def forward(self, batch: dict[str, Tensor]) -> tuple[int, int, int]:
        """Executor's forward: what is kept after it, what the output takes besides, and the most that it took."""
        self._empty = self.tracker.read().current
        self._input = self._message().requires_grad_() if self.receives else None
        before = self._start()
        key = RandomKey.of(self.config.train.seed, 0, 0, device=self.tracker.device)
        out: Any = self.stage(self._input, batch, key)
        peak = self.tracker.read().peak - before
        if isinstance(out, dict):
            out = sum(out.values())
        sent = out.detach()
        self._edge = get_gradient_edge(out)
        del out
        with_output = self.tracker.read().current
        del sent
        kept = self.tracker.read().current
        return kept - before, with_output - kept, peak

    def backward(self, first: bool) -> tuple[int, int]:
        """Executor's backward: the most that it took, and what waits after it. `first`: of a batch."""
        gradient = self._message() if self.sends else torch.tensor(1.0)
        if first:
            self.accumulator.begin(0)
        before = self._start()
        self.accumulator.bind(self.weights.leaves_of(0), 0)
        if self.accumulator.defers:
            self.accumulator.collect(None)
        backward_from(self._edge, gradient)
        del self._edge, self._input, gradient
        left = self.tracker.read()
        return left.peak - before, left.current - self._empty

    def apply(self) -> int:
        """Executor's second part of a split backward: the most that it took."""
        before = self._start()
        if self.accumulator.defers:
            self.accumulator.apply(None)
        return self.tracker.read().peak - before

    def norm(self) -> int:
        """Engine's NORM."""
        before, gradients = self._start(), self.weights.owned_views(self.accumulator.buffers[0])
        reduce_shared_gradients(zip(gradients, (slot.placement for slot in self.slots), strict=True), self.tp)
        squared_norm(gradients, self.slots, backend=self.config.kernels.optimizer)
        return self.tracker.read().peak - before

    def update(self) -> int:
        """Engine's UPDATE."""
        before, gradients = self._start(), self.weights.owned_views(self.accumulator.buffers[0])
        self.weights.advance(lambda weights: self.optimizer.step(
            weights, gradients, lr=1.0, gradient_scale=0.5))
        return self.tracker.read().peak - before

    def _start(self) -> int:
        """Bytes now, from where the peak is taken too."""
        self.tracker.restart_peak()
        return self.tracker.read().current


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def sample_microbatch(config: Config) -> dict[str, Tensor]:
    """A micro-batch of full sequences; of BERT's positions, the usual share is labelled."""
    model, b = config.model, config.train.micro_batch_size
    shape = (b, model.seq_length)
    batch = {"tokens": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}
    for name in ("num_targets", "num_samples"):
        batch[name] = torch.ones((), dtype=torch.float64)
    if model.kind == "bert":
        batch["labels"][:, round(LABELLED[model.kind] * model.seq_length):] = -100
        batch["token_types"] = torch.zeros(shape, dtype=torch.int64)
        batch["padding_mask"] = torch.ones(shape, dtype=torch.bool)
        batch["sentence_labels"] = torch.zeros(b, dtype=torch.int64)
    return batch


class _Done(dist.Work):
    def wait(self, *args: Any) -> bool:
        """At once."""
        return True


class _SilentGroup(dist.ProcessGroup):
    """Collectives that do nothing, in memory that they have been given; what a layer needs in order to be split."""

    def allreduce(self, *args: Any) -> Any:
        return _Done()

    def alltoall_base(self, *args: Any) -> Any:
        return _Done()


def silent_axis(name: str, size: int) -> Axis:
    """An axis of `size` ranks, of which this is the first, whose collectives send nothing and change nothing."""
    return Axis(name, 0, tuple(range(size)), _SilentGroup(0, size) if size > 1 else None)  # type: ignore[call-arg]
