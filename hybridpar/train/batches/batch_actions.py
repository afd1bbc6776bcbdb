"""Run the actions of a plan that concern a whole batch: REDUCE, NORM, HOST and UPDATE.

batch t:  F B F B ... last B     REDUCE            NORM                    UPDATE
          accumulate gradients   start reducing    start all-reduce over   wait; detect anomalies;
          (buffer t mod n)       over dp, and of   the grid: norms,        clip; optimizer makes
                                 tied embeddings   losses, stop request    W(t+1), or keeps W(t)

With the optimizer on the host, gradients leave for the host at NORM, HOST makes the decision and
starts the update, and UPDATE waits for it.
"""

from __future__ import annotations

from functools import partial

from hybridpar.runtime.executor import Executor
from hybridpar.schedules.action import Action, Kind
from hybridpar.state import RankState
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.batches.batch_results import BatchResults
from hybridpar.train.batches.batch_updates import UpdateAfterNorm, UpdateBeforeNorm, WeightUpdates
from hybridpar.train.sites import SiteExchange


class BatchActions:
    """Run the batch actions of a plan, and prepare the gradients of its backwards.

    The executor decides when each action runs, and calls these methods.
    """

    def __init__(self, policy: BatchPolicy, state: RankState, executor: Executor):
        self._policy = policy
        self._state = state
        self._executor = executor
        self._parts = state.segments
        self._m = policy.shape.num_microbatches
        self._first_norm_part = state.num_groups - 1 if state.division.norms else 0
        self.results = BatchResults(policy, state, executor)
        self.updates = WeightUpdates(policy, state, executor)
        self._actions = {Kind.REDUCE: self._reduce, Kind.NORM: self._norm}
        if policy.config.norms_first:
            exchange = None if state.outer is None else SiteExchange(state.outer)
            after = UpdateAfterNorm(self.updates, self.results, executor, exchange)
            self._actions |= {Kind.HOST: after.host, Kind.UPDATE: after.update}
        else:
            before = UpdateBeforeNorm(self.updates, self.results, executor)
            self._actions[Kind.UPDATE] = before.update

    def run(self, action: Action) -> None:
        """Run a REDUCE, NORM, HOST or UPDATE."""
        self._actions[action.kind](action)

    def before_backward(self, action: Action) -> float:
        """Point gradients at the batch's buffer and return the loss gradient, its loss scale."""
        batch, index = divmod(action.microbatch, self._m)
        is_last = index == self._m - 1
        part = self._parts.number(action)
        if part == self._parts.last:  # backward starts with the last segment
            if index == 0:
                self._state.begin(batch, self._policy.loss_scale(batch))
            if is_last:
                self._state.close(batch)
        self._state.bind(
            batch, self._policy.versions_in(action), last=is_last, part=part, microbatch=index
        )
        if action.kind is Kind.I:
            self._state.collect((part, action.microbatch))
        return self._policy.loss_gradient(action)

    def add_weight_gradients(self, action: Action) -> None:
        """Add the weight gradients that a micro-batch's I (input gradient) deferred to its W."""
        index = action.microbatch % self._m
        part = self._parts.number(action)
        self._state.apply(
            (part, action.microbatch), last=index == self._m - 1, part=part, microbatch=index
        )

    def after_backward(self, action: Action) -> None:
        """Start reducing the gradients that the last backward of a segment has completed."""
        batch, index = divmod(action.microbatch, self._m)
        part = self._parts.number(action)
        self._state.end_backward()
        if self._parts.is_divided and index == self._m - 1:
            self._state.finish(batch, part)
            if not self._state.is_alone(part):
                self._executor.moves.hold_gradients(batch, part)

    def _reduce(self, action: Action) -> None:
        self._state.reduce(action.microbatch)
        self._executor.watch(self._state.reducer.newest.is_done)

    def _norm(self, action: Action) -> None:
        batch = action.microbatch
        if action.part == self._first_norm_part:
            self._executor.wait(partial(self._state.await_sums, batch))
        if action.part:
            self._state.square(batch, action.part)
        else:
            self.results.start_sums(batch)
