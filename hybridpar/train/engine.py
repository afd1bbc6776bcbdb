"""One rank's training engine: a stage, its state, the policy on its batches, and the executor that
runs them.

batch t:  F B F B ... last B      REDUCE      NORM                          UPDATE
          accumulate gradients    dp, ends    over the grid: norms,         wait; judge; clip; optimizer makes
          (buffer t mod n)        started     losses, stop request          W(t+1), or W(t) again of an anomaly
with the optimizer on the host:               gradients leave        HOST   wait; judge; the host makes W(t+1)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm import Work, all_reduce, all_reduce_async
from hybridpar.data import DataStart
from hybridpar.data.loader import Loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.pipeline.plan.action import PER_BATCH, PER_ITEM, Action, Kind
from hybridpar.pipeline.plan.passes import forward_actions, lower
from hybridpar.pipeline.plan.schedules import drained
from hybridpar.pipeline.run import graphs
from hybridpar.pipeline.run.executor import NO_HOOKS, BatchHooks, Executor
from hybridpar.pipeline.run.lane import Lane
from hybridpar.pipeline.run.slow_tier import FileTier, HostTier, in_host_memory
from hybridpar.pipeline.run.stage import Stage
from hybridpar.pipeline.run.stash import Stash
from hybridpar.state import RankState
from hybridpar.state.device_tier import state_memory
from hybridpar.state.fp8 import unquantized_layers
from hybridpar.state.host import HostWork
from hybridpar.state.shares import WholeChunks
from hybridpar.state.tiered import ItemMemory, TieredMemory, slow_folder
from hybridpar.state.touches import Touches
from hybridpar.train.offload_room import reserved_bytes
from hybridpar.train.policy import BatchPolicy
from hybridpar.train.replicas import SharedChunks
from hybridpar.train.sites import SiteTalk
from hybridpar.train.source import LoaderSource
from hybridpar.train.step_result import StepResult
from hybridpar.train.tiers import RankTiers

__all__ = ["Engine", "StepResult"]
_log = logging.getLogger(__name__)

Actions = Iterator[Action]


def as_planned(actions: Actions) -> Actions:
    """Changes nothing."""
    return actions


class Engine:
    """Builds this rank's part of the model of `job` on `grid` and trains it.

    `policy`: decides on each batch (None: as the configuration says). `tamper`: takes the plan of
    `train` and yields the same actions; it may do something between two. `memory`: for its state
    (None: as the configuration says). `host_work`: how the host works, where it updates.
    `stage`: all blocks of the rank as one, for whatever has to do with parameters.
    `stop_requested`: set it to end `train` early. `data_start`: the place of batches in the stream
    of data, which loaders are made with.
    Collectives: every method that is not a property must be called on all ranks of the grid.
    """

    def __init__(
        self,
        job: JobPlan,
        grid: ProcessGrid,
        device: torch.device,
        *,
        policy: BatchPolicy | None = None,
        tamper: Callable[[Actions], Actions] = as_planned,
        memory: ItemMemory | WholeChunks | None = None,
        host_work: HostWork | None = None,
    ):
        config = job.config
        self.job = job
        self.config = config
        self.grid = grid
        self.device = device
        self.policy = policy or BatchPolicy(job)
        self._tamper = tamper
        model = config.model
        self.sizes = job.shape
        self.schedule = job.schedule
        held = job.held(grid.pp.rank)
        self.loss_names = model.losses
        self.number_names = (*model.losses, *model.metric_names)
        """Names of the losses and metrics of a batch, all of which are summed over the grid."""
        states = job.state_policy(
            self.policy.num_versions(grid.pp.rank), job.schedule.num_gradient_buffers
        )
        numbers = [number for blocks in held.values() for number in blocks]
        sequence = config.parallel.sequence
        blocks = build_blocks(
            model,
            grid.tp,
            numbers,
            kernels=config.kernels,
            sequence=sequence,
            dtype=states.dtype,
            groups=config.optim.groups,
        )
        self.parts = job.segments(grid.pp.rank)
        stages = {
            stage: [
                Stage({n: blocks[n] for n in numbers}, job.recomputed[stage], model)
                for numbers in parts
            ]
            for stage, parts in self.parts.of_stage.items()
        }
        self.stage = Stage(blocks)
        if memory is None:
            memory = state_memory(config, device, states)
        self.state = RankState(
            self.stage,
            grid,
            states,
            device,
            parts=self.parts.ranges,
            memory=memory,
            host_work=host_work,
        )
        if config.train.fp8 and grid.is_first_copy and (others := unquantized_layers(self.stage)):
            _log.warning(
                "train.fp8 has no effect on %d linear layers, which stay in bf16: %s%s",
                len(others),
                ", ".join(others[:3]),
                ", .." if len(others) > 3 else "",
            )
        self._division = self.parts.division(self.state)
        self.touches = (
            Touches(memory, self.state, self.parts, self.sizes, norms=self._division.norms)
            if isinstance(memory, ItemMemory)
            else None
        )
        self.tiers = (
            RankTiers(memory, self.touches)
            if self.touches and isinstance(memory, TieredMemory)
            else None
        )
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
            Lane.of(job, grid, states.dtype, device),
            self.sizes,
            self.replicas or self.tiers,
            self._stash(),
        )
        if (
            config.train.cuda_graphs
            and device.type == "cuda"
            and not config.train.record_memory  # a graph's pool is apart
            and not self.parts.is_divided
        ):
            self.executor.graphs = graphs.recorder(
                job,
                {stage: whole for stage, (whole,) in stages.items()},
                self.state.gradients,
                device,
                self.state.reducer.summed_beside,
                grid,
            )
        self._talk: SiteTalk | None = None
        if self.state.outer is not None:
            self.state.outer.waits_by, self._talk = self.executor.wait, SiteTalk(self.state.outer)
        self._pending: dict[int, tuple[Tensor, Work]] = {}
        self.stop_requested = self._stopping = False
        self.batches_done = 0
        self.data_start = DataStart()

    def _stash(self) -> Stash | None:
        """Of what this rank's micro-batches keep; none where nothing leaves."""
        if not self.job.num_away(self.grid.pp.rank):
            return None
        return self._make_stash()

    def _make_stash(self) -> Stash:
        if in_host_memory(self.device):
            return Stash(HostTier(self.device, reserved_bytes(self.job, self.grid.pp.rank)))
        return Stash(FileTier(slow_folder(self.config)))

    def train(
        self,
        loader: Loader,
        num_batches: int,
        on_step: Callable[[StepResult], None],
        on_gradients: Callable[[int, dict[str, Tensor]], None] | None = None,
    ) -> None:
        """Runs `num_batches` batches from where training stands, then drains; `on_step` is called
        after every update, `on_gradients(batch, gradients)` before it: summed over the whole batch,
        not clipped, to be copied if kept.

        Ends early, on the same batch on all ranks, when any rank has set `stop_requested`, or the
        judge has found an anomaly that is not just skipped; those of the batches that were under
        way come after it. Several sites do so when their messages have told all of them.
        """
        self.policy.first = self.batches_done
        self._end = self.batches_done + num_batches
        self._on_step = on_step
        self._on_gradients = on_gradients
        if self.state.outer is not None:
            self.state.outer.go_on(self.batches_done)
        hooks = BatchHooks(
            self._before_backward,
            self._after_backward,
            self._reduce,
            self._norm,
            self._host,
            self._update,
            self._weight_gradients,
        )
        recorded = self.executor.graphs
        self._loader = loader
        source = LoaderSource(loader, self.config, self.device, fixed_shapes=recorded is not None)
        with nullcontext() if recorded is None else recorded.stream():
            self.executor.run(
                self._tamper(self._until_end(self._in_tiers(self.plan(num_batches)))), source, hooks
            )
            for batch in sorted(self._pending):
                self._report(self._take_result(batch), lead=0)
        self._stopping = False

    def close(self) -> None:
        """Gives back the file and the memory of what comes and goes, and ends the threads that move
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

    def _in_tiers(self, actions: Iterator[Action]) -> Iterator[Action]:
        """The plan with what it moves between the tiers of the state, or to and from replicas."""
        moves = self.replicas or self.tiers
        return actions if moves is None else moves.plan(actions)

    def _until_end(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The plan without the batches that a stop request has cut off: draining is leaving out
        what is not begun."""
        m = self.sizes.num_microbatches
        for action in actions:
            batch = action.microbatch if action.kind in PER_BATCH else action.microbatch // m
            if action.kind in PER_ITEM or batch < self._end:
                yield action
            elif self.batches_done >= self._end:
                return

    # -- what the plan's batch actions mean

    def _before_backward(self, action: Action) -> float:
        batch, index = divmod(action.microbatch, self.sizes.num_microbatches)
        is_last = index == self.sizes.num_microbatches - 1
        part = self.parts.number(action)
        if part == self.parts.last:  # whose backwards come first
            if index == 0:
                self.state.begin(batch)
            if is_last:
                self.state.close(batch, self.policy.loss_scale(batch))
        self.state.bind(batch, self.policy.versions_in(action), last=is_last, part=part)
        if action.kind is Kind.I:
            self.state.collect((part, action.microbatch))
        return self.policy.loss_gradient(action)

    def _weight_gradients(self, action: Action) -> None:
        is_last = (action.microbatch + 1) % self.sizes.num_microbatches == 0
        part = self.parts.number(action)
        self.state.apply((part, action.microbatch), last=is_last, part=part)

    def _after_backward(self, action: Action) -> None:
        batch, index = divmod(action.microbatch, self.sizes.num_microbatches)
        if self.parts.is_divided and index == self.sizes.num_microbatches - 1:
            part = self.parts.number(action)
            self.state.finish(batch, part)
            if self.tiers is not None and not self.state.is_alone(part):
                self.tiers.hold_gradients(batch, part)

    def _reduce(self, action: Action) -> None:
        self.state.reduce(action.microbatch)
        self.executor.watch(self.state.reducer.newest.is_done)

    def _norm(self, action: Action) -> None:
        if action.part == (
            self.state.num_groups - 1 if self._division.norms else 0
        ):  # which comes first
            self.executor.wait(partial(self.state.await_sums, action.microbatch))
        if action.part:
            self.state.square(action.microbatch, action.part)
        else:
            self._sum_up(action.microbatch)

    def _sum_up(self, batch: int) -> None:
        """Starts the grid-wide sums of a batch."""
        square = self.state.square_norm(batch)
        self.state.send(batch)
        stages = self.grid.pp.size
        totals = torch.zeros(
            stages + 1 + len(self.number_names), dtype=torch.float64, device=self.device
        )
        totals[self.grid.pp.rank] = square
        totals[stages] = float(self.stop_requested)
        losses = self.executor.losses.pop(batch, {})
        if self.grid.is_first_copy:
            for i, name in enumerate(self.number_names):
                totals[stages + 1 + i] = losses.get(name, 0.0)
        work = all_reduce_async(totals, self.grid.home)
        self.executor.watch(work.is_done)
        self._pending[batch] = totals, work

    def _host(self, action: Action) -> None:
        batch = action.microbatch
        host = self.state.host
        assert host is not None
        self._result = self._take_result(batch)
        self._show_gradients(batch)
        policy = self.policy
        self.state.begin_update(
            policy.learning_rate(batch),
            policy.factor(batch, self._result),
            predict=policy.predicts(batch),
        )
        self.executor.watch(host.is_done)

    def _show_gradients(self, batch: int) -> None:
        if self._on_gradients is not None:
            self._on_gradients(batch, self.state.full_gradients(batch))

    def _update(self, action: Action) -> None:
        batch = action.microbatch
        part = action.part
        is_last = action.part == self.state.num_groups - 1
        if self.config.norms_first:
            if self.state.host is not None:
                self.executor.wait(partial(self.state.host.wait, part))
            elif part == 0:
                self._result = self._take_result(batch)
                self._show_gradients(batch)
            if self._talk is not None:
                self._talk.before(self._result, self._stopping)
            self._apply(batch, part, self._result)
            if self._talk is not None:
                self._result = replace(self._result, news=self._talk.after(batch + 1))
            if is_last:
                self._report(
                    self._result, lead=3
                )  # no rank has begun batch + 3 when any applies this update
            return
        # no stage waits for another: the numbers of a batch are reported once all stages must have
        # finished it
        if part == 0:
            self.executor.wait(partial(self.state.await_sums, batch))
        if is_last:
            self._sum_up(batch)
        else:
            self.state.square(batch, part)
        if part == 0:
            self._show_gradients(batch)
        self._apply(batch, part, None)
        lag = -(-self.sizes.num_stages // self.sizes.num_microbatches)
        if is_last and batch - lag >= self.policy.first:
            self._report(self._take_result(batch - lag), lead=lag + 3)

    def _apply(self, batch: int, part: int, result: StepResult | None) -> None:
        """Makes a part of W(batch + 1); equal to W(batch) where the step is skipped. `result` None:
        not known, no clipping."""
        policy = self.policy
        self.state.update(
            batch,
            policy.learning_rate(batch),
            policy.factor(batch, result),
            predict=policy.predicts(batch),
            group=part,
        )
        if self.tiers is not None:
            self.tiers.hold_weights(batch + 1, part)
        if part < self.state.num_groups - 1:
            return
        if self.state.partition.is_sharded:
            self.executor.watch(lambda: not self.state.weights.is_arriving(batch + 1))
        policy.updated(batch, result)
        self.batches_done = batch + 1

    def _take_result(self, batch: int) -> StepResult:
        totals, work = self._pending.pop(batch)
        self.executor.wait(work.wait)
        with self.grid.home.waiting("all_reduce"):  # which on a GPU is now
            numbers = totals.tolist()
        stages = self.grid.pp.size
        num_targets = self._loader.num_targets(batch)
        result = self.policy.result(batch, numbers[:stages], numbers[stages + 1 :], num_targets)
        self._stopping |= numbers[stages] > 0 or (
            result.anomaly is not None and result.anomaly.policy != "skip"
        )
        return result

    def _report(self, result: StepResult, lead: int) -> None:
        if self._stopping if self._talk is None else result.news is not None and result.news.ending:
            self._end = min(self._end, result.step - 1 + lead)
        self._on_step(result)

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
        self.batches_done = meta["batches_done"]
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
        actions = self._in_tiers(
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
            self.executor.run(
                actions, LoaderSource(loader, self.config, self.device, evaluated), NO_HOOKS
            )
        totals = torch.zeros(len(self.number_names), dtype=torch.float64, device=self.device)
        for batch in range(num_batches):
            losses = self.executor.losses.pop(batch, {})
            if self.grid.is_first_copy:
                totals += totals.new_tensor([float(losses.get(n, 0.0)) for n in self.number_names])
        all_reduce(totals, self.grid.world)
        return dict(zip(self.number_names, (totals / self.grid.site.size).tolist(), strict=True))
