"""A pipeline schedule, as pure functions of the pipeline's shape: what a rank computes in which
order, with which weights, and where updates and reductions are placed. schedule_table.py lists the
schedules.

r is the stage, p = num_stages, m = num_microbatches (of one batch in one pipeline), k a
micro-batch, t a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hybridpar.errors import config_error
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.kinds import Step
from hybridpar.schedules.orders import custom_order as own_order
from hybridpar.schedules.orders import interleaved, vee
from hybridpar.schedules.orders.interleaved import SizeOf
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.proof.liveness import most_held
from hybridpar.schedules.schedule_options import ScheduleOptions

# (.., stage, microbatch, first_batch) -> version
VersionRule = Callable[["Schedule", PipelineShape, int, int, int], int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule, as pure functions of the pipeline's shape (see `make_schedule`).

    Attributes:
        warmup: Returns how many forwards a rank runs ahead, counted on each virtual stage; with
            stage_layout "v", micro-batches.
        num_gradient_buffers: Batches whose gradients are alive at once.
        accepts: Names of the options that not every schedule has.
    """

    options: ScheduleOptions
    source: str
    flush: bool  # drains the pipeline and updates the weights between any two batches
    warmup: SizeOf
    version_rule: VersionRule
    max_live_versions: SizeOf
    num_gradient_buffers: int = 1
    # receives are posted this many compute actions before their use (lowering.add_communication)
    receive_ahead: int = 1
    # m >= warmup of stage 0: two versions then serve all micro-batches in flight
    needs_full_pipeline: bool = False
    accepts: frozenset[str] = frozenset()
    order: tuple[tuple[Step, ...], ...] = ()
    """A custom schedule: what each rank computes of a batch (custom_order.py)."""

    @property
    def name(self) -> str:
        """The schedule's name, as in `pipeline.schedule`."""
        return self.options.schedule

    @property
    def activations(self) -> str:
        """The value of pipeline.activations (vee.py) with stage_layout "v"; else empty."""
        is_v = self.options.stage_layout == "v" and not self.order
        return self.options.activations if is_v else ""

    def with_options(self, **changes: Any) -> Schedule:
        """Return the schedule with other options of its passes; others take `make_schedule`."""
        return replace(self, options=replace(self.options, **changes))

    def repeats(self, shape: PipelineShape) -> bool:
        """Return whether a longer batch only repeats parts of a shorter one."""
        return not self.order and not (
            self.flush
            and self.activations
            and (self.activations in vee.ENDLESS or shape.virtual_stages > 2)
        )

    def outruns_sends(self, shape: PipelineShape) -> bool:
        """Return whether a rank may have more unfinished sends than `min_send_window`: with a
        custom order, and with stage_layout "v" and more than two virtual stages, where a rank runs
        each step as soon as it can.
        """
        return bool(self.order) or (shape.is_v and shape.virtual_stages > 2)

    def forwards_before(self, shape: PipelineShape, action: Action) -> int:
        """Return how many micro-batches have started, on the first stage of the rank, before an F,
        B, I or W in the steady state, including the action's own. If the pipeline drains, count as
        if it did not.
        """
        if self.activations:
            return vee.forwards_before(
                shape, self.activations, (action.kind, action.stage, action.microbatch)
            )
        place = interleaved.place(shape, action.kind, action.stage, action.microbatch)
        return interleaved.begun(shape, place + self.warmup(shape, shape.rank_of(action.stage)))

    def position(self, shape: PipelineShape, action: Action) -> int:
        """Return the place of a step in an endless alternation: backward k ends at 2k + 1."""
        if self.activations:
            step = action.kind, action.stage, action.microbatch
            last = Kind.W, shape.rank_of(action.stage), 0
            since = vee.slot_of(shape, self.activations, step) - vee.slot_of(
                shape, self.activations, last
            )
            return since * 2 // vee.PERIOD + 1
        place = interleaved.place(shape, action.kind, action.stage, action.microbatch)
        if action.kind is Kind.F:
            return 2 * (place - self.warmup(shape, shape.rank_of(action.stage)))
        return 2 * place + 1

    def pairs(self, shape: PipelineShape) -> int:
        """Return the forward-backward pairs of a batch, as `position` and `slack` count them: of
        each stage; with stage_layout "v", of a rank.
        """
        return shape.num_microbatches * (1 if self.activations else shape.virtual_stages)

    def version(self, shape: PipelineShape, stage: int, microbatch: int, first_batch: int) -> int:
        """Return the weight version of a stage's micro-batch; W(t) exists after t updates.

        `first_batch` is the first batch after the pipeline was last drained. The version never
        decreases as `microbatch` grows.
        """
        return self.version_rule(self, shape, stage, microbatch, first_batch)

    def versions_of(
        self, shape: PipelineShape, batch: int, first_batch: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the versions of all micro-batches of a batch, by stage."""
        m = shape.num_microbatches
        first = max(first_batch, self.options.sync_steps)
        if batch < self.options.sync_steps:
            return ((batch,) * m,) * shape.num_stages
        return tuple(
            tuple(self.version(shape, stage, batch * m + k, first) for k in range(m))
            for stage in range(shape.num_stages)
        )

    def num_stale(self, shape: PipelineShape) -> int:
        """Return how many of a batch's micro-batches use older weights than W(t), on stage 0."""
        batch, first = self._steady_batch(shape)
        start = batch * shape.num_microbatches
        return bisect_left(
            range(shape.num_microbatches),
            batch,
            key=lambda k: self.version(shape, 0, start + k, first),
        )

    def mean_delay(self, shape: PipelineShape, stage: int) -> float:
        """Return by how many updates a batch's weights are behind on average."""
        batch, first = self._steady_batch(shape)
        m = shape.num_microbatches
        return sum(batch - self.version(shape, stage, batch * m + k, first) for k in range(m)) / m

    def _steady_batch(self, shape: PipelineShape) -> tuple[int, int]:
        """Return a batch that does not depend on the start of its range, and that start."""
        return self.options.sync_steps + shape.num_stages + 1, self.options.sync_steps

    def slack(self, shape: PipelineShape) -> int:
        """Return rank 0's pairs from batch t's last backward to the first use of W(t+1).

        Later ranks have more: they end a batch earlier, and start the next one later.
        """
        each = self.pairs(shape) // shape.num_microbatches
        return max(self.num_stale(shape) * each - self.warmup(shape, 0), 0)

    def _most_ahead(self, shape: PipelineShape) -> int:
        """Return how many complete micro-batches the first rank runs ahead."""
        return -(-self.warmup(shape, 0) * shape.num_microbatches // self.pairs(shape))

    def norm_delay(
        self, shape: PipelineShape, stage: int, *, gather: bool = False, host: float = 0.0
    ) -> int:
        """Return the steps between the last backward of batch t and NORM(t).

        NORM is at about the same time on all stages. It waits for the reduction, which over a slow
        link takes most of the slack; so the norm, a few bytes, gets the last pair before UPDATE(t)
        on stage 0, or half of the slack if that is less. In deep pipelines, in which `_lead` is
        less exact, it gets some more. With a host optimizer, which has a share of the slack, the
        reduction gets the rest.
        """
        if host:
            return self._lead(shape, stage) + int((1 - host) * 2 * self.slack(shape))
        last = 2 * (1 + shape.num_stages // 8)
        return self._lead(shape, stage) + max(self.slack(shape), self._end(shape, gather) - last)

    def host_delay(self, shape: PipelineShape, stage: int, *, host: float) -> int:
        """Return the delay of HOST(t): one action after NORM(t), when its result has arrived."""
        return self.norm_delay(shape, stage, host=host) + 1

    def update_delay(self, shape: PipelineShape, stage: int) -> int:
        """Return the delay of UPDATE(t) if it gathers the new weights: two thirds of the slack."""
        return self._lead(shape, stage) + self._end(shape, gather=True)

    def _end(self, shape: PipelineShape, gather: bool) -> int:
        """Return the steps of stage 0 between the last backward of batch t and UPDATE(t)."""
        return (4 * self.slack(shape) + 1) // 3 if gather else 2 * self.slack(shape)

    def _lead(self, shape: PipelineShape, stage: int) -> int:
        """Return the steps that `stage` runs between its last backward and stage 0's.

        It ends r backwards earlier: 2r/3 pairs if a backward takes two forwards. A longer warm-up,
        k(p-1-r), is for links that take (k-1)/2 pairs: kr/2 pairs. (Without it, r pairs would delay
        all stages if there is no slack.)
        """
        if self.activations:
            ends = [vee.slot_of(shape, self.activations, (Kind.W, rank, 0)) for rank in (0, stage)]
            return max(ends[0] - ends[1], 0) * 2 // vee.PERIOD
        ahead = self.warmup(shape, 0) - self.warmup(shape, stage)
        return ahead if ahead > stage else (4 * stage + 1) // 3

    def max_live_activations(self, shape: PipelineShape, stage: int) -> int:
        """Return an upper bound of the micro-batches between forward and backward on a rank."""
        if self.activations:
            return vee.most_of_rank(shape, stage, self.activations, drains=self.flush)
        if self.order:
            return most_held(self.order[stage])
        in_flight = self.warmup(shape, stage) + 1 + self.weight_delay(shape, stage)
        of_batch = shape.num_microbatches * shape.virtual_stages
        return min(in_flight, of_batch) if self.flush else in_flight

    def weight_delay(self, shape: PipelineShape, rank: int) -> int:
        """Return how many I may run before the W of an earlier one: as many as let the rank hold no
        more micro-batches than rank 0 does.
        """
        return self.warmup(shape, 0) - self.warmup(shape, rank) if self.options.zero_bubble else 0

    def check_shape(self, shape: PipelineShape) -> None:
        """Check that this schedule can run on this shape. Raises: ConfigError."""
        if "order" in self.accepts:
            own_order.check_order(self.order, shape)
        elif bool(self.activations) != shape.is_v:
            rule = "requires schedule 1f1b, 2bw or own"
            raise config_error("pipeline.stage_layout", shape.stage_layout, rule, "loop")
        p, m, warmup = shape.num_stages, shape.num_microbatches, self._most_ahead(shape)
        fits = (n for n in count(m) if self._most_ahead(replace(shape, num_microbatches=n)) <= n)
        if shape.is_ring and self.options.early_switch is not None:
            rule = (
                f"requires one stage per rank; this configuration has {shape.virtual_stages} "
                "(pipeline.virtual_stages)"
            )
            raise config_error("pipeline.early_switch", self.options.early_switch, rule, "off")
        if shape.is_ring and "virtual_stages" not in self.accepts:
            rule = f"not supported with schedule {self.name}, which has one stage per rank"
            raise config_error("pipeline.virtual_stages", shape.virtual_stages, rule, "0")
        if self.needs_full_pipeline and m < warmup:
            rule = (
                f"must be at least {warmup} with schedule {self.name} and parallel.pp = "
                f"{shape.num_ranks}: with fewer, two weight versions are not enough for the "
                f"forwards that stage 0 runs ahead"
            )
            raise config_error("pipeline.num_microbatches", m, rule, str(next(fits)))
        early_switch = self.options.early_switch
        if early_switch is None:
            return
        # W(t+1) is made after the last backward of batch t, and stage 0 runs `warmup` forwards of
        # batch t+1 before that backward. If one of them needed W(t+1), each would wait for the
        # other.
        lowest = warmup - (p - 1)
        highest = m - (p - 1)
        if not lowest <= early_switch <= highest:
            rule = (
                f"out of range: {lowest} to {highest}. Stage 0 runs {warmup} micro-batches ahead on "
                f"the older weights, which parallel.pp - 1 + early_switch of the {m} micro-batches "
                "(pipeline.num_microbatches) use"
            )
            works = str(min(lowest + 1, highest))
            raise config_error("pipeline.early_switch", early_switch, rule, works)

    def compute_actions(
        self, shape: PipelineShape, rank: int, first_batch: int = 0, num_batches: int | None = None
    ) -> Iterator[Action]:
        """Yield one rank's compute actions for so many batches (None: without end), lazily.

        The pipeline is drained before the first and after the last. Raises: ConfigError, at once.
        """
        self.check_shape(shape)
        assert 0 <= rank < shape.num_ranks, f"rank {rank} of {shape.num_ranks}"
        assert first_batch >= self.options.sync_steps, (
            f"batch {first_batch} runs as 1f1b, before {self.options.sync_steps} sync_steps"
        )
        return (
            Action(kind, stage, k, self.version(shape, stage, k, first_batch))
            for kind, stage, k in self._steps(shape, rank, first_batch, num_batches)
        )

    def _steps(
        self, shape: PipelineShape, rank: int, first_batch: int, num_batches: int | None
    ) -> Iterator[Step]:
        m, warmup = shape.num_microbatches, self.warmup(shape, rank)
        batches: Iterable[int] = count(first_batch)
        if num_batches is not None:
            batches = range(first_batch, first_batch + num_batches)
        if self.activations and not self.flush:
            num = None if num_batches is None else num_batches * m
            return vee.pattern(shape, rank, self.activations, first_batch * m, num)
        if self.order:
            stages = shape.stages_of(rank)
            order = self.order[rank]
            return ((kind, stages[own], t * m + k) for t in batches for kind, own, k in order)
        if self.activations:
            order = vee.batch_order(shape, rank, self.activations)
            return ((kind, stage, t * m + k) for t in batches for kind, stage, k in order)
        if self.flush:
            return (step for t in batches for step in interleaved.order(shape, rank, warmup, t, 1))
        return interleaved.order(shape, rank, warmup, first_batch, num_batches)
