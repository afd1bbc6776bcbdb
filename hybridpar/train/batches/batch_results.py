"""Results of batches: summed over the grid, decided on by the policy, reported to the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hybridpar.data.loader import Loader
from hybridpar.runtime.executor import Executor
from hybridpar.state import RankState
from hybridpar.train.batches.batch_policy import BatchPolicy, StepResult
from hybridpar.train.batches.batch_totals import BatchTotals
from hybridpar.train.batches.expert_loads import flat_loads, loads_by_block

OnStep = Callable[[StepResult], None]
OnGradients = Callable[[int, dict[str, Tensor]], None]


@dataclass(frozen=True)
class TrainCall:
    """Arguments of one call of `Engine.train`."""

    loader: Loader
    num_batches: int
    on_step: OnStep
    on_gradients: OnGradients | None


class BatchResults:
    """Turn sums over the grid into the results of batches, equal on all ranks.

    Call `start_sums` and then `take` once for each batch, in order. `report` hands the result to
    the caller and decides where training ends.

    Args:
        state: This rank's state; its gradient norm enters the sums.
        executor: Keeps the losses of each batch until they are summed.
    """

    def __init__(self, policy: BatchPolicy, state: RankState, executor: Executor):
        self._policy = policy
        self._state = state
        self._executor = executor
        self._grid = state.grid
        model = policy.config.model
        self.names = (*model.losses, *model.metric_names)
        """Names of the losses and metrics of a batch."""
        self._experts = model.routed_experts
        self._stop_requested = False
        self.is_stopping = False
        """Whether a rank asked to end training, or an anomaly ends it."""
        self._pending: dict[int, BatchTotals] = {}
        self._call: TrainCall | None = None
        self.end = 0
        """Number of the first batch that is not trained."""

    def start(self, call: TrainCall, first: int) -> None:
        """Start a call of `Engine.train` at batch `first`."""
        self._call = call
        self.end = first + call.num_batches

    def request_stop(self, wanted: bool) -> None:
        """Add a stop request to the sums that start next, or withdraw it."""
        self._stop_requested = wanted

    @property
    def call(self) -> TrainCall:
        """Return the arguments of the current call of `Engine.train`."""
        assert self._call is not None, "no call of Engine.train is under way"
        return self._call

    def start_sums(self, batch: int) -> None:
        """Start the sums of a batch. Collectives: one all-reduce over the site's ranks."""
        square = self._state.square_norm(batch)
        self._state.send(batch)
        losses = self._executor.losses.pop(batch, {})
        loads = self._executor.loads.pop(batch, {})
        if not self._grid.is_first_copy:
            losses = {}
            loads = {}
        totals = BatchTotals(
            self._grid,
            square,
            self._stop_requested,
            [losses.get(name, 0.0) for name in self.names],
            flat_loads(self._experts, loads, self._executor.transport.device),
        )
        self._executor.watch(totals.work.is_done)
        self._pending[batch] = totals

    def take(self, batch: int) -> StepResult:
        """Wait for a batch's sums and return its result."""
        totals = self._pending.pop(batch)
        self._executor.wait(totals.work.wait)
        # Works on a GPU complete in stream order; reading the values is what blocks this thread.
        with self._grid.site_group.waiting("all_reduce"):
            sums = totals.read()
        num_targets = self.call.loader.num_targets(batch)
        result = self._policy.result(batch, sums.square_norms, sums.numbers, num_targets)
        if self._experts is not None:
            result = replace(result, loads=loads_by_block(self._experts, sums.loads))
        must_end = result.anomaly is not None and result.anomaly.policy != "skip"
        self.is_stopping |= sums.stop_requested or must_end
        return result

    def report(self, result: StepResult, lead: int) -> None:
        """Hand a result to the caller of `Engine.train`.

        Args:
            lead: Number of batches after this one that a rank may have begun already. They finish
                before a stop request takes effect. Several sites stop together instead, at the
                outer step whose message says so.
        """
        all_sites_end = result.site_status is not None and result.site_status.ending
        if all_sites_end or (self._state.outer is None and self.is_stopping):
            self.end = min(self.end, result.step - 1 + lead)
        self.call.on_step(result)

    def finish(self) -> None:
        """Report the batches still pending after the last action of a call."""
        for batch in sorted(self._pending):
            self.report(self.take(batch), lead=0)
        self.is_stopping = False
