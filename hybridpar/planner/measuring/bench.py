"""Measure the model's blocks, run one by one as if each were a stage, on all ranks of a job at the
same time.

a pass    F embedding, F layer, .., F head,  B head, B layer, .., B embedding     at most six of a kind
a batch   some passes, then norm and update of each block, and selective recomputation

All ranks compute at once, as in training, because they share the machine's memory and caches.
Tensor parallelism is measured twice: with collectives that do nothing (the computing time of a
rank), and with real ones (the additional time of the collectives).

With packed documents (data.packing) some passes have rows of short ones: the time that they save is
attention's, in proportion to the pairs of a query and a key that they leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.comm import barrier, gather_objects
from hybridpar.config import Config
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.blocks import TransformerLayer
from hybridpar.models.build import BlockOptions, Recomputation, build_blocks
from hybridpar.models.custom_blocks import local_message_shape
from hybridpar.planner.measuring.profile import BlockCost, Key
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.prediction.footprint import Buffers, sample_microbatch, trace_stage
from hybridpar.prediction.work import as_all_reduces, block_kinds, document_shares
from hybridpar.random import RandomKey
from hybridpar.runtime.recording import Clock, make_clock
from hybridpar.runtime.stage import KEEP_ALL, Stage
from hybridpar.state import RankState
from hybridpar.state.residency.chunks import Memory

_MOST_ALIKE = 6
_UPDATES = 3
_WARMUP_PASSES = 1
_DOCUMENTS = 8
"""Documents of a row in the passes with short ones."""


@dataclass(frozen=True)
class Effort:
    """Time to spend on each tp degree and micro-batch size. `parts`: also measure the
    input-gradient part of the backward pass."""

    seconds: float = 2.0
    most_passes: int = 100
    parts: bool = True


QUICK = Effort(0.4, 20, parts=False)
FULL = Effort()


class Beside:
    """Work that runs along with the blocks of a pass, by their positions in it; this base class
    does nothing."""

    def before(self, place: int, following: int | None, *, backward: bool) -> None:
        """Act before a block computes; `following` is the block after it, or None."""

    def after(self, place: int, *, backward: bool) -> None:
        """Act after the block has computed."""


class Unit:
    """One block as a stage of its own, with its state."""

    def __init__(self, config: Config, number: int, tp: Axis, device: torch.device):
        job = JobPlan(replace(config, memory=replace(config.memory, host_optimizer=False)))
        policy = job.state_policy(1 if job.schedule.flush else 2, 1)
        self.stage = Stage(
            build_blocks(
                config.model,
                tp,
                [number],
                options=BlockOptions(config.kernels, config.parallel.sequence),
                dtype=policy.dtype,
            ),
            KEEP_ALL,
            config.model,
        )
        self._dtype = policy.dtype
        self._device = device
        self.state = RankState(self.stage, ProcessGrid.of(tp), policy, Memory(device))
        self.state.initialize(0)
        self.state.allocate()
        self.num_parameters = sum(p.numel() for p in self.stage.parameters() if p.requires_grad)
        self.state.begin(0)
        self.key = RandomKey.of(config.train.seed, 0, 0, config.train.micro_batch_size, device)
        self._input_shape: tuple[int, ...] | None = None
        if number:
            sequence = config.parallel.sequence
            sample = local_message_shape(config.model, number - 1, tp, sequence)
            self._input_shape = (config.train.micro_batch_size, *sample)
        # used as the input if the previous measured block's output does not fit
        self._usual: Tensor | None = None
        self._edge: GradientEdge | None  # None: nothing here needs a gradient
        self._sent: Tensor
        self._input: Tensor | None = None

    def forward(self, x: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """Run an executor's forward, on `x` if it has the expected form, and return the output that
        a stage would send."""
        self.state.weights.bind(self.state.weights.newest)
        if self._input_shape is not None and (x is None or x.shape != self._input_shape):
            if self._usual is None:
                generator = torch.Generator(self._device)
                self._usual = torch.randn(
                    self._input_shape, dtype=self._dtype, device=self._device, generator=generator
                )
            x = self._usual
        self._input = None if x is None else x.detach().requires_grad_()
        out: Any = self.stage(self._input, batch, self.key)
        if isinstance(out, dict):
            out = sum(out.values())
        self._edge = (
            None if self._input is None and self.stage.is_frozen else get_gradient_edge(out)
        )
        self._sent = out.detach()
        return self._sent

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Run an executor's backward, on `gradient` if it has the form of the output, and return
        the gradient of the input."""
        self.state.bind(0, (self.state.weights.newest,))
        if gradient is None or gradient.shape != self._sent.shape:
            gradient = torch.ones_like(self._sent)
        if self._edge is not None:
            backward_from(self._edge, gradient)
        given = self._input
        self._input = None
        del self._edge
        return None if given is None else given.grad

    def norm(self) -> None:
        """Compute the norm of the gradients, as in training."""
        self.state.reduce(0)
        self.state.square_norm(0)

    def update(self) -> None:
        """Run an update at a learning rate of 0."""
        self.state.update(0, lr=0.0, factor=1.0)

    def remaking(self, batch: Mapping[str, Tensor]) -> Callable[[], object]:
        """Return a function that recomputes what selective recomputation of a layer does not
        keep."""
        layer = next(iter(self.stage.blocks.values()))
        if not isinstance(layer, TransformerLayer):
            return lambda: None
        x = torch.ones_like(self._sent)
        makes: list[Callable[[], object]] = []
        for mlp, rows in layer.mlp.parts(batch["tokens"].numel()):
            u = x.new_ones((rows, len(mlp.up.weight)))
            makes.append(partial(mlp.activation, u, mlp.up.bias))
        if layer.has_input_norms:
            makes += [partial(layer.attention_norm, x), partial(layer.mlp_norm, x)]

        def make() -> None:
            with torch.no_grad():
                for one in makes:
                    one()

        return make

    def freeze(self, frozen: bool) -> None:
        """Set whether backward skips gradients that only weights need."""
        for leaf in self.state.weights.leaves_of(self.state.weights.newest).values():
            leaf.requires_grad_(not frozen)


Stamps = list[tuple[str, str, Any, Any]]
"""Action, kind of block, start time, end time."""


class Bench:
    """Some blocks of the model on one tp axis."""

    def __init__(self, config: Config, b: int, tp: Axis, device: torch.device):
        self.config = replace(config, train=replace(config.train, micro_batch_size=b))
        kinds = block_kinds(config.model)
        self.numbers = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < _MOST_ALIKE]
        self.kinds = [kinds[n] for n in self.numbers]
        self.units = [Unit(self.config, number, tp, device) for number in self.numbers]
        self.batch = {name: x.to(device) for name, x in sample_microbatch(self.config).items()}
        self.documents = _with_documents(self.batch) if config.data.is_packed else None
        """The micro-batch with several documents a row; None if nothing is packed."""
        self.device = device
        self.tp = tp
        self.clock: Clock = make_clock(device)
        self.had_core = 1.0
        """Share of the time in which the process got a core when it wanted one."""

    def note_core_time(self, own: float, wall: float) -> None:
        """Note for how much of the wall-clock time the process had a core. Units: seconds."""
        self.had_core = min(1.0, own / wall) if wall else 1.0

    def a_pass(self, beside: Beside, batch: Mapping[str, Tensor] | None = None) -> None:
        """Run all blocks forward, then backward, together with `beside`, on `batch` instead of the
        usual micro-batch if there is one."""
        batch = self.batch if batch is None else batch
        places = range(len(self.units))
        x = None
        gradient = None
        for order, backward in ((places, False), (places[::-1], True)):
            for place, following in pairwise([*order, None]):
                assert place is not None
                unit = self.units[place]
                beside.before(place, following, backward=backward)
                if backward:
                    gradient = unit.backward(gradient)
                else:
                    x = unit.forward(x, batch)
                beside.after(place, backward=backward)

    def document_shares(self) -> dict[str, float]:
        """Return the shares of the pairs of a query and a visible key that the documents leave, by
        kind of block."""
        if self.documents is None:
            return dict.fromkeys(self.kinds, 1.0)
        length = int(self.documents["positions"].max()) + 1
        return document_shares(self.config.model, length)

    def updates(self, stamps: Stamps) -> None:
        """Run norm and update of all blocks, and selective recomputation."""
        now = self.clock.now
        for kind, unit in zip(self.kinds, self.units, strict=True):
            start = now()
            unit.norm()
            middle = now()
            unit.update()
            stamps += [("norm", kind, start, middle), ("update", kind, middle, now())]
            make = unit.remaking(self.batch)
            start = now()
            make()
            stamps.append(("remake", kind, start, now()))

    def messages(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield the collectives over tp of one forward and backward of each kind (see
        `as_all_reduces`)."""
        axis = self.tp
        kinds = self.kinds
        found: dict[tuple[str, str], tuple[int, ...]] = {}

        class Noting(Beside):
            def after(self, place: int, *, backward: bool) -> None:
                found["backward" if backward else "forward", kinds[place]] = as_all_reduces(
                    axis.traffic, axis.size
                )
                axis.traffic.clear()

        axis.traffic.clear()
        self.a_pass(Noting())
        for (what, kind), sizes in found.items():
            yield what, kind, sizes


def measure_blocks(
    config: Config,
    degrees: Sequence[int],
    sizes: Sequence[int],
    device: torch.device,
    effort: Effort = FULL,
) -> tuple[dict[Key, BlockCost], float]:
    """Measure every kind of block at every tp degree and micro-batch size.

    Degrees that do not divide the number of ranks are measured without collectives.

    Returns:
        The costs, and the share of the time in which ranks had a core while all of them computed.

    Collectives: on all ranks of the job.
    """
    world = world_axis(device)
    found: dict[Key, BlockCost] = {}
    shares = []
    for tp in degrees:
        axis = Axis("tp", 0, (world.rank,))
        if tp > 1 and world.size % tp == 0:
            axis = ProcessGrid(tp=tp, dp=world.size // tp, device_type=device.type).tp
        for b in sizes:
            costs, share = _measure(config, tp, b, axis, device, effort)
            found |= costs
            shares.append(share)
    return found, fmean(shares)


def world_axis(device: torch.device) -> Axis:
    """Return an axis of all ranks of the job, or of this process alone.

    Collectives: on all ranks.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return ProcessGrid(dp=ranks, device_type=device.type).world


def _measure(
    config: Config, tp: int, b: int, axis: Axis, device: torch.device, effort: Effort
) -> tuple[dict[Key, BlockCost], float]:
    world = world_axis(device)
    alone = Bench(config, b, silent_axis("tp", tp), device)
    messages = {(what, kind): sizes for what, kind, sizes in alone.messages()} if tp > 1 else {}
    own = _timed(alone, world, effort, own=True)
    real = _timed(Bench(config, b, axis, device), world, effort, own=False) if axis.size > 1 else {}
    kept = _kept(config, tp, b, device) if effort.parts else {}
    left = alone.document_shares()
    costs = {}
    for kind, unit in dict(zip(alone.kinds, alone.units, strict=True)).items():
        wait = {
            what: max(0.0, real[what, kind] - own[what, kind]) if real else 0.0
            for what in ("forward", "backward")
        }
        attention = {what: _attention(own, what, kind, left[kind]) for what in wait}
        costs[kind, tp, b] = BlockCost(
            own["forward", kind],
            own["backward", kind],
            own["norm", kind],
            own["update", kind],
            wait["forward"],
            wait["backward"],
            messages.get(("forward", kind), ()),
            messages.get(("backward", kind), ()),
            own.get(("backward_input", kind), 0.0),
            own["remake", kind],
            unit.num_parameters,
            kept.get(kind, 0),
            forward_attention=attention["forward"],
            backward_attention=attention["backward"],
        )
    return costs, fmean(gather_objects(alone.had_core, world))


def _with_documents(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a micro-batch whose rows have several equal documents."""
    start = batch["document_start"]
    s = start.shape[1]
    length = -(-s // _DOCUMENTS)
    place = torch.arange(s, device=start.device)
    starts = (place // length * length).expand_as(start)
    positions = (place - starts).to(batch["positions"].dtype)
    return {**batch, "document_start": starts.to(start.dtype), "positions": positions}


def _attention(own: Mapping[tuple[str, str], float], what: str, kind: str, left: float) -> float:
    """Return the part of a block's pass that is in proportion to the pairs of a query and a visible
    key, in seconds; 0 if it was not measured with several documents a row.

    Args:
        own: Times by action and kind of block.
        what: forward or backward.
        kind: Kind of the block.
        left: Share of the pairs that the documents leave.
    """
    short = own.get((f"{what}_documents", kind))
    if short is None or left == 1:
        return 0.0
    full = own[what, kind]
    return min(full, max(0.0, full - short) / (1 - left))


def _kept(config: Config, tp: int, b: int, device: torch.device) -> dict[str, int]:
    """Return the bytes that a micro-batch leaves in each kind of block between forward and
    backward."""
    at = replace(
        config,
        train=replace(config.train, micro_batch_size=b),
        parallel=replace(config.parallel, tp=tp, pp=1, dp=1),
    )
    kinds = block_kinds(config.model)
    return {
        kind: trace_stage(at, range(n, n + 1), Recomputation(), Buffers(1, 1), device).kept
        for n, kind in enumerate(kinds)
        if n == kinds.index(kind)
    }


def _timed(bench: Bench, world: Axis, effort: Effort, *, own: bool) -> dict[tuple[str, str], float]:
    """Return seconds by action and kind of block, as means over the ranks.

    Args:
        own: Whether to measure the rank's own time instead of wall-clock time.
    """
    stamps: Stamps = []
    timing = _Timing(bench, stamps)
    barrier(world)
    start = time.perf_counter()
    for _ in range(_WARMUP_PASSES):
        bench.a_pass(timing)
    bench.updates(stamps)
    took = max(gather_objects(time.perf_counter() - start, world))
    passes = int(min(effort.most_passes, max(4, effort.seconds / took)))
    stamps.clear()
    barrier(world)
    for i in range(passes):
        bench.a_pass(timing)
        if i % -(-passes // _UPDATES) == 0:
            bench.updates(stamps)
    if effort.parts and own:
        for unit in bench.units[1:]:
            unit.freeze(True)
        for _ in range(max(2, passes // 3)):
            bench.a_pass(_Timing(bench, stamps, "_input"))
        for unit in bench.units[1:]:
            unit.freeze(False)
    if own and bench.documents is not None:
        for _ in range(max(2, passes // 3)):
            bench.a_pass(_Timing(bench, stamps, "_documents"), bench.documents)
    by_name: dict[tuple[str, str], list[float]] = {}
    on_wall = of_own = 0.0
    for what, kind, first, last in stamps:
        wall0, own0 = bench.clock.read(first)
        wall1, own1 = bench.clock.read(last)
        by_name.setdefault((what, kind), []).append(own1 - own0 if own else wall1 - wall0)
        on_wall = on_wall + wall1 - wall0
        of_own = of_own + own1 - own0
    bench.note_core_time(of_own, on_wall)
    mine = {name: _typical(times) for name, times in by_name.items()}
    everyone = gather_objects(mine, world)
    return {name: fmean(rank[name] for rank in everyone) for name in mine}


class _Timing(Beside):
    """Time stamps of a pass; `what` follows their names."""

    def __init__(self, bench: Bench, stamps: Stamps, what: str = ""):
        self._kinds = bench.kinds
        self._now = bench.clock.now
        self._stamps = stamps
        self._what = what
        self._start: Any = None

    def before(self, place: int, following: int | None, *, backward: bool) -> None:
        self._start = self._now()

    def after(self, place: int, *, backward: bool) -> None:
        self._stamps.append(
            (
                f"{'backward' if backward else 'forward'}{self._what}",
                self._kinds[place],
                self._start,
                self._now(),
            )
        )


def _typical(times: Sequence[float]) -> float:
    """Return the mean without the slowest tenth, which another program has delayed; the median of a
    few values."""
    if len(times) < 20:
        return median(times)
    return fmean(sorted(times)[: len(times) - len(times) // 10])
