"""The peak memory of every stage, before anything runs: the stage's footprint, walked along its list of actions.

    static          weights (all versions), fp32 master, gradient buffers, optimizer state; on CPUs also the copy of the
                    state that a checkpoint is written from while training goes on, which of a GPU is in host memory
    activations     inputs and kept tensors of the micro-batches in flight, and of those behind them whose gradients are
                    kept as factors until the batch is reduced
    communication   posted receives, outputs that wait, sends that have not been waited for: of each what one tp rank
                    sends; what was received last, whole
    transient       what the action at the peak takes on top: a forward, a backward, the norm, the update; with ZeRO-2
                    and 3 the whole gradients and weights of parts of the stage

The plan says what is in flight when, so a schedule needs no rule of its own here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hybridpar.config import Config, ModelConfig
from hybridpar.memory.footprint import Buffers, Footprint, trace_stage, trace_state
from hybridpar.models.build import Recomputation, recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import COMPUTE, ROWS, Kind
from hybridpar.pipeline.plan.offload import num_away
from hybridpar.pipeline.plan.passes import lower
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, schedule_of
from hybridpar.pipeline.run.executor import max_unfinished_sends
from hybridpar.pipeline.run.graphs import unsupported


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of the pipeline when they are the most. Units: bytes.

    in_flight: micro-batches between forward and backward then, counted on each stage of the rank. during: the action at
    the peak. host: of host memory, beside a GPU's: the copy of the state that a checkpoint is written from, and what an
    optimizer there has. file: of the state, what is in the slow tier. moved: what of a micro-batch leaves
    where activations do, of the rank's stages on average. graphs: what recorded micro-batches keep from the norm and
    the update, at whose time the allocator counts it as free: so much more than `total` a GPU needs.
    """

    weights: int
    master: int
    gradients: int
    optimizer: int
    checkpoint: int
    activations: int
    communication: int
    transient: int
    in_flight: int
    during: str
    host: int = 0
    file: int = 0
    moved: int = 0
    graphs: int = 0

    @property
    def state(self) -> int:
        """Bytes of what training keeps."""
        return self.weights + self.master + self.gradients + self.optimizer

    @property
    def static(self) -> int:
        """Bytes that are taken all the time."""
        return self.state - self.file + self.checkpoint

    @property
    def total(self) -> int:
        """The peak."""
        return self.static + self.activations + self.communication + self.transient

    def as_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self) | {"total": self.total}


Tracer = Callable[[Config, range, Recomputation, Buffers, torch.device], Footprint]


def predict(
    config: Config, schedule: Schedule | None = None, device: torch.device | None = None, *,
    trace: Tracer = trace_stage, ranks: Iterable[int] | None = None,
) -> list[StageMemory]:
    """The peak memory of a process of each pipeline rank (or of `ranks`), as the allocator of `device` will count it.

    `config`: resolved. `schedule`, `device`: None: those that the configuration names (`default_device`). The device
    need not be on this machine. On a CPU, what kernels need inside is not in it: up to some megabytes a thread.
    `trace`: one that remembers (layers.Footprints) where many configurations are asked for.
    """
    schedule = schedule or schedule_of(config.pipeline)
    device = device or default_device(config)
    sizes = Sizes.of(config)
    split = stage_split(config.model, sizes.num_ranks, config.pipeline.split, sizes.chunks, config.pipeline.placement)
    recompute = recomputed_blocks(config.pipeline.recompute, config.model, split)
    gather, factored = config.parallel.zero > 0, config.compression.gradients == "sbpca"
    walked = sizes if factored else _enough(schedule, sizes)
    replays = device.type == "cuda" and config.train.cuda_graphs and unsupported(config) is None
    traced: dict[object, Footprint] = {}

    def footprint(stage: int, buffers: Buffers) -> Footprint:
        blocks, again = split[stage], recompute[stage]
        # stages of equal blocks take the same
        ends = (0 in blocks, config.model.num_blocks - 1 in blocks)
        alike = isinstance(config.model, ModelConfig)
        pattern = (len(blocks) if alike else blocks, ends, tuple(number in again.blocks for number in blocks),
                   again.whole, buffers,
                   blocks.stop == config.model.num_blocks - 1)  # what a head alone receives is exact
        if pattern not in traced:
            traced[pattern] = trace(config, blocks, again, buffers, device)
        return traced[pattern]

    found = []
    for rank in range(sizes.num_ranks) if ranks is None else ranks:
        buffers = Buffers(schedule.max_live_versions(sizes, rank), schedule.num_gradient_buffers, offloads=num_away(
            config.memory.num_away, schedule, sizes, rank) > 0)
        held = {stage: footprint(stage, buffers) for stage in sizes.stages_of(rank)}
        if rank == 0 and sizes.is_v and config.model.tie_embeddings:
            first, *_, last = held
            together = trace_state(config, [*split[first], *split[last]], buffers, device)
            held[last] = replace(held[last], **{
                name: whole - getattr(held[first], name) for name, whole in together.items()})
        actions = lower(schedule, walked, rank, schedule.sync_steps, batches_to_peak(config), gather=gather,
                        split=config.pipeline.split_backward, feedback=config.feeds_back,
                        offload=config.memory.num_away)
        memory = replace(walk(actions, held, walked), moved=sum(fp.moved for fp in held.values()) // len(held))
        if not replays:
            memory = replace(memory, graphs=0)
        if config.saves_beside_training:
            copy = memory.weights + memory.master + memory.optimizer
            memory = replace(memory, host=copy) if device.type == "cuda" else replace(memory, checkpoint=copy)
        if config.memory.host_optimizer and device.type == "cuda":
            memory = replace(memory, host=memory.host + memory.master + memory.optimizer, master=0, optimizer=0)
        if config.memory.budget:
            memory = replace(memory, file=max(memory.state - config.memory.budget, 0))
        found.append(memory)
    return found


def default_device(config: Config) -> torch.device:
    """The kind of device that the configuration names; train.device = "auto": what this machine has."""
    if config.train.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.train.device)


def batches_to_peak(config: Config) -> int:
    """After how many batches a run has been in its steady state, with as many unfinished sends as there will be."""
    needed = 3 + -(-2 * max_unfinished_sends(config.parallel.pp) // config.pipeline.num_microbatches)
    return min(needed, config.train.num_steps)


def _enough(schedule: Schedule, sizes: Sizes) -> Sizes:
    """Sizes with as many micro-batches in a batch as make a difference: more only repeat what these do."""
    if not schedule.repeats(sizes):
        return sizes
    least = sizes.num_ranks - 1 + (schedule.early_switch or 0)  # which those on older weights are
    few = replace(sizes, num_microbatches=min(sizes.num_microbatches, max(4 * sizes.num_ranks + 4, least)))
    same = all(schedule.warmup(few, rank) == schedule.warmup(sizes, rank) for rank in range(sizes.num_ranks))
    return few if same else sizes


def walk(
    actions: Iterable[Action], footprints: Mapping[int, Footprint], sizes: Sizes
) -> StageMemory:
    """Follows what a rank holds along its actions, as pipeline.run.executor does, to where it is the most.

    `footprints`: of the rank's stages, by number.
    """
    held = list(footprints.values())
    weights, master, gradients, optimizer, norm, update = (
        sum(getattr(fp, name) for fp in held)
        for name in ("weights", "master", "gradients", "optimizer", "norm", "update"))
    whole_weights, whole_gradients = (
        max(getattr(fp, name) for fp in held) for name in ("whole_weights", "whole_gradients"))
    last = sizes.num_stages - 1
    in_flight = kept = inputs = posted = handed = 0  # micro-batches, what they keep, inputs, and what was not yet taken
    factors: dict[int, int] = defaultdict(int)  # by batch, until it is reduced
    waiting: dict[Kind, int] = {}  # outputs to be sent
    sends: deque[int] = deque(maxlen=max_unfinished_sends(sizes.num_ranks))
    best = StageMemory(weights, master, gradients, optimizer, 0, 0, 0, 0, 0, "")
    pool = 0  # of micro-batches, if they are recorded
    for action in actions:
        kind, fp, row = action.kind, footprints[action.stage], ROWS[action.kind]
        has_input, has_output = action.stage > 0, action.stage < last
        from_here, to_here = action.stage - 1 in footprints, action.stage + 1 in footprints  # no link between
        if row.met_by:
            sends.append(waiting.pop(kind))
        elif row.side:
            posted += fp.received if row.flow > 0 else fp.returned
        takes = row.receive is not None and (has_input if row.flow > 0 else has_output)
        if takes and (from_here if row.flow > 0 else to_here):
            handed -= footprints[action.stage - (row.flow > 0)].message
        else:
            posted -= takes * (fp.received if row.flow > 0 else fp.returned)
        activations = kept + inputs + sum(factors.values())
        whole = fp.input if kind is Kind.F else fp.message
        communication = posted + takes * whole + handed + sum(waiting.values()) + sum(sends)
        is_first = action.microbatch % sizes.num_microbatches == 0 or whole_gradients > 0
        backward = fp.first_backward if is_first else fp.backward
        whole_backward = fp.whole_backward or backward
        transient = {Kind.F: fp.forward, Kind.B: whole_backward, Kind.I: backward, Kind.W: fp.weight_gradients,
                     Kind.NORM: norm, Kind.UPDATE: update}.get(kind, 0)
        transient += whole_weights * (kind in COMPUTE) + whole_gradients * row.adds
        if kind in COMPUTE:
            pool = max(pool, activations + transient)
        if activations + communication + transient > best.total - best.static:
            best = replace(best, activations=activations, communication=communication, transient=transient,
                           in_flight=in_flight, during=str(action))
        in_flight += row.holds
        if kind in (Kind.B, Kind.W):
            factors[action.microbatch // sizes.num_microbatches] += fp.factors
        elif kind in (Kind.NORM, Kind.UPDATE):
            factors.pop(action.microbatch, None)
        if kind is Kind.F:
            kept, inputs = kept + fp.kept, inputs + has_input * fp.input
            if to_here:
                handed += fp.message
            elif has_output:
                waiting[Kind.SEND_F] = fp.output
        elif kind is Kind.W:
            kept -= fp.waiting
        elif row.of_stash:
            kept += fp.moved * ((kind is Kind.RELOAD) - (kind is Kind.EVICT))
        elif row.receive:
            kept, inputs = kept - fp.kept + fp.waiting * (kind is Kind.I), inputs - has_input * fp.input
            if from_here:
                handed += footprints[action.stage - 1].message
            elif has_input:
                waiting[Kind.SEND_B] = fp.returning
    return replace(best, graphs=max(0, pool + max(norm, update) - (best.total - best.static)))
