"""One rank's training engine: its stages, its state, and the executor that runs its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm import all_reduce
from hybridpar.config import Config
from hybridpar.data import DataStart
from hybridpar.data.loader import Loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.custom_blocks import context_of
from hybridpar.models.heads import ACCURACY
from hybridpar.prediction.predict import rooms_of
from hybridpar.runtime import graphs
from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.runtime.executor import Executor
from hybridpar.runtime.graphs import MicroBatchGraphs
from hybridpar.runtime.slow_tier import FileTier, HostTier, in_host_memory
from hybridpar.runtime.stage import Stage, build_held_blocks
from hybridpar.runtime.stage_transport import StageTransport
from hybridpar.runtime.state_moves import StateMoves
from hybridpar.schedules.action import PER_BATCH, PER_ITEM, Action, Kind
from hybridpar.schedules.passes.lowering import forward_actions, lower
from hybridpar.schedules.schedule_table import Schedule, drained
from hybridpar.state import RankState
from hybridpar.state.fp8 import unquantized_layers
from hybridpar.state.host import HostWork
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.device_tier import state_memory
from hybridpar.state.residency.segments import Segments
from hybridpar.state.residency.shares import ShardedMemory
from hybridpar.state.residency.tiered import slow_folder
from hybridpar.train.batches.batch_actions import BatchActions
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.batches.batch_results import OnGradients, OnStep, TrainCall
from hybridpar.train.batches.source import LoaderSource
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.forecasts.offload_room import reserved_bytes

__all__ = ["Engine", "Residency", "StepResult"]
_log = logging.getLogger(__name__)

Actions = Iterator[Action]


def identity(actions: Actions) -> Actions:
    """Return the actions unchanged: the default `wrap_plan`."""
    return actions


@dataclass(frozen=True)
class Residency:
    """Stores for a rank's state and activations, which replace the configured ones.

    None keeps the configured store.

    Attributes:
        memory: Holds weights, gradients and optimizer state.
        host_work: Runs the optimizer on the host, if it is there.
        offloader: Offloads activations.
    """

    memory: ShardedMemory | None = None
    host_work: HostWork | None = None
    offloader: ActivationOffloader | None = None


AS_CONFIGURED = Residency()


class Engine:
    """Train this rank's stages of the model of `job` on `grid`.

    The plan of a training step orders the forwards, backwards, sends and receives of micro-batches.
    The executor runs it, and leaves what concerns a whole batch to `BatchActions`: reduce, norm and
    update.

    Every method that is not a property is collective over the grid.

    Args:
        job: Everything derived from the configuration: shape, schedule, segments, recomputation.
        policy: Decides about each batch: loss scale, learning rate, clip or skip. Default: the
            configured policy.
        wrap_plan: Takes the plan's actions and yields the same actions. It may act between two of
            them; fault injection and tests do.
        residency: Stores that replace the configured ones; for tests and measurements.

    Attributes:
        stage: All blocks of this rank in one module, for code that only handles parameters.
        data_start: Position of the batches in the data stream; loaders start there.
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
        self.shape = job.shape
        self.schedule = job.schedule
        self.loss_names = config.model.losses
        self.context = context_of(config.model, grid.cp)
        states = job.state_policy(
            self.policy.num_versions(grid.pp.rank), job.schedule.num_gradient_buffers
        )
        segments = job.segments(grid.pp.rank)
        # Blocks are built on the meta device; `RankState` allocates their parameters in `memory`.
        blocks = build_held_blocks(states, grid, segments)
        stages = build_stages(job, blocks, segments)
        self.stage = Stage(blocks)
        memory = residency.memory or state_memory(states, device)
        self.state = RankState(
            self.stage,
            grid,
            states,
            memory,
            segments=segments,
            host_work=residency.host_work,
        )
        warn_of_unquantized_layers(config, grid, self.stage)
        self.moves = StateMoves(
            AccessMap(memory, self.state, self.shape),
            rooms_of(job, grid.pp.rank, device=device),
            residency.offloader or build_offloader(job, grid.pp.rank, device),
        )
        self.state.initialize(config.train.seed)
        self.executor = Executor(
            stages,
            self.state.weights,
            StageTransport.of(job, grid, states.dtype, device),
            self.shape,
            self.moves,
            graphs=build_graphs(job, stages, self.state, device),
        )
        self.batch_actions = BatchActions(self.policy, self.state, self.executor)
        self.data_start = DataStart()

    @property
    def batches_done(self) -> int:
        """Return the number of batches that have updated this rank's weights."""
        return self.batch_actions.updates.batches_done

    def request_stop(self, wanted: bool = True) -> None:
        """Ask all ranks to end `train` early; False withdraws the request.

        The request travels with the all-reduce of the next batch.
        """
        self.batch_actions.results.request_stop(wanted)

    def train(
        self,
        loader: Loader,
        num_batches: int,
        on_step: OnStep,
        on_gradients: OnGradients | None = None,
    ) -> None:
        """Train `num_batches` batches from the current one, then drain the pipeline.

        Training ends early, at the same batch on all ranks, when a rank has called `request_stop`
        or an anomaly has any policy but "skip". Batches that are in the pipeline by then still
        finish and report their results. Several sites end once an outer step has told all of them.

        Args:
            on_step: Called with each batch's result after its update.
            on_gradients: Called before each update with the batch number and its gradients, which
                are reduced over the whole batch and not yet clipped. Copy them to keep them.
        """
        first = self.batches_done
        self.policy.start_at(first)
        results = self.batch_actions.results
        results.start(TrainCall(loader, num_batches, on_step, on_gradients), first)
        if self.state.outer is not None:
            self.state.outer.go_on(first)
        recorded = self.executor.graphs
        stream = nullcontext() if recorded is None else recorded.stream()
        source = LoaderSource(
            loader,
            self.config,
            self.device,
            fixed_shapes=recorded is not None,
            context=self.context,
        )
        # Lazy, so that a stop request in a batch cuts off the batches that are not yet planned.
        actions = self._wrap_plan(self._until_end(self.moves.plan(self.plan(num_batches))))
        with stream:
            self.executor.run(actions, source, self.batch_actions)
            results.finish()
        self.moves.rest()

    def close(self) -> None:
        """Close the offload files, free pinned memory and end the threads that copy."""
        self.state.memory.close()
        self.moves.activations.tier.close()

    def plan(self, num_batches: int) -> Iterator[Action]:
        """Yield this rank's actions for the next batches: the synchronous warm-up, then the rest.

        The pipeline drains after each of the first `sync_steps` batches, so that they train on the
        newest weights whatever the schedule's delay is.
        """
        first = self.policy.first
        end = first + num_batches
        switch = min(max(self.schedule.options.sync_steps, first), end)
        yield from self._lower(drained(self.schedule), range(first, switch))
        yield from self._lower(self.schedule, range(switch, end))

    def _lower(self, schedule: Schedule, batches: range) -> Iterator[Action]:
        """Yield this rank's actions of a schedule for these batches."""
        if batches:
            yield from lower(
                schedule,
                self.shape,
                self.grid.pp.rank,
                batches.start,
                len(batches),
                parts=self.state.division,
            )

    def _until_end(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the plan without batches at or after `results.end`, which a stop request lowers.

        Skipping batches that have not begun drains the pipeline: the others run to their end.
        """
        m = self.shape.num_microbatches
        results = self.batch_actions.results
        is_cut = False
        for action in actions:
            batch = action.microbatch if action.kind in PER_BATCH else action.microbatch // m
            if (
                is_cut and action.kind is Kind.DROP
            ):  # the update that would make it again may be cut
                yield replace(action, kind=Kind.RELEASE)
            elif action.kind in PER_ITEM or batch < results.end:
                yield action
            elif self.batches_done >= results.end:
                return
            else:
                is_cut = True

    # -- checkpoints

    def state_meta(self) -> dict[str, Any]:
        """Return this rank's state besides `state.tensors`; plain JSON, equal on all ranks."""
        return {
            "batches_done": self.batches_done,
            "versions": list(self.state.weights.live_versions),
            "num_updates": self.state.optimizer.num_updates,
            **self.policy.state(),
            "data_start": asdict(self.data_start),
            "outer_start": 0 if self.state.outer is None else self.state.outer.timeline.since,
        }

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Load `state.tensors` and `state_meta` of a checkpoint.

        Args:
            tensors: Tensors of a checkpoint of the same grid, or resharded by checkpoint.restate.

        Raises:
            CheckpointError: A tensor is missing or has another shape; the message names the first.
        """
        self.state.load(tensors, meta["versions"], meta["num_updates"], meta.get("outer_start", 0))
        self.policy.load_state(meta)
        self.batch_actions.updates.resume_at(meta["batches_done"])
        self.data_start = DataStart(**meta.get("data_start", {}))

    # -- evaluation

    @torch.no_grad()
    def evaluate(self, loader: Loader, num_batches: int) -> dict[str, float]:
        """Return losses and metrics of the newest weights over the first batches of `loader`.

        With "accuracy" in train.eval_metrics, that is one of them. Dropout is off. Each number is a
        mean over all labels, or samples, of these batches, so it does not depend on micro-batch
        size, replicas or sites. It is 0 if no label counts.
        """
        newest = self.state.weights.newest
        assert self.batches_done == newest, "evaluation needs a drained pipeline"
        actions = self.moves.plan(
            forward_actions(
                self.shape,
                self.grid.pp.rank,
                num_batches * self.shape.num_microbatches,
                version=newest,
                parts=self.state.division,
            ),
            evaluates=True,
        )
        with self.state.unpredicted():
            evaluated = num_batches, sum(map(loader.num_targets, range(num_batches)))
            source = LoaderSource(loader, self.config, self.device, evaluated, context=self.context)
            self.executor.run(actions, source)
        self.moves.rest()
        has_accuracy = ACCURACY in self.config.train.eval_metrics
        names = (*self.batch_actions.results.names, *[ACCURACY] * has_accuracy)
        totals = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for batch in range(num_batches):
            losses = self.executor.losses.pop(batch, {})
            if self.grid.is_first_copy:
                totals += totals.new_tensor([float(losses.get(n, 0.0)) for n in names])
        all_reduce(totals, self.grid.world)
        return dict(zip(names, (totals / self.grid.site.size).tolist(), strict=True))


# -- decisions of the constructor


def build_stages(
    job: JobPlan, blocks: Mapping[int, nn.Module], segments: Segments
) -> dict[int, list[Stage]]:
    """Build this rank's stages from its blocks; a divided stage is a list of segments."""
    stages = {}
    for stage, ranges in segments.of_stage.items():
        stages[stage] = [
            Stage({n: blocks[n] for n in numbers}, job.recomputed[stage], job.config.model)
            for numbers in ranges
        ]
    return stages


def build_offloader(job: JobPlan, rank: int, device: torch.device) -> ActivationOffloader:
    """Create the offloader of a pipeline rank, which does nothing if its plan offloads nothing."""
    if not job.num_away(rank):
        return ActivationOffloader()
    if in_host_memory(device):
        return ActivationOffloader(HostTier(device, reserved_bytes(job, rank)))
    return ActivationOffloader(FileTier(slow_folder(job.config)))


def build_graphs(
    job: JobPlan,
    stages: Mapping[int, Sequence[Stage]],
    state: RankState,
    device: torch.device,
) -> MicroBatchGraphs | None:
    """Create the CUDA graphs of this rank's micro-batches, or None if kernels launch one by one."""
    train = job.config.train
    # Graphs allocate from a private pool, in which train.record_memory cannot follow blocks.
    is_divided = state.segments.is_divided
    if not train.cuda_graphs or device.type != "cuda" or train.record_memory or is_divided:
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
    """Warn about linear layers that train.fp8 leaves in bf16."""
    if not config.train.fp8 or not grid.is_first_copy:
        return
    if others := unquantized_layers(stage):
        _log.warning(
            "train.fp8 has no effect on %d linear layers, which stay in bf16: %s%s",
            len(others),
            ", ".join(others[:3]),
            ", .." if len(others) > 3 else "",
        )
