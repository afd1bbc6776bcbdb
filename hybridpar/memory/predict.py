"""The peak memory of every stage, before anything runs: the stage's footprint, walked along its list of actions.

    static          weights (all versions), fp32 master, gradient buffers, optimizer state; where computing is done on
                    CPUs, the copy of the state that a checkpoint is written from while training goes on
    activations     inputs and kept tensors of the micro-batches in flight
    communication   posted receives, outputs that wait, sends that have not been waited for
    transient       what the action at the peak takes on top: a forward, a backward, the norm, the update

The plan says what is in flight when, so a schedule needs no rule of its own here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hybridpar.config import Config
from hybridpar.memory.footprint import Buffers, Footprint, trace_stage
from hybridpar.models.build import Recomputation, recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.passes import lower
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, schedule_of
from hybridpar.pipeline.run.executor import max_unfinished_sends


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage when they are the most. Units: bytes.

    in_flight: micro-batches between forward and backward then. during: the action at the peak.
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

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.master + self.gradients + self.optimizer + self.checkpoint

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
    trace: Tracer = trace_stage,
) -> list[StageMemory]:
    """The peak memory of a rank of each pipeline stage, as the allocator of `device` will count it.

    `config`: resolved. `schedule`, `device`: None: those that the configuration names, or the CPU where this machine
    has no other. On a CPU, what kernels need inside is not in it: up to some megabytes a thread. `trace`: one that
    remembers (layers.Footprints) where many configurations are asked for.
    """
    schedule = schedule or schedule_of(config.pipeline)
    device = device or default_device(config)
    sizes = Sizes(config.parallel.pp, config.pipeline.num_microbatches)
    split = stage_split(config.model, sizes.num_stages, config.pipeline.split)
    recompute = recomputed_blocks(config.pipeline.recompute, config.model, split)
    walked, gather = _enough(schedule, sizes), config.parallel.zero > 0
    copied = config.saves_beside_training and device.type == "cpu"  # else it is no memory of the device
    traced: dict[object, Footprint] = {}
    found = []
    for stage, blocks in enumerate(split):
        buffers = Buffers(schedule.max_live_versions(sizes, stage), schedule.num_gradient_buffers)
        # stages of equal blocks take the same
        ends = (0 in blocks, config.model.num_blocks - 1 in blocks)
        again = tuple(number in recompute[stage].blocks for number in blocks)
        pattern = (len(blocks), ends, again, recompute[stage].whole, buffers)
        if pattern not in traced:
            traced[pattern] = trace(config, blocks, recompute[stage], buffers, device)
        actions = lower(schedule, walked, stage, schedule.sync_steps, batches_to_peak(config), gather=gather)
        found.append(walk(actions, traced[pattern], walked, copied=copied))
    return found


def default_device(config: Config) -> torch.device:
    """Where the configuration is to run, if it can here, else the CPU."""
    return torch.device("cpu" if config.train.device == "cpu" or not torch.cuda.is_available() else "cuda")


def batches_to_peak(config: Config) -> int:
    """After how many batches a run has been in its steady state, with as many unfinished sends as there will be."""
    needed = 3 + -(-2 * max_unfinished_sends(config.parallel.pp) // config.pipeline.num_microbatches)
    return min(needed, config.train.num_steps)


def _enough(schedule: Schedule, sizes: Sizes) -> Sizes:
    """As many micro-batches in a batch as make a difference: more only repeat what these do."""
    few = replace(sizes, num_microbatches=min(sizes.num_microbatches, 4 * sizes.num_stages + 4))
    same = all(schedule.warmup(few, stage) == schedule.warmup(sizes, stage) for stage in range(sizes.num_stages))
    return few if same else sizes


def walk(actions: Iterable[Action], footprint: Footprint, sizes: Sizes, *, copied: bool = False) -> StageMemory:
    """Follows what a rank holds along its actions, as pipeline.run.executor does, to where it is the most.

    `copied`: whether a copy of the state, for a checkpoint, is there as well.
    """
    fp = footprint
    copy = fp.weights + fp.master + fp.optimizer if copied else 0
    in_flight = received = 0  # micro-batches; messages posted or held
    waiting: dict[Kind, int] = {}  # outputs to be sent
    sends: deque[int] = deque(maxlen=max_unfinished_sends(sizes.num_stages))
    extra = {Kind.F: fp.forward, Kind.B: fp.backward, Kind.NORM: fp.norm, Kind.UPDATE: fp.update}
    best = StageMemory(fp.weights, fp.master, fp.gradients, fp.optimizer, copy, 0, 0, 0, 0, "")
    for action in actions:
        kind, has_input, has_output = action.kind, action.stage > 0, action.stage < sizes.num_stages - 1
        if kind in (Kind.RECV_F, Kind.RECV_B):
            received += 1
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            sends.append(waiting.pop(kind))
        inputs = in_flight * has_input
        activations = in_flight * fp.kept + inputs * fp.message
        communication = (received - inputs) * fp.message + sum(waiting.values()) + sum(sends)
        first = kind is Kind.B and action.microbatch % sizes.num_microbatches == 0
        transient = fp.first_backward if first else extra.get(kind, 0)
        if activations + communication + transient > best.total - best.static:
            best = replace(best, activations=activations, communication=communication, transient=transient,
                           in_flight=in_flight, during=str(action))
        if kind is Kind.F:
            in_flight += 1
            if has_output:
                waiting[Kind.SEND_F] = fp.output
        elif kind is Kind.B:
            in_flight -= 1
            received -= has_input + has_output
            if has_input:
                waiting[Kind.SEND_B] = fp.message
    return best
