"""Results of the search: a table, plain data, and the configuration for `hybridpar train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from rich.table import Table

from hybridpar.config import Config, PlanConfig, to_toml
from hybridpar.planner.costs.candidate_memory import TIGHT
from hybridpar.planner.costs.step_cost import TRANSFERS, StepCost
from hybridpar.planner.measuring.profile import Profile
from hybridpar.planner.searching.candidates import Candidate
from hybridpar.planner.searching.search import ERROR, STALE_GAIN, Result, handicaps
from hybridpar.runtime.graphs import unsupported
from hybridpar.schedules.kinds import PER_ITEM, Kind
from hybridpar.schedules.simulate.timeline import milliseconds

_MIB = 2**20
_SHOWN_FAILURES = 3
_MOST_SIZES = 8
"""Most stages whose sizes are all written out."""
_WORTH_SAYING = 0.05
_COST_OF_STALENESS = (
    "What they cost, in a study of a small GPT and a small BERT at equal tokens: 2bw as in the "
    "paper ends above the "
    "validation loss of 1f1b, by 18.5 % (GPT, AdamW), 4.1 % (GPT, Muon) and 22 % (BERT, Muon); "
    "with Muon, "
    "early_switch = 1 and staleness = extrapolation by 0.4 and 1.2 % (benchmarks/convergence). "
    "Nothing larger was "
    "trained."
)


@dataclass(frozen=True)
class PredictedParts:
    """Breakdown of a step into seconds that add up to the step.

    Args:
        rank: The busiest rank, such as stage 0.
        compute: Its forward and backward.
        launches: The part of these in which the device waits for kernel launches.
        tensor: Its collectives over tp.
        context: Its collectives over cp.
        experts: Its exchanges of rows over ep.
        optimizer: Its norm and update.
        reduction: Time that the step would save without gradient reductions.
        transfers: Time that the step would save without transfers between stages.
        moves: Time that the step would save without state transfers (between replicas, to a host,
            to a file).
        bubble: The rest.
    """

    compute: float
    launches: float
    tensor: float
    context: float
    experts: float
    optimizer: float
    reduction: float
    transfers: float
    moves: float
    bubble: float
    rank: str

    @property
    def seconds(self) -> dict[str, float]:
        """The parts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rank"}

    @property
    def bound_by(self) -> str:
        """The largest parts, in words."""
        names = (
            f"compute of {self.rank}",
            "launches of its kernels",
            "tensor-parallel collectives",
            "context-parallel collectives",
            "exchanges of rows with experts",
            "norm and optimizer",
            "reduction of gradients",
            "links between stages",
            "moves of state",
            "bubble",
        )
        parts = dict(zip(names, self.seconds.values(), strict=True))
        first, second, *_ = sorted(parts, key=lambda name: -parts[name])
        whole = sum(parts.values()) or 1.0
        text = f"{first} {parts[first] / whole:.0%}"
        return (
            f"{text}, {second} {parts[second] / whole:.0%}"
            if parts[second] > 0.05 * whole
            else text
        )


@lru_cache(maxsize=64)
def parts_of(cost: StepCost) -> PredictedParts:
    """Return the breakdown of a step, simulated with and without traffic between ranks."""
    step = cost.step_time
    costs = cost.costs
    m = cost.shape.num_microbatches
    busy = [rank.compute + rank.update / m for rank in cost.ranks]
    slowest = busy.index(max(busy))
    rank = cost.ranks[slowest]

    def saved(kinds: Sequence[Kind], **free: float | None) -> float:
        """Return the seconds that the step would save if these actions and costs were free."""
        calls = {kind: time for kind, time in costs.calls.items() if kind not in kinds}
        return max(0.0, step - cost.simulated(replace(costs, calls=calls, **free)))  # type: ignore[arg-type]

    reduction = (
        saved([Kind.REDUCE], reduce=0.0, gather=0.0, norm=0.0)
        if cost.replicas > 1 or costs.tied
        else 0.0
    )
    free = {
        "transfer": 0.0,
        "transfer_back": None,
        "latency": 0.0,
        "transfer_work": 0.0,
        "network": None,
    }
    transfers = saved(TRANSFERS, **free) if cost.pp > 1 else 0.0
    moves = exposed_moves(cost)
    gathers = sum(
        sum(cost.gathers(cost.stages[stage].blocks)) for stage in cost.shape.stages_of(slowest)
    )
    tensor = m * (sum(sum(cost.waits[cost.kind(n)]) for n in rank.blocks) + gathers)
    context = m * sum(sum(cost.context_waits.get(cost.kind(n), ())) for n in rank.blocks)
    experts = m * sum(sum(cost.expert_waits.get(cost.kind(n), ())) for n in rank.blocks)
    optimizer = rank.norm + rank.update
    launches = m * rank.idle
    compute = m * rank.compute - tensor - context - experts - launches
    of_blocks = compute + launches + tensor + context + experts
    rest = step - of_blocks - optimizer - reduction - transfers - moves
    return PredictedParts(
        compute,
        launches,
        tensor,
        context,
        experts,
        optimizer,
        reduction,
        transfers,
        moves,
        max(0.0, rest),
        f"{cost.shape.rank_name} {slowest}",
    )


def exposed_moves(cost: StepCost) -> float:
    """Return the seconds of a step in which ranks do nothing but move state or wait for it."""
    if cost.moves is None:
        return 0.0
    calls = {kind: time for kind, time in cost.costs.calls.items() if kind not in PER_ITEM}
    return max(
        0.0,
        cost.step_time
        - cost.simulated(
            replace(
                cost.costs,
                calls=calls,
                fetch=0.0,
                release=0.0,
                to_host=0.0,
                host=0.0,
                from_host=0.0,
            )
        ),
    )


def bound_by(candidate: Candidate, limit: float) -> str:
    """Return what keeps the candidate from being faster."""
    parts = parts_of(candidate.cost)
    text = parts.bound_by
    if parts.launches > _WORTH_SAYING * candidate.cost.step_time:
        why = unsupported(candidate.cost.job) or "train.cuda_graphs = false"
        text += f"; larger micro-batches hide launches, CUDA graphs do not run here ({why})"
    if candidate.memory is not None and candidate.peak > TIGHT * limit:
        text += f"; memory {candidate.peak / limit:.0%} full"
    return text


def describe(config: Config) -> str:
    """Return the plan as one line: 'tp=1 pp=2 dp=1, 8 micro-batches of 2, 2bw, blocks 3+3'."""
    parallel = config.parallel
    pipeline = config.pipeline
    context = f" cp={parallel.cp}" if parallel.cp > 1 else ""
    experts = f" ep={parallel.ep}" if parallel.ep > 1 else ""
    schedule, *rest = _how(config, pipeline.recompute)
    blocks = [f"blocks {_sizes(pipeline.split)}"] if parallel.pp > 1 else []
    return ", ".join(
        [
            f"tp={parallel.tp}{context} pp={parallel.pp} dp={parallel.dp}{experts}",
            f"{pipeline.num_microbatches} micro-batches of {config.train.micro_batch_size}",
            schedule,
            *blocks,
            *rest,
        ]
    )


def _sizes(split: Sequence[int]) -> str:
    """Return the blocks of each stage: '7+6+6+7'; of many stages with equal neighbours joined:
    '7+14x6+7'.
    """
    if len(split) <= _MOST_SIZES:
        return "+".join(map(str, split))
    runs = [(len(list(same)), size) for size, same in groupby(split)]
    return "+".join(f"{number}x{size}" if number > 1 else str(size) for number, size in runs)


def _how(config: Config, recompute: str) -> list[str]:
    """Return schedule, recomputation, ZeRO and the location of state, in words."""
    pipeline = config.pipeline
    schedule: str = pipeline.schedule
    if pipeline.warmup != "depth":
        schedule += f" (warm-up {pipeline.warmup})"
    if pipeline.stage_layout == "v":
        schedule += f" on a V ({pipeline.activations})"
    elif pipeline.num_virtual_stages > 1:
        schedule += f" ({pipeline.num_virtual_stages} stages a rank)"
    if pipeline.zero_bubble:
        schedule += " with zero bubbles"
    again = [f"recompute {recompute}"] if recompute != "none" else []
    rows = ["sequence parallelism"] if config.parallel.sequence and config.parallel.tp > 1 else []
    zero = [f"ZeRO-{config.parallel.zero}"] if config.parallel.zero else []
    host = ["optimizer on the host"] if config.memory.host_optimizer else []
    budget = []
    if config.memory.budget:
        budget = [f"{config.memory.budget / _MIB:,.0f} MiB of state in memory"]
    elif config.memory.limit:
        budget = [f"{config.memory.limit / _MIB:,.0f} MiB of memory"]
    away = []
    numbers = config.memory.num_away
    if numbers and isinstance(numbers, tuple):
        away = [f"activations of {'+'.join(map(str, numbers))} micro-batches in a file"]
    codecs = [
        f"{what} {name}"
        for what, name in (
            ("messages", config.compression.messages),
            ("gradients", config.compression.gradients),
        )
        if name != "none"
    ]
    return [schedule, *again, *rows, *zero, *host, *budget, *away, *codecs]


def table(result: Result) -> Table:
    """Return the ranked candidates as a table for a terminal."""
    shown = Table(
        title=f"{result.considered} configurations considered, the best first",
        title_justify="left",
        caption=_caption(result),
        caption_justify="left",
    )
    counts = result.ranked[0].config.model.counts if result.ranked else "tokens"
    has_context = any(one.config.parallel.cp > 1 for one in result.ranked)
    has_experts = any(one.config.parallel.ep > 1 for one in result.ranked)
    for heading in (
        "",
        "tp",
        *["cp"] * has_context,
        "pp",
        "dp",
        *["ep"] * has_experts,
        "micro-batches",
        "schedule",
        "split",
        "step ms",
        f"{counts}/s",
        "MFU",
        "GB",
        "bound by",
    ):
        shown.add_column(
            heading, justify="left" if heading in ("schedule", "split", "bound by") else "right"
        )
    for place, candidate in enumerate(result.ranked, 1):
        config = candidate.config
        cost = candidate.cost
        pipeline = candidate.config.pipeline
        memory = f"{candidate.peak / 1e9:.2f}" if candidate.memory is not None else "-"
        if host := max((stage.host for stage in candidate.memory or ()), default=0):
            memory += f", host {host / 1e9:.2f}"
        shown.add_row(
            str(place),
            str(config.parallel.tp),
            *[str(config.parallel.cp)] * has_context,
            str(config.parallel.pp),
            str(config.parallel.dp),
            *[str(config.parallel.ep)] * has_experts,
            f"{cost.shape.num_microbatches} x {config.train.micro_batch_size}",
            ", ".join(_how(config, _short(pipeline.recompute))),
            _short(_sizes(pipeline.split)),
            milliseconds(cost.step_time),
            f"{cost.tokens_per_s:,.0f}",
            f"{100 * cost.mfu:.1f} %" if cost.mfu else "-",
            memory,
            bound_by(candidate, result.limit),
        )
    return shown


def _caption(result: Result) -> str:
    """Return why the order differs from the order of step times."""
    text = (
        "micro-batches: their number on each replica x samples. split: blocks of each stage; 2x7: "
        f"two stages of 7. A plan with memory over {TIGHT:.0%} full is ranked as if its steps took "
        f"{ERROR:.1%} longer, because predictions may be off by that."
    )
    if any(one.is_stale for one in result.ranked):
        text += f" Old gradients must make it {STALE_GAIN:.0%} faster. {_COST_OF_STALENESS}"
    return text


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:21]}..."


def reasons(result: Result) -> list[str]:
    """Return lines on ranked candidates: why their state moves, the effect of stragglers on their
    steps, and why a faster one is behind the first."""
    return [
        f"{place}: {said}"
        for place, one in enumerate(result.ranked, 1)
        for said in (one.because, one.spread, why_behind(one, result))
        if said
    ]


def why_behind(candidate: Candidate, result: Result) -> str:
    """Return why a candidate that is faster than the first is behind it; empty if it is slower."""
    first = result.ranked[0]
    faster = first.cost.step_time / candidate.cost.step_time - 1
    if candidate is first or faster <= 0:
        return ""
    own = handicaps(candidate, result.limit)
    firsts = handicaps(first, result.limit)
    needed = [
        f"{reason} must make it {share:.1%} faster"
        for reason, share in own.items()
        if firsts.get(reason, 0.0) < share
    ]
    if not needed:  # among stragglers the median step counts
        return ""
    return f"{faster:.1%} faster than 1, but {' and '.join(needed)}"


def speed(cost: StepCost) -> str:
    """Return the predicted rate of tokens or samples, with MFU where the devices' peak is
    known."""
    mfu = f", MFU {100 * cost.mfu:.1f} %" if cost.mfu else ""
    return f"{cost.tokens_per_s:,.0f} {cost.config.model.counts}/s{mfu}"


def failures(result: Result) -> list[str]:
    """Return a line for each of the most likely candidates that cannot run."""
    lines = [
        f"rejected: {describe(one.config)}: {one.reason}" for one in result.failed[:_SHOWN_FAILURES]
    ]
    more = len(result.failed) - len(lines)
    return [*lines, f"and {more} more that do not fit"] if more > 0 else lines


def as_json(result: Result) -> dict[str, Any]:
    """Return plain values."""
    return {
        "ok": bool(result.ranked),
        "considered": result.considered,
        "memory_limit": result.limit,
        "ranked": [_plain(one, result) for one in result.ranked],
        "failed": [{**_choice(one.config), "reason": one.reason} for one in result.failed],
    }


def _choice(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    pipeline = config.pipeline
    return {
        "tp": parallel.tp,
        "cp": parallel.cp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "ep": parallel.ep,
        "zero": parallel.zero,
        "micro_batch_size": config.train.micro_batch_size,
        "num_microbatches": pipeline.num_microbatches,
        "schedule": pipeline.schedule,
        "virtual_stages": pipeline.num_virtual_stages,
        "warmup": pipeline.warmup,
        "stage_layout": pipeline.stage_layout,
        "activations": pipeline.activations,
        "zero_bubble": pipeline.zero_bubble,
        "early_switch": pipeline.early_switch,
        "split": list(pipeline.split),
        "recompute": pipeline.recompute,
        "host_optimizer": config.memory.host_optimizer,
        "limit": config.memory.limit,
        "budget": config.memory.budget,
        "messages": config.compression.messages,
        "gradients": config.compression.gradients,
    }


def _plain(candidate: Candidate, result: Result) -> dict[str, Any]:
    cost = candidate.cost
    memory = candidate.memory
    return {
        **_choice(candidate.config),
        "step_ms": 1e3 * cost.step_time,
        "tokens_per_s": cost.tokens_per_s,
        "mfu": cost.mfu or None,
        "price_per_million_tokens": cost.price or None,
        "memory": None if memory is None else [stage.total for stage in memory],
        "host_memory": None if memory is None else [stage.host for stage in memory],
        "bound_by": bound_by(candidate, result.limit),
        "because": candidate.because,
        "why_behind": why_behind(candidate, result),
        "stragglers_ms": candidate.spread
        and [1e3 * candidate.spread.median, 1e3 * candidate.spread.late],
        "parts_ms": {name: 1e3 * seconds for name, seconds in parts_of(cost).seconds.items()},
    }


def planned(candidate: Candidate) -> Config:
    """Return the candidate's configuration, with its predicted numbers."""
    memory = tuple(round(stage.total / _MIB, 1) for stage in candidate.memory or ())
    hardware = candidate.cost.machine.profile.hardware
    return replace(
        candidate.config,
        plan=PlanConfig(round(1e3 * candidate.cost.step_time, 6), memory, round(hardware.taken, 2)),
    )


def plan_toml(candidate: Candidate) -> str:
    """Return the text of plan.toml, an ordinary configuration."""
    return f"# {describe(candidate.config)}\n\n{to_toml(planned(candidate))}"


def profile_lines(profile: Profile) -> list[str]:
    """Return a profile in a few lines for the user."""
    hardware = profile.hardware
    lines = [
        f"{hardware.name}, {hardware.hosts} x {hardware.devices_per_host} ranks, {hardware.cores} "
        "cores",
        f"{'block':<10} {'tp':>3} micro-batch {'forward':>9} {'backward':>9} {'waits':>9} "
        f"{'optimizer':>9}  ms",
    ]
    for (kind, tp, b), cost in profile.blocks.items():
        numbers = (
            cost.forward,
            cost.backward,
            cost.forward_wait + cost.backward_wait,
            cost.norm + cost.update,
        )
        lines.append(f"{kind:<10} {tp:>3} {b:>11} " + " ".join(f"{1e3 * x:9.3f}" for x in numbers))
    for name, link in profile.links.items():
        reduce = ", ".join(
            f"all-reduce over {n} {_rate(curve.bandwidth)}" for n, curve in link.reduce.items()
        )
        there, back = map(_rate, link.rates)
        rates = there if link.there == 1 else f"{there} to a later rank, {back} back"
        lines.append(f"{name}: {1e6 * link.send.latency:.0f} us, {rates}; {reduce}")
    return lines


def _rate(bytes_per_s: float) -> str:
    mb = bytes_per_s / 1e6
    return f"{mb:,.0f} MB/s" if mb >= 100 else f"{mb:.3g} MB/s"
