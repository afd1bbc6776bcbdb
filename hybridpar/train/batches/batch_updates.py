"""The UPDATE of a batch: when weights change, and which numbers must be known by then."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hybridpar.runtime.executor import Executor
from hybridpar.schedules.action import Action
from hybridpar.state import RankState
from hybridpar.train.batches.batch_policy import BatchPolicy, StepResult
from hybridpar.train.batches.batch_results import BatchResults
from hybridpar.train.sites import SiteExchange


class WeightUpdates:
    """Make new versions of this rank's weights.

    Args:
        executor: Waits for other ranks within the current action, and holds state in memory.
    """

    def __init__(self, policy: BatchPolicy, state: RankState, executor: Executor):
        self.policy = policy
        self.state = state
        self._executor = executor
        self.batches_done = 0

    def resume_at(self, batch: int) -> None:
        """Continue with the weights after this many batches."""
        self.batches_done = batch

    def is_last(self, part: int) -> bool:
        """Return whether this is the last part of an update."""
        return part == self.state.num_groups - 1

    def apply(self, batch: int, part: int, result: StepResult | None) -> None:
        """Make one part of W(batch + 1), equal to W(batch) if the update is skipped.

        Args:
            result: The batch's result. None: not known yet, so gradients are not clipped.
        """
        policy = self.policy
        self.state.update(
            batch,
            policy.learning_rate(batch),
            policy.factor(batch, result),
            predict=policy.predicts(batch),
            group=part,
            wait=self._executor.wait,
        )
        self._executor.moves.hold_weights(batch + 1, part)
        if not self.is_last(part):
            return
        if self.state.partition.is_sharded:
            self._executor.watch(lambda: not self.state.weights.is_arriving(batch + 1))
        policy.updated(batch, result)
        self.batches_done = batch + 1

    def start_on_host(self, action: Action, result: StepResult) -> None:
        """Start the host optimizer's update to W(batch + 1): of one group if HOST is cut, else of
        all.
        """
        batch = action.microbatch
        policy = self.policy
        begun = self.state.begin_update(
            batch,
            policy.learning_rate(batch),
            policy.factor(batch, result),
            predict=policy.predicts(batch),
            group=action.part if self.state.segments.late else None,
        )
        self._executor.moves.hold(action, begun)
        self._executor.watch(lambda: all(one.is_done() for one in begun))

    def show_gradients(self, results: BatchResults, batch: int) -> None:
        """Call `on_gradients` of the current `Engine.train` with a batch's gradients, if set."""
        if (on_gradients := results.call.on_gradients) is not None:
            on_gradients(batch, self.state.full_gradients(batch))


class UpdateAfterNorm:
    """Update once the sums of a batch are known: gradients are clipped, anomalies skipped.

    Every schedule updates like this, except pipedream without clipping. With the optimizer on the
    host, HOST starts the update and UPDATE waits for each part.
    """

    def __init__(
        self,
        updates: WeightUpdates,
        results: BatchResults,
        executor: Executor,
        exchange: SiteExchange | None,
    ):
        self._updates = updates
        self._results = results
        self._executor = executor
        self._exchange = exchange
        self._host = updates.state.host
        self._begins_on_host = self._host.num_groups > 0
        self._result: StepResult | None = None  # of the batch whose update has begun

    def host(self, action: Action) -> None:
        """Start the host optimizer."""
        if action.part == 0:
            self._begin(action.microbatch)
        assert self._result is not None
        self._updates.start_on_host(action, self._result)

    def update(self, action: Action) -> None:
        """Make a part of the next weights; report the batch after its last part."""
        batch = action.microbatch
        part = action.part
        if self._begins_on_host:
            self._executor.wait(partial(self._host.wait, part))
        elif part == 0:
            self._begin(batch)
        result = self._result
        assert result is not None
        if self._exchange is not None:
            self._exchange.before_update(result, self._results.is_stopping)
        self._updates.apply(batch, part, result)
        if self._exchange is not None:
            self._result = result = replace(
                result, site_status=self._exchange.after_update(batch + 1)
            )
        if self._updates.is_last(part):
            # lead = 3: no rank has begun batch + 3 when any rank applies this update
            self._results.report(result, lead=3)

    def _begin(self, batch: int) -> StepResult:
        self._result = result = self._results.take(batch)
        self._updates.show_gradients(self._results, batch)
        return result


class UpdateBeforeNorm:
    """Update as soon as this rank's gradients are reduced: no stage waits for another.

    Pipedream without clipping updates like this, and its stages update at different times. The
    sums of a batch start with its update. They are taken `_lag` batches later, when all stages must
    have finished the batch, so that taking them does not block.
    """

    def __init__(self, updates: WeightUpdates, results: BatchResults, executor: Executor):
        self._updates = updates
        self._results = results
        self._executor = executor
        shape = updates.policy.shape
        self._lag = -(-shape.num_stages // shape.num_microbatches)

    def update(self, action: Action) -> None:
        """Make a part of the next weights; after the last part report the batch `_lag` before."""
        batch = action.microbatch
        part = action.part
        state = self._updates.state
        is_last = self._updates.is_last(part)
        if part == 0:
            self._executor.wait(partial(state.await_sums, batch))
        if is_last:
            self._results.start_sums(batch)
        else:
            state.square(batch, part)
        if part == 0:
            self._updates.show_gradients(self._results, batch)
        self._updates.apply(batch, part, None)
        finished = batch - self._lag
        if is_last and finished >= self._updates.policy.first:
            self._results.report(self._results.take(finished), lead=self._lag + 3)
