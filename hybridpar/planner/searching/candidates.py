"""Create the planner's candidates: every grid, micro-batch size and schedule that devices and batch
allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice, product

from hybridpar.config import Config, MemoryConfig, OptimConfig, ParallelConfig, PipelineConfig
from hybridpar.errors import ConfigError, config_error
from hybridpar.job import JobPlan
from hybridpar.models.balance import even_out
from hybridpar.models.cost import KEPT_BYTES
from hybridpar.planner.costs.sequence import may_split_rows, with_split_rows
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.machines.stragglers import Spread, spread
from hybridpar.planner.searching.bound import least_time
from hybridpar.planner.searching.split import BlockCosts, Matrix, best_split, sums
from hybridpar.prediction import StageMemory
from hybridpar.schedules.orders import vee
from hybridpar.schedules.schedule_table import WARMUPS, find_schedule
from hybridpar.validate import problems

INTERLEAVED = "interleaved"
CHUNKS = (2, 3, 4)
STALE = frozenset({"2bw", "pipedream"})
"""Schedules with stale weights, which are considered only if requested."""


@dataclass(frozen=True)
class Request:
    """The user's request to the planner.

    Args:
        keep: Sizes of axes that must stay.
        batch_size: Samples of a step; 0 for the configuration's.
        schedules: Names of schedules; empty for the configuration's and those without stale
            weights.
        micro_batches: Micro-batch sizes; empty for all profiled sizes and powers of two between
            them.
        top: Number of candidates to rank.
        quick: Whether to predict memory only for the best candidates and those that may not fit.
        compression: Whether to try codecs.
        split_backward: Whether to try zero-bubble and V schedules.
    """

    keep: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 0
    schedules: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    top: int = 5
    quick: bool = False
    compression: bool = False
    split_backward: bool = True


@dataclass
class Candidate:
    """One configuration under consideration.

    `reason` says why it cannot run ("" if it can). `because` says why its state moves, if it does.
    With `is_simulated` its bound is the simulated step time.
    """

    config: Config
    cost: StepCost
    memory: list[StageMemory] | None = None
    reason: str = ""
    because: str = ""
    tried_recomputation: bool = False
    is_simulated: bool = False

    def reject(self, reason: str) -> None:
        """Record why the candidate cannot run."""
        self.reason = reason

    def explain(self, because: str) -> None:
        """Record why the candidate's state moves."""
        self.because = because

    def set_memory(self, memory: list[StageMemory]) -> None:
        """Set the predicted memory."""
        self.memory = memory

    @cached_property
    def spread(self) -> Spread | None:
        """Step times with stragglers, or None if the machine has none."""
        return spread(self.cost)

    @cached_property
    def least_time(self) -> float:
        """A lower bound on the step time."""
        return least_time(self.cost)

    @property
    def bound(self) -> float:
        """The step time if it is simulated, else a lower bound on it."""
        return self.cost.step_time if self.is_simulated else self.least_time

    def simulate(self) -> None:
        """Make the simulated step time the bound."""
        self.is_simulated = True

    @property
    def peak(self) -> float:
        """Bytes of the fullest stage; if limits differ, scaled to the smallest limit."""
        least = min(self.cost.limits)
        return max(
            (
                stage.needed * least / limit
                for stage, limit in zip(self.memory or [], self.cost.limits, strict=True)
            ),
            default=0.0,
        )

    @property
    def is_stale(self) -> bool:
        """Whether the candidate trains on stale weights."""
        return self.config.pipeline.schedule in STALE

    @property
    def grid(self) -> tuple[int, int, int]:
        parallel = self.config.parallel
        return parallel.tp, parallel.pp, parallel.dp


def candidates(config: Config, machine: Machine, request: Request) -> Iterator[Candidate]:
    """Yield every grid with the configuration's cp and ep, micro-batch size and schedule."""
    batch = batch_size(config, request)
    split_rows = cache(partial(_split_rows_take_less, config, machine))
    for tp, pp, dp in grids(config, machine, request.keep):
        if batch % dp:
            continue
        for b in micro_batches(machine, tp, batch // dp, request):
            m = batch // (dp * b)
            parallel = replace(config.parallel, tp=tp, pp=pp, dp=dp, sequence=split_rows(tp, b))
            for pipeline, optim in _schedules(config, pp, dp, m, request):
                made = replace(
                    config,
                    pipeline=replace(pipeline, num_microbatches=m, recompute="none"),
                    optim=optim,
                    parallel=parallel,
                    memory=config.memory.on_another_grid(),
                    train=replace(config.train, micro_batch_size=b),
                )
                same = len(config.pipeline.split) == pp * pipeline.num_virtual_stages
                if config.pipeline.split and same and request.keep.get("pp"):
                    made = replace(
                        made, pipeline=replace(made.pipeline, split=config.pipeline.split)
                    )
                    yield Candidate(made, StepCost(made, machine))
                else:
                    yield balanced(made, machine)


def sharing_samples(config: Config, machine: Machine, request: Request) -> Iterator[Candidate]:
    """Yield candidates whose ranks share the tokens of samples (parallel.cp), with every cp that
    divides the devices and that the model supports; none if the user has chosen cp."""
    if "cp" in request.keep:
        return
    for cp in range(2, machine.num_devices + 1):
        made = replace(config, parallel=replace(config.parallel, cp=cp))
        alone = replace(made, parallel=ParallelConfig(cp=cp, dp=1), pipeline=PipelineConfig())
        if machine.num_devices % cp == 0 and not problems(alone, cp):
            yield from candidates(made, machine, request)


def sharing_experts(config: Config, machine: Machine, request: Request) -> Iterator[Candidate]:
    """Yield candidates whose ranks share the experts of each layer (parallel.ep), with every ep that
    divides the devices; none without experts, or if the user has chosen ep."""
    experts = config.model.routed_experts
    if "ep" in request.keep or experts is None:
        return
    for ep in range(2, min(machine.num_devices, experts.number) + 1):
        made = replace(config, parallel=replace(config.parallel, ep=ep))
        dp = made.parallel.least_dp
        cp = config.parallel.cp
        alone = replace(
            made, parallel=ParallelConfig(cp=cp, dp=dp, ep=ep), pipeline=PipelineConfig()
        )
        if machine.num_devices % ep == 0 and not problems(alone, dp * cp):
            yield from candidates(made, machine, request)


def _split_rows_take_less(config: Config, machine: Machine, tp: int, b: int) -> bool:
    """Return whether sequence parallelism is requested, or makes a layer faster; it never takes
    more memory."""
    made = replace(
        config,
        parallel=ParallelConfig(tp, dp=1),
        pipeline=PipelineConfig(),
        memory=MemoryConfig(),
        train=replace(config.train, micro_batch_size=b),
    )
    if config.parallel.sequence or not may_split_rows(made):
        return config.parallel.sequence
    plain, split = (StepCost(one, machine).block_time(1) for one in (made, with_split_rows(made)))
    return sum(split) < sum(plain)


def batch_size(config: Config, request: Request) -> int:
    """Return the number of samples of a step. Raises: ConfigError if it is not valid."""
    own = (
        config.train.micro_batch_size
        * config.pipeline.num_microbatches
        * max(config.parallel.dp, 1)
    )
    if request.batch_size < 0:
        raise config_error(
            "batch_size",
            request.batch_size,
            "must be positive, or 0 to keep the configuration's batch size",
            str(own),
        )
    return request.batch_size or own


def grids(config: Config, machine: Machine, keep: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return (tp, pp, dp) of every grid that uses all devices with the configuration's cp and ep.
    Tensor parallelism stays within a server unless the user has set it."""
    number, rest = divmod(machine.num_devices, config.parallel.cp)
    found: list[tuple[int, int, int]] = []
    if rest:
        return found
    for tp in [t for t in range(1, number + 1) if number % t == 0]:
        if (
            tp != keep.get("tp", tp)
            or tp > config.model.max_tp
            or tp not in machine.profile.tp_degrees
        ):
            continue
        if tp > machine.devices_per_server and "tp" not in keep:
            continue
        for pp in [p for p in range(1, number // tp + 1) if number // tp % p == 0]:
            dp = number // (tp * pp)
            if (
                pp == keep.get("pp", pp)
                and dp == keep.get("dp", dp)
                and pp <= config.model.num_blocks
                and dp * config.parallel.cp % config.parallel.ep == 0
            ):
                found.append((tp, pp, dp))
    return found


def micro_batches(machine: Machine, tp: int, samples: int, request: Request) -> list[int]:
    """Return the profiled micro-batch sizes that divide a replica's samples."""
    known = machine.profile.micro_batches(tp)
    wanted = request.micro_batches or [
        b for b in range(min(known), max(known) + 1) if b in known or b & (b - 1) == 0
    ]
    return [b for b in wanted if samples % b == 0]


def _schedules(
    config: Config, pp: int, dp: int, m: int, request: Request
) -> Iterator[tuple[PipelineConfig, OptimConfig]]:
    """Yield each schedule with the settings that it needs, and variants that drain faster or take
    less memory.

    The schedules are the requested ones, or by default the configuration's and those without stale
    weights.
    """
    own = replace(config.pipeline, stage_layout="loop", activations="full", zero_bubble=False)
    names = request.schedules or ("1f1b" if own.order else own.schedule, "1f1b", INTERLEAVED)
    own = replace(own, order=())
    for name in dict.fromkeys(find_schedule(name).name for name in names):
        stale = name in STALE
        if stale and pp == dp == 1 and not request.schedules:
            continue  # with dp = 1 no replica waits for another
        optim = config.optim
        if not stale and optim.staleness != "none":
            optim = replace(optim, staleness="none")
        base = own
        if name != own.schedule:
            base = replace(
                own,
                schedule=name,  # type: ignore[arg-type]
                warmup="depth",
                early_switch="off",
                gradient_buffers=0,
                virtual_stages=0,
                sync_steps=own.sync_steps if stale else 0,
            )
        several = [
            chunks
            for chunks in ((base.virtual_stages,) if base.virtual_stages else CHUNKS)
            if 1 < pp <= config.model.num_blocks // chunks
        ]
        if name == INTERLEAVED:
            for chunks in several:
                pipeline = replace(base, virtual_stages=chunks, num_microbatches=m, split=())
                yield pipeline, optim
                if request.split_backward:
                    yield replace(pipeline, zero_bubble=True, split_backward=True), optim
            continue
        # without a drain, virtual stages only improve balance, and equal layers divide as well into
        # one stage per rank
        looped = several if name == "2bw" and not config.model.layers_field else []
        warmups = tuple(WARMUPS) if name == "2bw" and pp > 1 else (base.warmup,)
        for chunks, warmup in product((0, *looped), warmups):
            switch = base.early_switch
            factor = WARMUPS[warmup]
            if isinstance(switch, int):
                least = (factor - 1) * (pp - 1)
                if switch < least and warmup != base.warmup:
                    continue  # more micro-batches would train on staler weights than requested
                switch = max(switch, least)
            if chunks and switch == "auto":
                continue
            pipeline = replace(
                base,
                warmup=warmup,  # type: ignore[arg-type]
                virtual_stages=chunks,
                early_switch=switch,
                num_microbatches=m,
                split=(),
                gradient_buffers=0
                if factor > 1 and base.gradient_buffers == 1
                else base.gradient_buffers,
            )
            if not _can_run(config, pipeline, pp):
                continue
            yield pipeline, optim
            if request.split_backward and pp > 1 and name == "1f1b" and pipeline.warmup == "depth":
                yield replace(pipeline, zero_bubble=True, split_backward=True), optim
        v_exists = 1 < pp <= config.model.num_blocks // 2 and (
            name == "1f1b" or (name == "2bw" and base.early_switch == "off")
        )
        if request.split_backward and v_exists:
            made = replace(
                base,
                stage_layout="v",
                split_backward=True,
                warmup="depth",
                early_switch="off",
                virtual_stages=0,
                gradient_buffers=0,
                num_microbatches=m,
            )
            yield from (
                (pipeline, optim)
                for pipeline in islice(on_v(replace(config, pipeline=made), pp), 1)
            )


def _can_run(config: Config, pipeline: PipelineConfig, pp: int) -> bool:
    """Return whether the schedule runs on `pp` ranks."""
    job = JobPlan(replace(config, pipeline=pipeline, parallel=replace(config.parallel, pp=pp)))
    try:
        job.schedule.check_shape(job.shape)
    except ConfigError:
        return False
    return True


def on_v(config: Config, pp: int, than: str = "") -> Iterator[PipelineConfig]:
    """Yield V schedules with every amount of activations that a rank may keep, or only amounts
    below `than`; the largest amount, which has the fewest bubbles, comes first."""
    sizes = ("full", "half", "min")
    for activations in sizes[sizes.index(than) + 1 if than else 0 :]:
        made = replace(config.pipeline, activations=activations, split=())  # type: ignore[arg-type]
        if _can_run(config, made, pp):
            yield made


def balanced(config: Config, machine: Machine) -> Candidate:
    """Return a candidate with the split whose slowest stage is fastest, regardless of memory; of
    equal splits, the one that needs the least memory."""
    cost = StepCost(config, machine)
    if cost.pp > 1:
        costs = block_costs(cost)
        found = best_split(costs, cost.shape.num_stages, _held(cost), slowness=cost.slowness)
        assert found is not None, "there are as many blocks as stages"
        split = (
            found.sizes
            if machine.others
            else even_out(
                costs.totals,
                found.sizes,
                cost.pp,
                config.pipeline.stage_layout,
            )
        )
        config = replace(config, pipeline=replace(config.pipeline, split=split))
        cost = StepCost(config, machine)
    return Candidate(config, cost)


def _held(cost: StepCost) -> Callable[[int, bool], Matrix]:
    """Return a function of (stage, recomputed) that estimates memory, to compare splits.

    Its result [i, j] is about the memory of blocks i .. j-1 on the stage: weights, gradients,
    Adam's state, and activations of micro-batches in flight.
    """
    config = cost.config
    sizes = cost.shape
    schedule = cost.schedule
    mixed = config.train.dtype in ("bf16", "fp16")
    moments = 2 * (config.optim.name in ("adamw", "lamb"))
    rest = (
        cost.gradient_bytes * schedule.num_gradient_buffers
        + 4 * (mixed + moments) / cost.zero_share
    )
    likely = {cost.kind(1): KEPT_BYTES / 2 * cost.message_bytes / cost.tp}
    blocks = range(config.model.num_blocks)
    parameters = sums([cost.block(n).parameters for n in blocks])
    kept = sums([cost.block(n).kept or likely.get(cost.kind(n), 0.0) for n in blocks])

    # the exact number would take as long to compute as the plan
    filled = schedule.flush and schedule.activations in vee.ENDLESS

    @cache
    def of_numbers(versions: int, held: int) -> Matrix:
        state = versions * cost.item + rest
        return state * parameters + held / sizes.virtual_stages * kept

    @cache
    def of_rank(rank: int) -> Matrix:
        held = (
            vee.room(sizes, schedule.activations)
            if filled
            else schedule.max_live_activations(sizes, rank)
        )
        return of_numbers(schedule.max_live_versions(sizes, rank), held)

    return lambda stage, again: of_rank(sizes.rank_of(stage))


def block_costs(cost: StepCost) -> BlockCosts:
    """Return the seconds of each block; of norm and update, a micro-batch's share."""
    blocks = range(cost.config.model.num_blocks)
    m = cost.shape.num_microbatches
    times = [cost.block_time(n) for n in blocks]
    updates = [(cost.block(n).norm + cost.block(n).update / cost.zero_share) / m for n in blocks]
    return BlockCosts([f for f, _ in times], [b for _, b in times], updates)
