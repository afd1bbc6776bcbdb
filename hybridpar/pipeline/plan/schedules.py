"""Pipeline schedules: the order in which a stage computes, and the weights it computes with.

All of them are one pattern, `warmup` forwards ahead, then forward and backward by turns, then the remaining backwards,
and differ in how far they run ahead and in whether they drain between batches. Three stages, three micro-batches in a
batch; a backward takes two forwards; * is the update of the weights:

    naive: warmup 0, drains (one batch)
    stage 0  F0                   B0--- F1                   B1--- F2                   B2---*
    stage 1     F0          B0---          F1          B1---          F2          B2---      *
    stage 2        F0 B0---                   F1 B1---                   F2 B2---            *

    gpipe: warmup m, drains (two batches)
    stage 0  F0 F1 F2                   B0--- B1--- B2---*F3 F4 F5                   B3--- B4--- B5---*
    stage 1     F0 F1 F2          B0--- B1--- B2---      *   F3 F4 F5          B3--- B4--- B5---      *
    stage 2        F0 F1 F2 B0--- B1--- B2---            *      F3 F4 F5 B3--- B4--- B5---            *

    1f1b: warmup p-1-r, drains (two batches)
    stage 0  F0 F1 F2             B0---    B1---    B2---*F3 F4 F5             B3---    B4---    B5---*
    stage 1     F0 F1       B0--- F2 B1---    B2---      *   F3 F4       B3--- F5 B4---    B5---      *
    stage 2        F0 B0--- F1 B1--- F2 B2---            *      F3 B3--- F4 B4--- F5 B5---            *

    2bw: warmup p-1-r, drains at the end only (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2--- F5 B3---*F6 B4--- F7 B5--- F8 B6---*   B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4---*F6 B5--- F7 B6--- F8 B7---*   B8---      *
    stage 2        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*           *

    pipedream: as 2bw, but a stage updates at once and goes on with what it has (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2---*F5 B3--- F6 B4--- F7 B5---*F8 B6---    B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2---*F4 B3--- F5 B4--- F6 B5---*F7 B6--- F8 B7---    B8---*
    stage 2        F0 B0--- F1 B1--- F2 B2---*F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*

    2bw, early_switch 0: only what is in flight at an update uses older weights, on all stages alike (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2---*F5 B3--- F6 B4--- F7 B5---*F8 B6---    B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---*F5 B4--- F6 B5--- F7 B6---*F8 B7---    B8---      *
    stage 2        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---*F5 B5--- F6 B6--- F7 B7---*F8 B8---            *

    2bw, two stages, where a transfer takes as long as a forward: warm-up for depth (two batches)
    stage 0  F0 F1             B0--- F2 B1--- F3       B2--- F4 B3--- F5       B4---*   B5---*
    stage 1        F0 B0--- F1 B1---       F2 B2--- F3 B3---       F4 B4--- F5 B5---*        *

    ... and for latency: warmup 2(p-1-r) (three batches)
    stage 0  F0 F1 F2          B0--- F3 B1--- F4 B2--- F5 B3---*F6 B4--- F7 B5--- F8 B6---*   B7---    B8---*
    stage 1        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*        *

r is the stage, p = num_stages, m = num_microbatches (of one batch in one pipeline), k a micro-batch, t a batch.
Where a rank holds several chunks of the model, what it does has another order: interleaved.py, vee.py. One's own is in
the configuration: order.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

from hybridpar.config import PipelineConfig
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.pipeline.plan import interleaved, vee
from hybridpar.pipeline.plan import order as own_order
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.sizes import Sizes as Sizes

SizeOf = Callable[[Sizes, int], int]  # (sizes, rank, which is the stage but where ranks hold several) -> a number
VersionRule = Callable[["Schedule", Sizes, int, int, int], int]  # (..., stage, microbatch, first_batch) -> version


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule, as pure functions of sizes. `make_schedule` sets its options.

    `warmup(sizes, stage)` is how many forwards run ahead. `early_switch`: L, where only the first p-1+L micro-batches
    of a batch use older weights; None: all. `sync_steps`: how many batches have run before, as 1f1b.
    `num_gradient_buffers`: batches whose gradients are alive at once. `options`: those that not every schedule has.
    """

    name: str
    source: str
    flush: bool  # drains the pipeline and updates the weights between any two batches
    warmup: SizeOf
    version_rule: VersionRule
    max_live_versions: SizeOf
    num_gradient_buffers: int = 1
    receive_ahead: int = 1  # post receives this many compute actions before their use (passes.add_communication)
    needs_full_pipeline: bool = False  # m >= warmup of stage 0: two versions then serve all that is in flight
    options: frozenset[str] = frozenset()
    early_switch: int | None = None
    sync_steps: int = 0
    zero_bubble: bool = False  # gradients of weights fill the drain (passes.delay_weight_gradients)
    activations: str = ""  # on a V: how much a rank may keep (vee.py)
    order: tuple[tuple[own_order.Step, ...], ...] = ()  # one's own: what each rank computes of a batch (order.py)

    @property
    def drained(self) -> Schedule:
        """The schedule of the first sync_steps batches."""
        return replace(SCHEDULES["1f1b"], activations=self.activations)

    def forwards_before(self, sizes: Sizes, action: Action) -> int:
        """How many micro-batches have begun, on the first stage of the rank, before an F, B, I or W in the steady
        state; that of the action among them. Where the pipeline drains, they would have."""
        if self.activations:
            return vee.forwards_before(sizes, self.activations, (action.kind, action.stage, action.microbatch))
        return action.microbatch + self.warmup(sizes, action.stage)

    def position(self, sizes: Sizes, action: Action) -> int:
        """Place of an F, B, I or W in an endless row of forwards and backwards by turns: the end of backward k at
        2k + 1."""
        if self.activations:
            step = action.kind, action.stage, action.microbatch
            last = Kind.W, sizes.rank_of(action.stage), 0
            since = vee.slot_of(sizes, self.activations, step) - vee.slot_of(sizes, self.activations, last)
            return since * 2 // vee.PERIOD + 1
        if action.kind is Kind.F:
            return 2 * (action.microbatch - self.warmup(sizes, action.stage))
        return 2 * action.microbatch + 1

    def version(self, sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
        """The weight version that `stage` uses for `microbatch`, forward and backward; W(t) exists after t updates.

        In a range of batches that began at `first_batch` from a drained pipeline. Never falls as `microbatch` grows.
        """
        return self.version_rule(self, sizes, stage, microbatch, first_batch)

    def versions_of(self, sizes: Sizes, batch: int, first_batch: int) -> tuple[tuple[int, ...], ...]:
        """The same for all micro-batches of a batch, by stage; the first sync_steps batches run as 1f1b."""
        m, first = sizes.num_microbatches, max(first_batch, self.sync_steps)
        if batch < self.sync_steps:
            return ((batch,) * m,) * sizes.num_stages
        return tuple(tuple(self.version(sizes, stage, batch * m + k, first) for k in range(m))
                     for stage in range(sizes.num_stages))

    def num_stale(self, sizes: Sizes) -> int:
        """Micro-batches of a batch t that use older weights than W(t) on stage 0, in the steady state.

        Only pipedream's later stages have fewer.
        """
        batch, first = self._steady_batch(sizes)
        start = batch * sizes.num_microbatches
        return bisect_left(
            range(sizes.num_microbatches), batch, key=lambda k: self.version(sizes, 0, start + k, first))

    def mean_delay(self, sizes: Sizes, stage: int) -> float:
        """By how many updates the weights of a batch's micro-batches are behind on average, in the steady state."""
        batch, first = self._steady_batch(sizes)
        m = sizes.num_microbatches
        return sum(batch - self.version(sizes, stage, batch * m + k, first) for k in range(m)) / m

    def _steady_batch(self, sizes: Sizes) -> tuple[int, int]:
        """A batch on which the start of its range no longer bears (no weights are p updates old), and that start."""
        return self.sync_steps + sizes.num_stages + 1, self.sync_steps

    def slack(self, sizes: Sizes) -> int:
        """Forward-backward pairs on stage 0 between the last backward of batch t and the first use of W(t+1).

        Later stages have more: they end a batch earlier, and start the next one later.
        """
        return max(self.num_stale(sizes) - self.warmup(sizes, 0), 0)

    def norm_delay(self, sizes: Sizes, stage: int, *, gather: bool = False, host: float = 0.0) -> int:
        """Forwards and backwards after the last of batch t before NORM(t) comes, or at UPDATE(t) if that is earlier.

        On all stages at about one time. It waits for the reduction, which over a slow link takes most of the slack: so
        the norm, a few bytes, has the last pair before UPDATE(t) on stage 0, or half of the slack where that is less.
        In deep pipelines, whose stages are not quite where `_lead` takes them to be, it has some more. Where the host
        has a share of the slack to make the new weights, the reduction has the rest.
        """
        if host:
            return self._lead(sizes, stage) + int((1 - host) * 2 * self.slack(sizes))
        last = 2 * (1 + sizes.num_stages // 8)
        return self._lead(sizes, stage) + max(self.slack(sizes), self._end(sizes, gather) - last)

    def host_delay(self, sizes: Sizes, stage: int, *, host: float) -> int:
        """The same for HOST(t): an action after NORM(t), whose sums then are there."""
        return self.norm_delay(sizes, stage, host=host) + 1

    def update_delay(self, sizes: Sizes, stage: int) -> int:
        """The same for UPDATE(t) where it also starts to gather the new weights: after two thirds of the slack."""
        return self._lead(sizes, stage) + self._end(sizes, gather=True)

    def _end(self, sizes: Sizes, gather: bool) -> int:
        """Forwards and backwards on stage 0 between the last backward of batch t and UPDATE(t)."""
        return (4 * self.slack(sizes) + 1) // 3 if gather else 2 * self.slack(sizes)

    def _lead(self, sizes: Sizes, stage: int) -> int:
        """Forwards and backwards that `stage` runs between its last backward of a batch and that of stage 0.

        It ends r backwards earlier: 2r/3 pairs where a backward takes two forwards. A longer warm-up, k(p-1-r), is for
        links that take (k-1)/2 pairs: kr/2 pairs. (Without it, r pairs would delay all stages where there is no slack.)
        """
        if self.activations:
            ends = [vee.slot_of(sizes, self.activations, (Kind.W, rank, 0)) for rank in (0, stage)]
            return max(ends[0] - ends[1], 0) * 2 // vee.PERIOD
        warmup = self.warmup(sizes, 0)
        if warmup >= sizes.num_stages > 1:
            return warmup * stage // (sizes.num_stages - 1)
        return (4 * stage + 1) // 3

    def max_live_activations(self, sizes: Sizes, stage: int) -> int:
        """Micro-batches that have run forward and not yet backward on this stage, at most; on all stages of a rank."""
        if self.activations:
            return vee.most_held(sizes, stage, self.activations, drains=self.flush)
        if self.order:
            return own_order.most_held(self.order[stage])
        in_flight = self.warmup(sizes, stage) + 1 + self.weight_delay(sizes, stage)
        return min(in_flight, sizes.num_microbatches * sizes.chunks) if self.flush else in_flight

    def weight_delay(self, sizes: Sizes, rank: int) -> int:
        """Backwards to the input that may run before the W of an earlier one: as many as let the rank hold no more
        micro-batches than rank 0 does."""
        return self.warmup(sizes, 0) - self.warmup(sizes, rank) if self.zero_bubble else 0

    def check_sizes(self, sizes: Sizes) -> None:
        """Raises: ConfigError if this schedule cannot run on these sizes."""
        if "order" in self.options:
            own_order.check_order(self.order, sizes)
        if bool(self.activations) != sizes.is_v:
            raise config_error("pipeline.placement", sizes.placement, "is the order of schedules on a V alone", "loop")
        p, m, warmup = sizes.num_stages, sizes.num_microbatches, self.warmup(sizes, 0)
        if sizes.chunks > 1 and not self.activations and "chunks" not in self.options:
            raise config_error("pipeline.chunks", sizes.chunks, f"schedule {self.name} has one stage on each rank", "0")
        if self.needs_full_pipeline and m < warmup:
            raise config_error(
                "pipeline.num_microbatches", m, f"schedule {self.name} keeps two weight versions, which takes at least "
                f"the {warmup} micro-batches in a batch that stage 0 runs ahead (parallel.pp = {sizes.num_ranks})",
                str(warmup),
            )
        if self.early_switch is None:
            return
        # W(t+1) is made after the last backward of batch t, and stage 0 runs `warmup` forwards of batch t+1 before that
        # backward. Did one of them need W(t+1), each would wait for the other.
        lowest, highest = warmup - (p - 1), m - (p - 1)
        if not lowest <= self.early_switch <= highest:
            raise config_error(
                "pipeline.early_switch", self.early_switch, f"must be {lowest} to {highest} here: the {warmup} "
                "micro-batches that stage 0 runs ahead need the older weights, and parallel.pp - 1 + early_switch of "
                f"the pipeline.num_microbatches = {m} use them", str(min(lowest + 1, highest)),
            )

    def compute_actions(
        self, sizes: Sizes, rank: int, first_batch: int = 0, num_batches: int | None = None
    ) -> Iterator[Action]:
        """Yields the compute actions of one rank, lazily, for batches [first_batch, first_batch + num_batches).

        The pipeline is drained before the first and after the last of them. None means without end.

        Raises: ConfigError, at once, if this schedule cannot run on these sizes.
        """
        self.check_sizes(sizes)
        assert 0 <= rank < sizes.num_ranks, f"rank {rank} of {sizes.num_ranks}"
        assert first_batch >= self.sync_steps, f"batch {first_batch} runs as 1f1b, before {self.sync_steps} sync_steps"
        return (Action(kind, stage, k, self.version(sizes, stage, k, first_batch))
                for kind, stage, k in self._steps(sizes, rank, first_batch, num_batches))

    def _steps(
        self, sizes: Sizes, rank: int, first_batch: int, num_batches: int | None
    ) -> Iterator[tuple[Kind, int, int]]:
        m, warmup = sizes.num_microbatches, self.warmup(sizes, rank)
        if self.activations and not self.flush:
            num = None if num_batches is None else num_batches * m
            return vee.pattern(sizes, rank, self.activations, first_batch * m, num)
        if self.activations or "chunks" in self.options:
            batches = _count(first_batch, num_batches)
            steps = vee.batch_order(sizes, rank, self.activations) if self.activations else interleaved.batch_order(
                sizes, rank, warmup)
            return ((kind, stage, t * m + k) for t in batches for kind, stage, k in steps)
        order: Iterator[tuple[Kind, int]]
        if self.order:
            order = ((kind, t * m + k) for t in _count(first_batch, num_batches) for kind, k in self.order[rank])
        elif self.flush:
            batches = _count(first_batch, num_batches)
            order = (step for t in batches for step in _one_forward_one_backward(warmup, t * m, m))
        else:
            num_microbatches = None if num_batches is None else num_batches * m
            order = _one_forward_one_backward(warmup, first_batch * m, num_microbatches)
        return ((kind, rank, k) for kind, k in order)


def _count(first: int, num: int | None) -> Iterator[int]:
    return count(first) if num is None else iter(range(first, first + num))


def _one_forward_one_backward(warmup: int, first: int, num: int | None) -> Iterator[tuple[Kind, int]]:
    """`warmup` forwards, then a forward and a backward by turns, then the backwards that are left.

    Micro-batches [first, first + num), or without end.
    """
    forwards, backwards = _count(first, num), _count(first, num)
    for k in islice(forwards, warmup):
        yield Kind.F, k
    for k in forwards:
        yield Kind.F, k
        yield Kind.B, next(backwards)
    for k in backwards:
        yield Kind.B, k


def _synchronous_version(schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Batch t uses W(t)."""
    return microbatch // sizes.num_microbatches


def _double_buffered_version(schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Batch t uses W(t-1), batches up to sync_steps W(t): on every stage, whenever the pipeline was drained.

    With early_switch L the first p-1+L micro-batches do, which is at least what is in flight at an update; the others
    of batch t use W(t).
    """
    batch, index = divmod(microbatch, sizes.num_microbatches)
    stale = schedule.early_switch is None or index < sizes.num_stages - 1 + schedule.early_switch
    return batch - 1 if stale and batch > schedule.sync_steps else batch


def _latest_version(schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Each stage uses the latest weights it has: k - (p-1-r) backwards are behind it when it starts micro-batch k."""
    return max((microbatch - _depth_below(sizes, stage)) // sizes.num_microbatches, first_batch)


def _depth_below(sizes: Sizes, stage: int) -> int:
    """p-1-r: how many stages follow this one, which is what 1F1B runs ahead."""
    return sizes.num_stages - 1 - stage


def _times_depth_below(factor: int) -> SizeOf:
    """k(p-1-r): k - 1 micro-batches on every link, to and fro, so that transfers of (k-1)/2 periods take nobody's time.

    Source: with k = 2, eager 1F1B, arXiv 2211.05322.
    """
    return lambda sizes, stage: factor * _depth_below(sizes, stage)


def _stashed_versions(sizes: Sizes, stage: int) -> int:
    """p-r micro-batches are in flight, and m in a row share a version."""
    return -(-_depth_below(sizes, stage) // sizes.num_microbatches) + 1


def _constant(value: int) -> SizeOf:
    return lambda sizes, stage: value


def _synchronous(name: str, source: str, warmup: SizeOf, *options: str) -> Schedule:
    return Schedule(name, source, True, warmup, _synchronous_version, _constant(1), options=frozenset(options))


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _synchronous("naive", "one micro-batch in the whole pipeline at a time", _constant(0)),
        _synchronous("gpipe", "GPipe, arXiv 1811.06965, figure 2", lambda sizes, stage: sizes.num_microbatches),
        _synchronous(
            "1f1b", "PipeDream-Flush, arXiv 2006.09503, section 3.2", _depth_below, "warmup", "zero_bubble",
            "placement"),
        _synchronous(
            "interleaved", "interleaved 1F1B, arXiv 2104.04473, section 2.2", interleaved.warmup, "chunks",
            "zero_bubble"),
        Schedule(
            "2bw", "PipeDream-2BW, arXiv 2006.09503, section 3.1", False, _depth_below, _double_buffered_version,
            _constant(2), num_gradient_buffers=2, needs_full_pipeline=True,
            options=frozenset({"warmup", "early_switch", "sync_steps", "placement"}),
        ),
        Schedule(
            "pipedream", "PipeDream with weight stashing, arXiv 1806.03377", False, _depth_below,
            _latest_version, _stashed_versions, options=frozenset({"sync_steps"}),
            # Receives posted early may stand before a send that another stage needs for its update, which this one
            # waits for: check finds that deadlock where an axis has one communicator.
            receive_ahead=0,
        ),
    )
}

OWN = _synchronous("own", "pipeline.order", _constant(0), "order")
"""Ones of the user's, which an order makes (`make_schedule`)."""
_ORDER = '["F0 F1 B0 B1", "F0 B0 F1 B1"]'
WARMUPS = {"depth": 1, "latency": 2, "bandwidth": 3}
"""By name k, where stage r runs k(p-1-r) forwards ahead. 3 keeps a link busy all the time: no more is worth while."""


def make_schedule(
    name: str, *, warmup: str = "depth", early_switch: int | None = None, gradient_buffers: int = 0,
    sync_steps: int = 0, chunks: int = 0, zero_bubble: bool = False, placement: str = "loop",
    activations: str = "full", order: Sequence[str] = (),
) -> Schedule:
    """The schedule of that name with its options: the keys of the configuration's section `pipeline`. (How many chunks
    a rank holds is then one of the sizes.)

    Raises: ConfigError with every option that it does not know or that has no such value.
    """
    schedule = find_schedule(name)
    factor = WARMUPS.get(warmup, 0)
    most = schedule.num_gradient_buffers
    # With fewer than it can use all stages stop at the same backward. What a longer warm-up has in flight cannot pass
    # those that have stopped where the transfers of a rank on an axis queue: check finds deadlocks from 4 stages on.
    buffers = (0, most) if factor > 1 else range(most + 1)
    # nor can it pass a drain, where it is long
    warmups = [name for name, k in WARMUPS.items() if k < 3 or not schedule.flush]
    options = {  # value, the one that changes nothing, whether it is allowed, the rule
        "warmup": (warmup, "depth", warmup in warmups, f"must be {' or '.join(warmups)} with schedule {name}"),
        "early_switch": (early_switch, None, (early_switch or 0) >= 0, "must be off or at least 0"),
        "gradient_buffers": (
            gradient_buffers, gradient_buffers, gradient_buffers in buffers,
            f"must be {' or '.join(map(str, buffers))} with schedule {name} and pipeline.warmup = {warmup!r}",
        ),
        "sync_steps": (sync_steps, 0, sync_steps >= 0, "must not be negative"),
        "zero_bubble": (zero_bubble, False, not zero_bubble or placement != "v",
                        "is what the order of a V does of itself"),
        "placement": (placement, "loop", True, ""),
        "activations": (
            activations, activations, placement != "v" or schedule.flush or activations in vee.ENDLESS,
            f"must be {' or '.join(vee.ENDLESS)} with schedule {name}, which never drains"),
        "order": (tuple(order), (), bool(order) == (name == "own"),
                  "must name what each rank computes with schedule own"),
        "chunks": (chunks, 0, chunks == 0 or chunks > 1, "must be at least 2, or 0 for 2; one on each rank is 1f1b"),
    }
    problems = []
    for option, (value, default, allowed, rule) in options.items():
        if value != default and option not in schedule.options:
            knowing = [other.name for other in (*SCHEDULES.values(), OWN) if option in other.options]
            allowed, rule = False, f"schedule {name} has no such option, only {' and '.join(knowing)}"
        if not allowed:
            works = {"warmup": "depth", "early_switch": "off", "zero_bubble": "false", "placement": "loop",
                     "activations": "half", "order": _ORDER if name == "own" else "[]"}.get(option, "0")
            problems.append(Problem(f"pipeline.{option}", value, rule, works))
    if problems:
        raise ConfigError(*problems)
    if order:
        steps = tuple(own_order.parse_order(line, rank) for rank, line in enumerate(order))
        return replace(schedule, order=steps, warmup=lambda sizes, rank: own_order.runs_ahead(steps[rank]))
    ahead = _times_depth_below(factor) if factor > 1 else schedule.warmup
    if zero_bubble and "chunks" in schedule.options:
        ahead = interleaved.lean_warmup
    if placement == "v":
        buffered = replace(schedule, num_gradient_buffers=gradient_buffers or most, sync_steps=sync_steps)
        return _on_v(buffered, activations, warmup=warmup, early_switch=early_switch)
    return replace(
        schedule, warmup=ahead, zero_bubble=zero_bubble,
        # Transfers that take nobody's time may last (k-1)/2 forwards and backwards: receives are posted early enough.
        # With the longer warm-up that cannot deadlock on any transport, if no stage waits for a drain.
        receive_ahead=2 if factor > 1 and not schedule.flush else schedule.receive_ahead,
        early_switch=early_switch, num_gradient_buffers=gradient_buffers or most, sync_steps=sync_steps,
    )


def _on_v(schedule: Schedule, activations: str, *, warmup: str, early_switch: int | None) -> Schedule:
    """The schedule on a V. Raises: ConfigError with every option that has no meaning there."""
    rule = "is the order of a V's own: pipeline.placement = v has no such option"
    problems = [Problem(f"pipeline.{name}", value, rule, off) for name, value, off in (
        ("warmup", warmup, "depth"), ("early_switch", "off" if early_switch is None else early_switch, "off"))
        if value != off]
    if not schedule.flush and schedule.num_gradient_buffers == 1:
        problems.append(Problem("pipeline.gradient_buffers", 1, "must be 2 with pipeline.placement = v, where the next "
                                "batch reaches a rank's second chunk before this one has left its first", "0"))
    if problems:
        raise ConfigError(*problems)
    ahead = schedule.warmup if schedule.flush else partial(vee.warmup, activations=activations)
    return replace(schedule, activations=activations, warmup=ahead)


def schedule_of(pipeline: PipelineConfig) -> Schedule:
    """The schedule of a configuration; early_switch = "auto" counts as "off" until it is measured.

    Raises: ConfigError.
    """
    early_switch = pipeline.early_switch
    return make_schedule(
        pipeline.schedule, warmup=pipeline.warmup, early_switch=early_switch if isinstance(early_switch, int) else None,
        gradient_buffers=pipeline.gradient_buffers, sync_steps=pipeline.sync_steps, chunks=pipeline.chunks,
        zero_bubble=pipeline.zero_bubble, placement=pipeline.placement, activations=pipeline.activations,
        order=pipeline.order)


def find_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of that name; a Schedule is returned as it is.

    Raises: ConfigError if there is none.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule == OWN.name:
        return OWN
    if schedule not in SCHEDULES:
        raise config_error("pipeline.schedule", schedule, f"must be one of {', '.join(SCHEDULES)}", "1f1b")
    return SCHEDULES[schedule]
