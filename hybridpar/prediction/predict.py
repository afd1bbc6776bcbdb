"""Predict the peak memory of every stage before anything runs, by walking its list of actions with
its footprint.

static          weights (all versions), fp32 master, gradient buffers, optimizer state; on CPUs
                also the copy of the state that a checkpoint is written from during training (a
                GPU's copy is in host memory)
activations     inputs and kept tensors of the micro-batches in flight, and gradients of earlier
                ones that are kept as factors until the batch is reduced
communication   posted receives, waiting outputs and unfinished sends, each a tp rank's slice;
                the message received last, unsharded
transient       additional memory of the action at the peak: a forward, a backward, the norm,
                the update; with ZeRO-2 and 3 also unsharded gradients and weights of segments

The plan determines what is in flight at each time, so no rules about schedules are needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from hybridpar.config import Config
from hybridpar.errors import config_error
from hybridpar.job import JobPlan
from hybridpar.models.build import Recomputation
from hybridpar.optim import divides_all
from hybridpar.prediction.footprint import Buffers, Footprint, trace_stage
from hybridpar.prediction.ghost_state import StateFootprint, trace_state
from hybridpar.prediction.walk import MemoryWalk, RecordedWalk, StageMemory, together
from hybridpar.runtime.graphs import unsupported
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.passes.residency import add_residency
from hybridpar.schedules.passes.rooms import UNLIMITED, Room, Rooms, Tide
from hybridpar.schedules.schedule_table import PipelineShape, Schedule
from hybridpar.state.residency.segments import Segments

_MOST_BLOCKS = 2**11
_MOST_TOKENS = 2**22
_MOST_MICROBATCHES = 2**16
_MOST_RANKS = 2**17
Tracer = Callable[[Config, range, Recomputation, Buffers, torch.device], Footprint]


def predict(
    job: JobPlan,
    *,
    device: torch.device | None = None,
    trace: Tracer = trace_stage,
    ranks: Iterable[int] | None = None,
) -> list[StageMemory]:
    """Return the peak memory of one process of each pipeline rank, as the allocator of `device`
    counts it.

    If full parameters lie on one replica each, the replica with the most memory counts. Memory
    inside CPU kernels is left out: up to some megabytes per thread.

    Args:
        job: The job.
        device: The device, whose type this machine need not have. None: `default_device`.
        trace: A tracer; one that caches for many configurations (layers.Footprints).
        ranks: The pipeline ranks to predict. None: all.
    """
    pipeline = _Pipeline(job, device or default_device(job.config), trace)
    everyone = range(job.shape.num_ranks)
    return [pipeline.memory(rank) for rank in (everyone if ranks is None else ranks)]


def rooms_of(
    job: JobPlan,
    rank: int,
    shape: PipelineShape | None = None,
    *,
    device: torch.device | None = None,
) -> Rooms:
    """Return the room of a rank's state: memory.budget, what memory.limit leaves, or all there is.

    Args:
        job: The job.
        rank: The pipeline rank.
        shape: The shape of the pipeline that the plans will be of. None: the job's.
        device: As for `predict`.
    """
    device = device or default_device(job.config)
    return _Pipeline(job, device, trace_stage, shape or job.shape).rooms(rank)


def check_size(config: Config) -> None:
    """Refuse a configuration whose prediction would take very long or much memory, as a malicious
    one may.

    Raises:
        ConfigError: The configuration is too large.
    """
    parallel = config.parallel
    train = config.train
    stages = parallel.pp * config.pipeline.num_virtual_stages
    sizes = {
        "model": ("blocks", config.model.num_blocks, _MOST_BLOCKS),
        "train.micro_batch_size": (
            "tokens in a micro-batch",
            train.micro_batch_size * config.model.tokens_per_sample,
            _MOST_TOKENS,
        ),
        "pipeline.num_microbatches": (
            "micro-batches on all stages",
            config.pipeline.num_microbatches * stages,
            _MOST_MICROBATCHES,
        ),
        "parallel": ("ranks", parallel.num_ranks, _MOST_RANKS),
    }
    for field, (what, number, most) in sizes.items():
        if number > most:
            raise config_error(
                field,
                number,
                f"too large for a prediction: there are {number} {what}, and at most {most} are "
                f"supported",
                str(most),
            )


class _Pipeline:
    """The ranks of a pipeline; segments of equal blocks are traced once."""

    def __init__(
        self,
        job: JobPlan,
        device: torch.device,
        trace: Tracer,
        shape: PipelineShape | None = None,
    ):
        self._job = job
        self._config = job.config
        self._device = device
        self._trace = trace
        if shape is None and job.config.compression.takes_factors:
            shape = job.shape
        self.shape = _enough(job.schedule, job.shape) if shape is None else shape
        self._traced: dict[object, Footprint] = {}
        self._states: dict[object, StateFootprint] = {}

    def rooms(self, rank: int) -> Rooms:
        """Return the room of a rank's state."""
        memory = self._config.memory
        if memory.limit:
            return Rooms(
                Tide(memory.limit, lambda: self.walk(rank).follow),
                Tide(memory.limit, lambda: self.walk(rank, evaluates=True).follow),
            )
        room = Room(memory.budget) if memory.budget else UNLIMITED
        return Rooms(room, room)

    def walk(self, rank: int, *, evaluates: bool = False) -> MemoryWalk:
        """Return the walk of a rank's memory, at its start."""
        buffers = self._buffers(rank)
        segments = self._job.segments(rank)
        footprints = self._footprints(segments, buffers)
        state = self._state(rank, footprints)
        allocating = None
        if state.pools:
            allocating = self._footprints(segments, replace(buffers, allocates_each_time=True))
        make = RecordedWalk if self._is_recorded(rank) else MemoryWalk
        return make(
            footprints,
            self.shape,
            state,
            allocating,
            self._job.send_window,
            evaluates=evaluates,
        )

    def _is_recorded(self, rank: int) -> bool:
        """Return whether the rank's micro-batches run as CUDA graphs."""
        return (
            self._device.type == "cuda"
            and self._config.train.cuda_graphs
            and not self._job.segments(rank).is_divided
            and not unsupported(self._job, rank)
        )

    def _num_batches(self, rank: int) -> int:
        """Return the number of batches of the plan that reaches a rank's peak.

        In a pipeline that drains, two long batches show every moment of the steady state: the
        second one begins with the unfinished sends of the first, at most `send_window`, and the
        first one ends with the receives of the second.
        """
        job = self._job
        most = batches_to_peak(job)
        moves = job.segments(rank).is_divided or self._config.memory.host_optimizer
        is_long = self.shape.num_microbatches >= 2 * job.send_window
        return min(most, 2) if job.schedule.flush and is_long and not moves else most

    def _buffers(self, rank: int) -> Buffers:
        job = self._job
        return Buffers(
            job.num_versions(rank), job.schedule.num_gradient_buffers, job.num_away(rank) > 0
        )

    def _state(self, rank: int, footprints: Mapping[int, Sequence[Footprint]]) -> StateFootprint:
        """Return the state of a rank."""
        job = self._job
        config = self._config
        buffers = self._buffers(rank)
        held = job.held(rank)
        parts = job.segments(rank)
        # stages of a rank may share a tied weight, and sharded state is divided over all stages of
        # a rank
        common = config.parallel.zero > 0 or (
            rank == 0 and job.shape.is_v and config.model.tie_embeddings
        )
        uneven = config.parallel.zero > 0 and not divides_all(
            config.optim
        )  # full parameters lie on one replica each
        states = job.state_policy(buffers.versions, buffers.gradients)
        if parts.is_divided or (len(held) > 1 and common) or uneven or states.on_host:
            # replicas and tp ranks have equal state for equal layers; segments are numbered
            first = rank * config.parallel.dp_cp * config.parallel.tp
            # equal layers have equal state; parts have numbers
            alone = parts.is_divided or states.moves or not config.has_equal_layers
            alike = (
                rank
                if alone
                else tuple(
                    (len(blocks), 0 in blocks, config.model.num_blocks - 1 in blocks)
                    for blocks in held.values()
                )
            )
            if (key := (alike, buffers)) not in self._states:
                self._states[key] = trace_state(
                    job, first, self.shape, self._device, self.rooms(rank).training
                )
            return self._states[key]
        return together(fp for of_stage in footprints.values() for fp in of_stage)

    def memory(self, rank: int) -> StageMemory:
        """Return the peak memory of a rank."""
        job = self._job
        schedule = job.schedule
        found_walk = self.walk(rank)
        state = found_walk.state
        actions = lower(
            schedule,
            self.shape,
            rank,
            schedule.options.sync_steps,
            self._num_batches(rank),
            parts=state.division,
        )
        actions = add_residency(actions, state.pools)
        found = found_walk.peak(actions)
        each = [fp for of_stage in found_walk.footprints.values() for fp in of_stage]
        held = job.held(rank)
        placed = self._placed(found, state)
        return replace(
            placed,
            moved=sum(fp.moved for fp in each) // len(held),
            file=self.rooms(rank).training.excess(placed.state + state.whole, placed.total),
        )

    def _footprints(self, segments: Segments, buffers: Buffers) -> dict[int, list[Footprint]]:
        """Return the footprints of the segments of a rank's stages."""
        stages = segments.of_stage
        recomputed = self._job.recomputed

        def of_part(stage: int, number: int, blocks: range) -> Footprint:
            handed = (
                number > 0 or stage - 1 in stages,
                number + 1 < len(stages[stage]) or stage + 1 in stages,
            )
            first = self._job.shape.num_frozen
            wants = stage > first or (number > 0 and stage == first)
            here = replace(buffers, handed=handed, wants_gradient=wants or stage == 0)
            return self._footprint(blocks, recomputed[stage], here)

        return {
            stage: [of_part(stage, number, blocks) for number, blocks in enumerate(cut)]
            for stage, cut in stages.items()
        }

    def _footprint(self, blocks: range, again: Recomputation, buffers: Buffers) -> Footprint:
        model = self._config.model
        ends = (0 in blocks, model.num_blocks - 1 in blocks)
        pattern = (
            len(blocks) if self._config.has_equal_layers else blocks,
            ends,
            tuple((number in again.blocks, number in again.selective) for number in blocks),
            again.whole,
            buffers,
            blocks.stop == model.num_blocks - 1,
        )  # a message that only the head receives is uncompressed
        if pattern not in self._traced:
            self._traced[pattern] = self._trace(self._config, blocks, again, buffers, self._device)
        return self._traced[pattern]

    def _placed(self, memory: StageMemory, state: StateFootprint) -> StageMemory:
        """Return the memory with state moved to host memory, and with the copy for checkpoints."""
        config = self._config
        on_gpu = self._device.type == "cuda"
        if config.saves_beside_training:
            copy = memory.weights + memory.master + memory.optimizer
            memory = replace(memory, host=copy) if on_gpu else replace(memory, checkpoint=copy)
        if on_gpu:
            master, optimizer = state.hosted
            memory = replace(
                memory,
                host=memory.host + master + optimizer,
                master=memory.master - master,
                optimizer=memory.optimizer - optimizer,
            )
        return memory


def kept_by_stage(
    job: JobPlan, device: torch.device, trace: Tracer = trace_stage
) -> tuple[int, ...]:
    """Return the activation memory that one micro-batch holds on each stage from forward to
    backward, in bytes."""
    held = [
        trace(job.config, blocks, again, Buffers(1, 1), device)
        for blocks, again in zip(job.split, job.recomputed, strict=True)
    ]
    return tuple(each.kept + each.input for each in held)


def default_device(config: Config) -> torch.device:
    """Return the device type of the configuration; with train.device = "auto", this machine's."""
    if config.train.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.train.device)


def batches_to_peak(job: JobPlan) -> int:
    """Return the number of batches after which a run has reached its steady state, including
    unfinished sends."""
    needed = 3 + -(-2 * job.send_window // job.shape.num_microbatches)
    return min(needed, job.config.train.num_steps)


def _enough(schedule: Schedule, shape: PipelineShape) -> PipelineShape:
    """Return the shape with only as many micro-batches as can change the peak: further ones repeat
    these."""
    if not schedule.repeats(shape):
        return shape
    # micro-batches on stale weights
    least = shape.num_ranks - 1 + (schedule.options.early_switch or 0)
    few = replace(
        shape, num_microbatches=min(shape.num_microbatches, max(4 * shape.num_ranks + 4, least))
    )
    same = all(
        schedule.warmup(few, rank) == schedule.warmup(shape, rank)
        for rank in range(shape.num_ranks)
    )
    return few if same else shape
