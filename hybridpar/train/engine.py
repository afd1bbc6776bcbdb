"""One rank's training engine: a stage, its weights, its gradients, its optimizer, and the batches they run on.

    batch t:  F B F B ... last B      REDUCE      NORM                          UPDATE
              accumulate gradients    dp, ends    over the grid: norms,         wait; judge; clip; optimizer makes
              (buffer t mod n)        started     losses, stop request          W(t+1), or W(t) again of an anomaly
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.restate import Under
from hybridpar.comm import Work, all_reduce, all_reduce_async
from hybridpar.config import Config
from hybridpar.data import DataStart
from hybridpar.grid import ProcessGrid
from hybridpar.models.build import DTYPES, build_blocks, loss_names, recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import reduce_shared_gradients
from hybridpar.optim import ParameterSlot, optimizer_of
from hybridpar.optim.loss_scale import MIN_SCALE, LossScaler
from hybridpar.optim.norm import clip_scale, counted, sum_of_squares
from hybridpar.optim.schedule import learning_rate
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.passes import forward_actions, lower
from hybridpar.pipeline.plan.schedules import SCHEDULES, Sizes, schedule_of
from hybridpar.pipeline.run import graphs
from hybridpar.pipeline.run.executor import NO_HOOKS, BatchHooks, Executor, Lane
from hybridpar.pipeline.run.stage import Stage
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.partition import Partition, make_routes
from hybridpar.state.reducer import GradientReducer
from hybridpar.state.weights import Ownership, StageParameters, WeightStore
from hybridpar.train.anomalies import Anomaly, Judge, RunningJudge
from hybridpar.train.source import Loader, LoaderSource

BATCH_KINDS = frozenset({Kind.REDUCE, Kind.NORM, Kind.UPDATE})


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step came to, equal on all ranks. `grad_norm` is before clipping.

    `skipped`: its update was not made. `stage_norms`: of the gradients of each stage, tied ones with the first.
    """

    step: int
    losses: dict[str, float]
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    stage_norms: tuple[float, ...] = ()
    anomaly: Anomaly | None = None

    @property
    def loss(self) -> float:
        return sum(self.losses.values())


class Engine:
    """Builds this rank's part of the model of `config` on `grid` and trains it.

    Collectives: every method that is not a property must be called on all ranks of the grid.
    """

    def __init__(self, config: Config, grid: ProcessGrid, device: torch.device):
        self.config, self.grid, self.device = config, grid, device
        model, pipeline = config.model, config.pipeline
        self.sizes = Sizes.of(config)
        self.schedule = schedule_of(pipeline)
        self.split = stage_split(model, grid.pp.size, pipeline.split, self.sizes.chunks)
        self._held = self.sizes.stages_of(grid.pp.rank)
        self.loss_names = loss_names(model)
        dtype = DTYPES[config.train.dtype]
        numbers = [number for stage in self._held for number in self.split[stage]]
        blocks = build_blocks(model, grid.tp, numbers, kernels=config.kernels, dtype=dtype)
        again = recomputed_blocks(pipeline.recompute, model, self.split)
        stages = {stage: Stage({n: blocks[n] for n in self.split[stage]}, again[stage]) for stage in self._held}
        self.stage = Stage(blocks)  # all of them, as one: for what has to do with parameters
        parameters = StageParameters(self.stage, dtype)
        layout, placements = parameters.layout, parameters.placements
        self.partition = Partition(layout, make_routes(config, placements, grid))
        owned = self.partition.owned
        self.slots = [ParameterSlot(o.name, placements[o.name], grid.place, o.part, o.shared) for o in owned]
        self.placements = placements
        self.weights = WeightStore(
            parameters, Ownership(owned, self.partition.gather), self._num_versions(), device,
            predict=config.optim.staleness == "prediction")
        self.weights.fill(lambda tensors: initialize(
            [(name, tensors[name], place) for name, place in placements.items()], config.train.seed, grid.place))
        self.reducer = GradientReducer(self.partition)
        self.gradients = GradientAccumulator(layout, device, num_buffers=self.schedule.num_gradient_buffers,
                                             defers=pipeline.split_backward)
        self.optimizer = optimizer_of(config, self.slots, grid.tp)
        self._owned_gradients = [self.weights.owned_views(buffer) for buffer in self.gradients.buffers]
        self._counted_gradients = [layout.joined(counted(views, self.slots)) for views in self._owned_gradients]
        self.scaler = LossScaler.for_dtype(dtype, config.optim.loss_scale)
        self.judge: Judge = RunningJudge(config)
        shape = (config.train.micro_batch_size, model.seq_length, model.hidden_size)
        self.executor = Executor(
            stages, self.weights, Lane(grid.pp, grid.pp_reverse, shape, dtype, device), pipeline.num_microbatches)
        if config.train.cuda_graphs and device.type == "cuda":
            self.executor.graphs = graphs.recorder(
                config, stages[self._held[0]], self.gradients, device, eager_last=grid.dp.size > 1)
        self._scales = {0: self.scaler.scale}
        """The loss scale that came with each version of the weights."""
        self._pending: dict[int, tuple[Tensor, Work]] = {}
        self.before_change: Callable[[], object] = lambda: None
        """Called before anything changes what state_tensors gives: a copy may be under way."""
        self.tamper: Callable[[Iterator[Action]], Iterator[Action]] = lambda actions: actions
        """What becomes of the plan of `train`; it yields the same actions, and may do something between two."""
        self.stop_requested = False
        self._stopping = False
        self.batches_done = 0
        self.data_start = DataStart()
        """The place of batches in the stream of data, which loaders are made with."""

    def train(self, loader: Loader, num_batches: int, on_step: Callable[[StepResult], None],
              on_gradients: Callable[[int, dict[str, Tensor]], None] | None = None) -> None:
        """Runs `num_batches` batches from where training stands, then drains; `on_step` is called after every update,
        `on_gradients(batch, gradients)` before it: summed over the whole batch, not clipped, to be copied if kept.

        Ends early, on the same batch on all ranks, when any rank has set `stop_requested`, or the judge has found an
        anomaly that is not just skipped; those of the batches that were under way come after it.
        """
        self._first, self._end = self.batches_done, self.batches_done + num_batches
        self._on_step, self._on_gradients = on_step, on_gradients
        hooks = BatchHooks(
            self._before_backward, self._reduce, self._norm, self._update, self._weight_gradients)
        source = LoaderSource(loader, self.config, self.device, training=True)
        recorded = self.executor.graphs
        with nullcontext() if recorded is None else recorded.stream():
            self.executor.run(self.tamper(self._until_end(self._actions(num_batches))), source, hooks)
            for batch in sorted(self._pending):
                self._report(self._take_result(batch), lead=0)
        self._stopping = False

    def _actions(self, num_batches: int) -> Iterator[Action]:
        """This rank's plan for the next batches; the synchronous ones among them come first."""
        first, stop = self._first, self._first + num_batches
        switch = min(max(self.schedule.sync_steps, first), stop)
        for schedule, start, end in ((SCHEDULES["1f1b"], first, switch), (self.schedule, switch, stop)):
            if start < end:
                yield from lower(schedule, self.sizes, self.grid.pp.rank, start, end - start,
                                 clip=self.config.norms_first, gather=self.config.parallel.zero > 0,
                                 split=self.config.pipeline.split_backward)

    def _until_end(self, actions: Iterable[Action]) -> Iterator[Action]:
        """The plan without the batches that a stop request has cut off: draining is leaving out what is not begun."""
        m = self.sizes.num_microbatches
        for action in actions:
            batch = action.microbatch if action.kind in BATCH_KINDS else action.microbatch // m
            if batch < self._end:
                yield action
            elif self.batches_done >= self._end:
                return

    # -- what the plan's batch actions mean ------------------------------------------------------------------------

    def _before_backward(self, action: Action) -> float:
        batch, index = divmod(action.microbatch, self.sizes.num_microbatches)
        buffer = self.gradients.buffer_index(batch)
        is_first, is_last = index == 0, index == self.sizes.num_microbatches - 1
        if action.stage == self._held[-1]:  # whose backwards come first
            if is_first:
                self.gradients.begin(buffer)
            if is_last:
                self.reducer.arm(self.gradients.buffers[buffer])
        self.gradients.bind(self.weights.leaves_of(action.version), buffer)
        self.gradients.arm(self.reducer.ready if is_last else None)
        if action.kind is Kind.I:
            self.gradients.collect((action.stage, action.microbatch))
        return self._scale(batch)

    def _weight_gradients(self, action: Action) -> None:
        is_last = (action.microbatch + 1) % self.sizes.num_microbatches == 0
        self.gradients.arm(self.reducer.ready if is_last else None)
        self.gradients.apply((action.stage, action.microbatch))

    def _scale(self, batch: int) -> float:
        """The loss scale of a batch: the one that came with the version that its loss was computed on."""
        if batch < self.schedule.sync_steps:
            return self._scales[batch]
        last, first = self.sizes.num_stages - 1, max(self._first, self.schedule.sync_steps)
        return self._scales[self.schedule.version(self.sizes, last, batch * self.sizes.num_microbatches, first)]

    def _reduce(self, batch: int) -> None:
        self.gradients.finish(self.gradients.buffer_index(batch))
        self.reducer.flush()
        self.executor.watch(self.reducer.newest.is_done)

    def _norm(self, batch: int) -> None:
        self.executor.wait(self.reducer.wait)
        gradients = self._gradient_list(batch)
        reduce_shared_gradients(zip(gradients, (slot.placement for slot in self.slots), strict=True), self.grid.tp)
        stages = self.grid.pp.size
        totals = torch.zeros(stages + 1 + len(self.loss_names), dtype=torch.float64, device=self.device)
        if mine := self._counted_gradients[self.gradients.buffer_index(batch)]:
            totals[self.grid.pp.rank] = sum_of_squares(mine, self.config.kernels.optimizer)
        totals[stages] = float(self.stop_requested)
        losses = self.executor.losses.pop(batch, {})
        if self.grid.is_first_copy:
            for i, name in enumerate(self.loss_names):
                totals[stages + 1 + i] = losses.get(name, 0.0)
        work = all_reduce_async(totals, self.grid.world)
        self.executor.watch(work.is_done)
        self._pending[batch] = totals, work

    def _update(self, batch: int) -> None:
        if self.config.norms_first:
            result = self._take_result(batch)
            self._apply(batch, result)
            self._report(result, lead=3)  # no rank has begun batch + 3 when any applies this update
            return
        # no stage waits for another: the numbers of a batch are reported once all stages must have finished it
        self._norm(batch)
        self._apply(batch, None)
        lag = -(-self.sizes.num_stages // self.sizes.num_microbatches)
        if batch - lag >= self._first:
            self._report(self._take_result(batch - lag), lead=lag + 3)

    def _apply(self, batch: int, result: StepResult | None) -> None:
        """Makes W(batch + 1); equal to W(batch) where the step is skipped. `result` None: not known, no clipping."""
        gradients, scale = self._gradient_list(batch), self._scale(batch)
        if self._on_gradients is not None:
            self._on_gradients(batch, self._full_gradients(batch))
        self.before_change()
        if result is None or not result.skipped:
            factor = (1.0 if result is None else clip_scale(result.grad_norm, self.config.optim.clip_grad)) / scale
            self.weights.advance(lambda weights: self.optimizer.step(
                weights, gradients, lr=self._lr(batch), gradient_scale=factor),
                predict=batch >= self.schedule.sync_steps)
        else:
            self.weights.advance(None)
        if self.partition.is_sharded:
            self.executor.watch(lambda: not self.weights.is_arriving(batch + 1))
        self.scaler.update(found_inf=result is not None and not math.isfinite(result.grad_norm), scale=scale)
        self._scales[batch + 1] = self.scaler.scale
        self._scales.pop(batch - self.sizes.num_stages - 1, None)
        self.batches_done = batch + 1

    def versions_of(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Of the weights that the micro-batches of a batch run on, by stage; of the stretch that is being trained."""
        return self.schedule.versions_of(self.sizes, batch, self._first)

    def _num_versions(self) -> int:
        """Of the weights, that are alive at once."""
        return self.schedule.max_live_versions(self.sizes, self.grid.pp.rank)

    def _lr(self, batch: int) -> float:
        """One rate for all stages, by the oldest gradients, those of stage 0: tied weights must move as one."""
        delay = self.schedule.mean_delay(self.sizes, 0) if batch >= self.schedule.sync_steps else 0.0
        return learning_rate(batch, self.config.optim, self.config.train.num_steps, delay)

    def _take_result(self, batch: int) -> StepResult:
        totals, work = self._pending.pop(batch)
        self.executor.wait(work.wait)
        with self.grid.world.waiting("all_reduce"):  # which on a GPU is now
            numbers = totals.tolist()
        stages, scale = self.grid.pp.size, self._scale(batch)
        self._stopping |= numbers[stages] > 0
        norm = math.sqrt(sum(numbers[:stages])) / scale
        losses = dict(zip(self.loss_names, numbers[stages + 1 :], strict=True))
        cured = self.scaler.dynamic and scale > MIN_SCALE and not math.isfinite(norm)
        anomaly = self.judge.judge(batch + 1, sum(losses.values()), norm, cured=cured)
        skipped = self.config.norms_first and (anomaly is not None or not math.isfinite(norm))
        norms = tuple(math.sqrt(squares) / scale for squares in numbers[:stages])
        return StepResult(batch + 1, losses, norm, self._lr(batch), scale, skipped, norms, anomaly)

    def _report(self, result: StepResult, lead: int) -> None:
        if self._stopping or (result.anomaly is not None and result.anomaly.policy != "skip"):
            self._stopping = True
            self._end = min(self._end, result.step - 1 + lead)
        self._on_step(result)

    def _gradient_list(self, batch: int) -> list[Tensor]:
        """The gradients of what this rank updates."""
        return self._owned_gradients[self.gradients.buffer_index(batch)]

    def _full_gradients(self, batch: int) -> dict[str, Tensor]:
        flat = self.gradients.buffers[self.gradients.buffer_index(batch)]
        if self.partition.is_sharded:
            flat = flat.clone()
            self.partition.gather(flat).wait()
        return self.partition.layout.views(flat)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's shards of everything that training has made; live tensors, so copy or write them before going on.

        `weights/<version>/<parameter>` for each live version (in the working precision), `master/<parameter>` where
        there is a master copy, `optimizer/<parameter>.<state>`. Where replicas share the update, the last two are this
        rank's parts, as vectors (`owned_parts` says which).
        """
        store = self.weights
        tensors = {
            f"weights/{v}/{n}": leaf.detach() for v in store.live_versions for n, leaf in store.leaves_of(v).items()}
        if store.master is not None:
            tensors |= {f"master/{n}": t for n, t in store.parameters_of_optimizer().items()}
        return tensors | {f"optimizer/{n}": t for n, t in self.optimizer.state_tensors().items()}

    def owned_parts(self) -> dict[str, tuple[int, int]]:
        """Of the parameters that this rank updates in part, which elements of the local tensor; empty without ZeRO."""
        return {o.name: o.part for o in self.partition.owned if o.part is not None}

    def state_meta(self) -> dict[str, Any]:
        """The rest of the state, equal on all ranks; plain JSON values."""
        return {
            "batches_done": self.batches_done, "versions": list(self.weights.live_versions),
            "num_updates": self.optimizer.num_updates, "loss_scaler": self.scaler.state(),
            "loss_scales": {str(v): s for v, s in self._scales.items()}, "recent": self.judge.state(),
            "data_start": asdict(self.data_start),
        }

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Puts back what `state_tensors` and `state_meta` gave on the same grid, or what checkpoint.restate has made of
        those of another one. Each tensor is asked for once; an optimizer's are kept as they are.

        Raises: CheckpointError naming the first tensor that is missing or of another shape.
        """
        self.before_change()
        for version in meta["versions"]:
            self.weights.restore(version, Under(f"weights/{version}/", tensors))
        self.weights.restore_master(Under("master/", tensors))
        self.optimizer.load_state_tensors(Under("optimizer/", tensors), meta["num_updates"])
        self.scaler.load_state(meta["loss_scaler"])
        self._scales = {int(v): s for v, s in meta["loss_scales"].items()}
        self.judge.load_state(meta.get("recent", {}))
        self.batches_done = meta["batches_done"]
        self.data_start = DataStart(**meta.get("data_start", {}))

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, loader: Loader, num_batches: int) -> dict[str, float]:
        """Mean partial losses of the newest weights over the first batches of `loader`, without dropout."""
        assert self.batches_done == self.weights.newest, "evaluation needs a drained pipeline"
        self.before_change()  # by `unpredicted`
        m = self.sizes.num_microbatches
        actions = forward_actions(self.sizes, self.grid.pp.rank, num_batches * m)
        newest = (replace(a, version=self.weights.newest) for a in actions)
        with self.weights.unpredicted():
            self.executor.run(newest, LoaderSource(loader, self.config, self.device, training=False), NO_HOOKS)
        totals = torch.zeros(len(self.loss_names), dtype=torch.float64, device=self.device)
        for batch in range(num_batches):
            losses = self.executor.losses.pop(batch, {})
            if self.grid.is_first_copy:
                totals += totals.new_tensor([float(losses.get(n, 0.0)) for n in self.loss_names])
        all_reduce(totals, self.grid.world)
        return dict(zip(self.loss_names, (totals / num_batches).tolist(), strict=True))
