"""One rank's training engine: its stages, its state, and the executor that runs its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm import all_reduce
from hybridpar.config import Config
from hybridpar.data import DataStart
from hybridpar.data.loader import Loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.runtime import graphs
from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.runtime.executor import Executor
from hybridpar.runtime.graphs import MicroBatchGraphs
from hybridpar.runtime.slow_tier import FileTier, HostTier, in_host_memory
from hybridpar.runtime.stage import Stage
from hybridpar.runtime.stage_transport import StageTransport
from hybridpar.schedules.action import PER_BATCH, PER_ITEM, Action
from hybridpar.schedules.passes.lowering import forward_actions, lower
from hybridpar.schedules.passes.segments import Division
from hybridpar.schedules.schedule_table import drained
from hybridpar.schedules.sizes import PipelineShape
from hybridpar.state import RankState, StatePolicy
from hybridpar.state.fp8 import unquantized_layers
from hybridpar.state.host import HostWork
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.device_tier import state_memory
from hybridpar.state.residency.segments import Parts
from hybridpar.state.residency.shares import WholeChunks
from hybridpar.state.residency.tiered import ItemMemory, TieredMemory, slow_folder
from hybridpar.train.batches.batch_actions import BatchActions
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.batches.batch_results import OnGradients, OnStep, TrainCall
from hybridpar.train.batches.source import LoaderSource
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.forecasts.offload_room import reserved_bytes
from hybridpar.train.replicas import SharedChunks
from hybridpar.train.tiers import RankTiers

__all__ = ["Engine", "Residency", "StepResult"]
_log = logging.getLogger(__name__)

Actions = Iterator[Action]


def identity(actions: Actions) -> Actions:
    """Return the actions as they are."""
    return actions


@dataclass(frozen=True)
class Residency:
    """Where a rank keeps its state and its activations. None: as the configuration says.

    Attributes:
        memory: Holds the state.
        host_work: Does the host's work, if the host updates.
        stash: Keeps the activations that leave, if any do.
    """

    memory: ItemMemory | WholeChunks | None = None
    host_work: HostWork | None = None
    stash: ActivationOffloader | None = None


AS_CONFIGURED = Residency()


class Engine:
    """Trains this rank's part of the model of `job` on `grid`.

    Every method that is not a property is collective over the grid.

    Args:
        job: All that follows from the configuration.
        grid: The process grid.
        device: The device of this rank.
        policy: Decides what happens to each batch. Default: as the configuration says.
        wrap_plan: Takes the plan of `train` and yields the same actions; it may do something
            between two.
        residency: Where state and activations are kept.

    Attributes:
        stage: All blocks of the rank as one, for whatever has to do with parameters.
        data_start: The place of batches in the stream of data, which loaders are made with.
    """

    def __init__(
        self,
        job: JobPlan,
        grid: ProcessGrid,
        device: torch.device,
        *,
        policy: BatchPolicy | None = None,
        wrap_plan: Callable[[Actions], Actions] = identity,
        residency: Residency = AS_CONFIGURED,
    ):
        config = job.config
        self.job = job
        self.config = config
        self.grid = grid
        self.device = device
        self.policy = policy or BatchPolicy(job)
        self._wrap_plan = wrap_plan
        self.sizes = job.shape
        self.schedule = job.schedule
        self.loss_names = config.model.losses
        states = job.state_policy(
            self.policy.num_versions(grid.pp.rank), job.schedule.num_gradient_buffers
        )
        self.parts = job.segments(grid.pp.rank)
        blocks = build_held_blocks(config, grid, self.parts, states)
        stages = build_stages(job, blocks, self.parts)
        self.stage = Stage(blocks)
        memory = residency.memory
        if memory is None:
            memory = state_memory(config, device, states)
        self.state = RankState(
            self.stage,
            grid,
            states,
            device,
            parts=self.parts.ranges,
            memory=memory,
            host_work=residency.host_work,
        )
        warn_of_unquantized_layers(config, grid, self.stage)
        self._division = self.parts.division(self.state)
        self.touches = build_touches(memory, self.state, self.parts, self.sizes, self._division)
        self.tiers = build_tiers(memory, self.touches)
        self.whole = memory.whole if isinstance(memory, ItemMemory) else memory
        self.replicas = (
            None
            if self.whole is None
            else SharedChunks(self.whole, self.state, self.parts, self.sizes, self.tiers)
        )
        self.state.initialize(config.train.seed)
        self.executor = Executor(
            stages,
            self.state.weights,
            StageTransport.of(job, grid, states.dtype, device),
            self.sizes,
            tiers=self.replicas or self.tiers,
            stash=self._build_stash(residency),
            graphs=build_graphs(job, stages, self.parts, self.state, device),
        )
        self.batch_actions = BatchActions(
            self.policy, self.state, self.executor, self.parts, self._division, self.tiers
        )
        self.data_start = DataStart()

    def _build_stash(self, residency: Residency) -> ActivationOffloader | None:
        """Build the store of this rank's activations that leave; None if none do."""
        if not self.job.num_away(self.grid.pp.rank):
            return None
        if residency.stash is not None:
            return residency.stash
        if in_host_memory(self.device):
            return ActivationOffloader(
                HostTier(self.device, reserved_bytes(self.job, self.grid.pp.rank))
            )
        return ActivationOffloader(FileTier(slow_folder(self.config)))

    @property
    def batches_done(self) -> int:
        """Batches that this rank's weights have taken."""
        return self.batch_actions.updates.batches_done

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the losses and metrics of a batch, all of which are summed over the grid."""
        return self.batch_actions.results.names

    def request_stop(self, wanted: bool = True) -> None:
        """Ask all ranks to end `train` early, with the sums of the next batch; or take it back."""
        self.batch_actions.results.request_stop(wanted)

    def train(
        self,
        loader: Loader,
        num_batches: int,
        on_step: OnStep,
        on_gradients: OnGradients | None = None,
    ) -> None:
        """Train `num_batches` batches from where training stands, then drain.

        Ends early, on the same batch on all ranks, when any rank has called `request_stop`, or the
        judge has found an anomaly that is not just skipped; results of the batches that were under
        way come after it. Several sites end when their messages have told all of them.

        Args:
            loader: The batches.
            num_batches: How many to train.
            on_step: Called with the result of each batch, after its update.
            on_gradients: Called with a batch and its gradients before its update: summed over the
                whole batch, not clipped, to be copied if kept.
        """
        first = self.batches_done
        self.policy.start_at(first)
        results = self.batch_actions.results
        results.start(TrainCall(loader, num_batches, on_step, on_gradients), first)
        if self.state.outer is not None:
            self.state.outer.go_on(first)
        recorded = self.executor.graphs
        source = LoaderSource(loader, self.config, self.device, fixed_shapes=recorded is not None)
        actions = self._until_end(self._with_moves(self.plan(num_batches)))
        with nullcontext() if recorded is None else recorded.stream():
            self.executor.run(self._wrap_plan(actions), source, self.batch_actions)
            results.finish()

    def close(self) -> None:
        """Give back the file and the memory of what comes and goes, and end the threads that move
        it."""
        self.state.memory.close()
        if self.executor.stash is not None:
            self.executor.stash.tier.close()

    def plan(self, num_batches: int) -> Iterator[Action]:
        """This rank's actions for the next batches; the synchronous ones among them come first."""
        first = self.policy.first
        stop = self.policy.first + num_batches
        switch = min(max(self.schedule.options.sync_steps, first), stop)
        for schedule, start, end in (
            (drained(self.schedule), first, switch),
            (self.schedule, switch, stop),
        ):
            if start < end:
                yield from lower(
                    schedule,
                    self.sizes,
                    self.grid.pp.rank,
                    start,
                    end - start,
                    parts=self._division,
                )

    def _with_moves(self, actions: Iterator[Action]) -> Iterator[Action]:
        """The plan with what it moves between the tiers of the state, or to and from replicas."""
        moves = self.replicas or self.tiers
        return actions if moves is None else moves.plan(actions)

    def _until_end(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The plan without the batches that a stop request has cut off: draining is leaving out
        what is not begun."""
        m = self.sizes.num_microbatches
        results = self.batch_actions.results
        for action in actions:
            batch = action.microbatch if action.kind in PER_BATCH else action.microbatch // m
            if action.kind in PER_ITEM or batch < results.end:
                yield action
            elif self.batches_done >= results.end:
                return

    # -- checkpoints

    def state_meta(self) -> dict[str, Any]:
        """The state besides `state.tensors`, equal on all ranks; plain JSON values."""
        return {
            "batches_done": self.batches_done,
            "versions": list(self.state.weights.live_versions),
            "num_updates": self.state.optimizer.num_updates,
            **self.policy.state(),
            "data_start": asdict(self.data_start),
            "outer_start": 0 if self.state.outer is None else self.state.outer.timeline.since,
        }

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Puts back `state.tensors` and `state_meta` of the same grid, or what checkpoint.restate
        has made of those of another one.

        Raises: CheckpointError naming the first tensor that is missing or of another shape.
        """
        self.state.load(tensors, meta["versions"], meta["num_updates"], meta.get("outer_start", 0))
        self.policy.load_state(meta)
        self.batch_actions.updates.resume_at(meta["batches_done"])
        self.data_start = DataStart(**meta.get("data_start", {}))

    # -- evaluation

    @torch.no_grad()
    def evaluate(self, loader: Loader, num_batches: int) -> dict[str, float]:
        """Return the partial losses and metrics of the newest weights over the first batches of
        `loader`, by name.

        There is no dropout. Each is a mean over what it counts (labels, or samples) in all of these
        batches, however they are divided into batches, micro-batches, replicas and sites; 0 where
        no label counts.
        """
        newest = self.state.weights.newest
        assert self.batches_done == newest, "evaluation needs a drained pipeline"
        actions = self._with_moves(
            forward_actions(
                self.sizes,
                self.grid.pp.rank,
                num_batches * self.sizes.num_microbatches,
                version=newest,
                parts=self._division,
            )
        )
        with self.state.unpredicted():
            evaluated = num_batches, sum(map(loader.num_targets, range(num_batches)))
            self.executor.run(actions, LoaderSource(loader, self.config, self.device, evaluated))
        totals = torch.zeros(len(self.number_names), dtype=torch.float64, device=self.device)
        for batch in range(num_batches):
            losses = self.executor.losses.pop(batch, {})
            if self.grid.is_first_copy:
                totals += totals.new_tensor([float(losses.get(n, 0.0)) for n in self.number_names])
        all_reduce(totals, self.grid.world)
        return dict(zip(self.number_names, (totals / self.grid.site.size).tolist(), strict=True))


# -- decisions of the constructor


def build_held_blocks(
    config: Config, grid: ProcessGrid, parts: Parts, states: StatePolicy
) -> dict[int, nn.Module]:
    """Build the blocks of this rank's stages on the meta device, by number."""
    numbers = [n for ranges in parts.of_stage.values() for blocks in ranges for n in blocks]
    return build_blocks(
        config.model,
        grid.tp,
        numbers,
        kernels=config.kernels,
        sequence=config.parallel.sequence,
        dtype=states.dtype,
        groups=config.optim.groups,
    )


def build_stages(
    job: JobPlan, blocks: Mapping[int, nn.Module], parts: Parts
) -> dict[int, list[Stage]]:
    """Build this rank's stages from its blocks, each as a list of its parts."""
    stages = {}
    for stage, ranges in parts.of_stage.items():
        stages[stage] = [
            Stage({n: blocks[n] for n in numbers}, job.recomputed[stage], job.config.model)
            for numbers in ranges
        ]
    return stages


def build_touches(
    memory: ItemMemory | WholeChunks | None,
    state: RankState,
    parts: Parts,
    sizes: PipelineShape,
    division: Division,
) -> AccessMap | None:
    """Build the map from actions to the state that they touch; None if state does not move."""
    if not isinstance(memory, ItemMemory):
        return None
    return AccessMap(memory, state, parts, sizes, norms=division.norms)


def build_tiers(
    memory: ItemMemory | WholeChunks | None, touches: AccessMap | None
) -> RankTiers | None:
    """Build the tiers of the state; None if all of it is always resident."""
    if touches is None or not isinstance(memory, TieredMemory):
        return None
    return RankTiers(memory, touches)


def build_graphs(
    job: JobPlan,
    stages: Mapping[int, Sequence[Stage]],
    parts: Parts,
    state: RankState,
    device: torch.device,
) -> MicroBatchGraphs | None:
    """Build the CUDA graphs of this rank's micro-batches; None if they run kernel by kernel."""
    train = job.config.train
    # a graph's memory is a pool apart, in which blocks cannot be followed
    if not train.cuda_graphs or device.type != "cuda" or train.record_memory or parts.is_divided:
        return None
    return graphs.recorder(
        job,
        {stage: whole for stage, (whole,) in stages.items()},
        state.gradients,
        device,
        state.reducer.summed_beside,
        state.grid,
    )


def warn_of_unquantized_layers(config: Config, grid: ProcessGrid, stage: Stage) -> None:
    """Warn once of the linear layers that train.fp8 leaves in bf16."""
    if not config.train.fp8 or not grid.is_first_copy:
        return
    if others := unquantized_layers(stage):
        _log.warning(
            "train.fp8 has no effect on %d linear layers, which stay in bf16: %s%s",
            len(others),
            ", ".join(others[:3]),
            ", .." if len(others) > 3 else "",
        )
