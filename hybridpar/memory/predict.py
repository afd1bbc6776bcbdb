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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hybridpar.config import Config, ModelConfig
from hybridpar.memory.footprint import Buffers, Footprint, trace_stage
from hybridpar.memory.ghost_state import StateFootprint, trace_state
from hybridpar.models.build import Recomputation, recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import COMPUTE, ROWS, Kind
from hybridpar.pipeline.plan.offload import num_away
from hybridpar.pipeline.plan.passes import lower
from hybridpar.pipeline.plan.predict import Ordering
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, schedule_of
from hybridpar.pipeline.plan.shared import SharedTiers
from hybridpar.pipeline.run.executor import max_unfinished_sends
from hybridpar.pipeline.run.graphs import unsupported
from hybridpar.state import StatePolicy
from hybridpar.state.parts import Parts


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
    pipeline = _Pipeline(config, schedule or schedule_of(config.pipeline), device or default_device(config), trace)
    return [pipeline.memory(rank) for rank in (range(config.parallel.pp) if ranks is None else ranks)]


class _Pipeline:
    """The ranks of a pipeline, of which parts of equal blocks are traced once."""

    def __init__(self, config: Config, schedule: Schedule, device: torch.device, trace: Tracer):
        self._config, self._schedule, self._device, self._trace = config, schedule, device, trace
        self._sizes = sizes = Sizes.of(config)
        self._split = stage_split(
            config.model, sizes.num_ranks, config.pipeline.split, sizes.chunks, config.pipeline.placement)
        self._recompute = recomputed_blocks(config.pipeline.recompute, config.model, self._split)
        self._walked = sizes if config.compression.gradients == "sbpca" else _enough(schedule, sizes)
        self._traced: dict[object, Footprint] = {}

    def memory(self, rank: int) -> StageMemory:
        """That of a rank of the pipeline."""
        config, schedule = self._config, self._schedule
        buffers = Buffers(schedule.max_live_versions(self._sizes, rank), schedule.num_gradient_buffers, num_away(
            config.memory.num_away, schedule, self._sizes, rank) > 0)
        held = {stage: self._split[stage] for stage in self._sizes.stages_of(rank)}
        parts = Parts.of(config, held)
        footprints = self._footprints(parts, buffers)
        each = [fp for of_stage in footprints.values() for fp in of_stage]
        if parts.is_divided or (rank == 0 and self._sizes.is_v and config.model.tie_embeddings):
            states = StatePolicy.of(config, buffers.versions, buffers.gradients)
            first = rank * config.parallel.dp * config.parallel.tp  # of its replicas and tp ranks
            state = trace_state(config, first, held, states, self._walked, self._device)
        else:
            state = together(each)
        actions = lower(schedule, self._walked, rank, schedule.sync_steps, batches_to_peak(config),
                        **Ordering.of(config).options, parts=state.division)
        anew = None
        if state.items is not None:
            actions, anew = state.items.moved(actions), self._footprints(parts, replace(buffers, anew=True))
        found = walk(actions, footprints, self._walked, state, anew)
        if self._device.type != "cuda" or not config.train.cuda_graphs or parts.is_divided or unsupported(config):
            found = replace(found, graphs=0)
        return self._placed(replace(found, moved=sum(fp.moved for fp in each) // len(held)))

    def _footprints(self, parts: Parts, buffers: Buffers) -> dict[int, list[Footprint]]:
        """Those of the parts of a rank's stages."""
        stages = parts.of_stage

        def of_part(stage: int, number: int, blocks: range) -> Footprint:
            handed = number > 0 or stage - 1 in stages, number + 1 < len(stages[stage]) or stage + 1 in stages
            return self._footprint(blocks, self._recompute[stage], replace(buffers, handed=handed))

        return {stage: [of_part(stage, number, blocks) for number, blocks in enumerate(cut)]
                for stage, cut in stages.items()}

    def _footprint(self, blocks: range, again: Recomputation, buffers: Buffers) -> Footprint:
        model = self._config.model
        ends = (0 in blocks, model.num_blocks - 1 in blocks)
        pattern = (len(blocks) if isinstance(model, ModelConfig) else blocks, ends,
                   tuple(number in again.blocks for number in blocks), again.whole, buffers,
                   blocks.stop == model.num_blocks - 1)  # what a head alone receives is exact
        if pattern not in self._traced:
            self._traced[pattern] = self._trace(self._config, blocks, again, buffers, self._device)
        return self._traced[pattern]

    def _placed(self, memory: StageMemory) -> StageMemory:
        """The same with what is in host memory or a file, and with the copy for checkpoints."""
        config, on_gpu = self._config, self._device.type == "cuda"
        if config.saves_beside_training:
            copy = memory.weights + memory.master + memory.optimizer
            memory = replace(memory, host=copy) if on_gpu else replace(memory, checkpoint=copy)
        if config.memory.host_optimizer and on_gpu:
            memory = replace(memory, host=memory.host + memory.master + memory.optimizer, master=0, optimizer=0)
        if config.memory.budget:
            memory = replace(memory, file=max(memory.state - config.memory.budget, 0))
        return memory


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
    actions: Iterable[Action], footprints: Mapping[int, Sequence[Footprint]], sizes: Sizes,
    state: StateFootprint | None = None, anew: Mapping[int, Sequence[Footprint]] | None = None,
) -> StageMemory:
    """Follows what a rank holds along its actions, as pipeline.run.executor does, to where it is the most.

    `footprints`: of the parts of the rank's stages, by number. `state`: of the rank; None: that of its stages. `anew`:
    as `footprints`, where a backward makes gradients that replicas share.
    """
    found = _Walk(footprints, sizes, state or together(fp for parts in footprints.values() for fp in parts),
                  anew or footprints)
    for action in actions:
        found.follow(action)
    return replace(found.most, graphs=max(0, found.pool + found.beside - found.most.total + found.most.static))


def together(footprints: Iterable[Footprint]) -> StateFootprint:
    """The state of stages that have nothing in common."""
    held = list(footprints)
    weights, master, gradients, optimizer, norm, update = (
        sum(getattr(fp, name) for fp in held)
        for name in ("weights", "master", "gradients", "optimizer", "norm", "update"))
    return StateFootprint(weights, master, gradients, optimizer, norm, (update,))


class _Walk:
    """What a rank holds, action by action, and what it held when that was the most."""

    def __init__(self, footprints: Mapping[int, Sequence[Footprint]], sizes: Sizes, state: StateFootprint,
                 anew: Mapping[int, Sequence[Footprint]]):
        self._footprints, self._state, self._m = footprints, state, sizes.num_microbatches
        self._anew, self._made = anew, set[tuple[int, int, int]]()  # what an I has made gradients for
        self._filled = set[int]()  # items that have gradients
        self._last = sizes.num_stages - 1
        self._shared = None if state.items is None else SharedTiers(state.items)
        self._in_flight = self._kept = self._inputs = self._posted = 0
        self._handed = 0  # to a part or a stage of this rank, which has not taken it yet
        self._factors: dict[int, int] = defaultdict(int)  # by batch, until it is reduced
        self._waiting: dict[Kind, int] = {}  # outputs to be sent
        self._sends: deque[int] = deque(maxlen=max_unfinished_sends(sizes.num_ranks))
        self.pool = self.beside = 0  # the most of micro-batches, and of the norm and the update
        self.most = StageMemory(
            state.weights, state.master, state.gradients, state.optimizer, 0, 0, 0, 0, 0, "")

    def follow(self, action: Action) -> None:
        """Goes past an action."""
        kind, row, parts = action.kind, ROWS[action.kind], self._footprints[action.stage]
        if self._shared is not None:
            self._follow_shared(self._shared, action)
            if self._is_anew(self._shared, action):
                parts = self._anew[action.stage]
        fp = parts[action.part] if kind in COMPUTE else parts[0 if row.flow > 0 else -1]
        if row.met_by:
            self._sends.append(self._waiting.pop(kind))
        elif row.side:
            self._posted += fp.received if row.flow > 0 else fp.returned
        taken = self._take(action, fp) if row.receive else 0
        self._compare(action, fp, taken)
        if action.part == 0:
            self._in_flight += row.holds
        if kind in (Kind.B, Kind.W):
            self._factors[action.microbatch // self._m] += fp.factors
        elif kind in (Kind.NORM, Kind.UPDATE):
            self._factors.pop(action.microbatch, None)
        if row.of_stash:
            self._kept += sum(part.moved for part in parts) * ((kind is Kind.RELOAD) - (kind is Kind.EVICT))
        elif kind is Kind.W:
            self._kept -= fp.waiting
        elif row.receive:
            self._give(action, fp)

    def _follow_shared(self, shared: SharedTiers, action: Action) -> None:
        """Goes past an action: what replicas share comes and goes. What nothing was added to is not summed."""
        if action.kind is Kind.RELEASE and action.microbatch not in self._filled:
            fault = shared.follow(action, None)
        else:
            fault = shared.follow(action)
        assert not fault, fault
        if action.kind is Kind.RELEASE:
            self._filled.discard(action.microbatch)
        elif ROWS[action.kind].adds:
            fp = self._footprints[action.stage][action.part]
            if {Kind.I: fp.early, Kind.W: fp.late}.get(action.kind, 1):
                self._filled.update(shared.added(action))

    def _is_anew(self, shared: SharedTiers, action: Action) -> bool:
        """Whether a backward adds to gradients that are made for it."""
        key = action.stage, action.part, action.microbatch
        if shared.made and action.kind is Kind.I:
            self._made.add(key)
        return bool(shared.made) or (action.kind is Kind.W and key in self._made)

    def _beside(self, action: Action, step: int) -> tuple[bool, Footprint | None]:
        """Whether anything comes before (after) the part of an action in the model, and what of it this rank has."""
        part, parts = action.part + step, self._footprints[action.stage]
        if 0 <= part < len(parts):
            return True, parts[part]
        there = 0 <= action.stage + step <= self._last
        other = self._footprints.get(action.stage + step)
        return there, other[0 if step > 0 else -1] if other else None

    def _take(self, action: Action, fp: Footprint) -> int:
        """Takes what an action computes with: bytes of it while it does."""
        forth = ROWS[action.kind].flow > 0
        there, own = self._beside(action, -1 if forth else 1)
        if own is not None:
            self._handed -= own.message if forth else fp.message
        elif there:
            self._posted -= fp.received if forth else fp.returned
        return (fp.input if action.kind is Kind.F else fp.message) if there else 0

    def _compare(self, action: Action, fp: Footprint, taken: int) -> None:
        """Notes what is there while an action runs, if that is the most so far."""
        shared = self._shared
        activations = self._kept + self._inputs + sum(self._factors.values())
        communication = self._posted + taken + self._handed + sum(self._waiting.values()) + sum(self._sends)
        transient = self._transient(action, fp) + (0 if shared is None else shared.num_bytes())
        if action.kind in COMPUTE:
            self.pool = max(self.pool, activations + transient)
        else:
            self.beside = max(self.beside, transient)
        if activations + communication + transient > self.most.total - self.most.static:
            self.most = replace(self.most, activations=activations, communication=communication, transient=transient,
                                in_flight=self._in_flight, during=str(action))

    def _transient(self, action: Action, fp: Footprint) -> int:
        """What an action takes on top."""
        if action.kind is Kind.UPDATE:
            return self._state.updates[action.part]
        backward = fp.backward if action.microbatch % self._m else fp.first_backward
        return {Kind.F: fp.forward, Kind.B: fp.whole_backward or backward, Kind.I: backward,
                Kind.W: fp.weight_gradients, Kind.NORM: self._state.norm}.get(action.kind, 0)

    def _give(self, action: Action, fp: Footprint) -> None:
        """Keeps what a forward leaves, or gives it up after a backward, and the output or the input's gradient."""
        (has_input, before), (has_output, after) = self._beside(action, -1), self._beside(action, 1)
        if action.kind is Kind.F:
            self._kept, self._inputs = self._kept + fp.kept, self._inputs + has_input * fp.input
            if after is not None:
                self._handed += fp.message
            elif has_output:
                self._waiting[Kind.SEND_F] = fp.output
            return
        self._kept += fp.waiting * (action.kind is Kind.I) - fp.kept
        self._inputs -= has_input * fp.input
        if before is not None:
            self._handed += before.message
        elif has_input:
            self._waiting[Kind.SEND_B] = fp.returning
