"""What the search found: a table, plain data, and the configuration that `hybridpar train` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rich.table import Table

from hybridpar.config import Config, PlanConfig, to_toml
from hybridpar.pipeline.plan.action import Kind
from hybridpar.planner.candidates import STALE_GAIN, Candidate
from hybridpar.planner.cost import Model
from hybridpar.planner.profile import Profile
from hybridpar.planner.room import TIGHT
from hybridpar.planner.search import ERROR, Result

_MIB = 2**20
_SHOWN_FAILURES = 3
_REDUCTIONS = frozenset({Kind.REDUCE})
_TIMES = ("forward", "backward", "waits", "optimizer")
_COST_OF_STALENESS = (
    "What they cost, in a study of a small GPT and a small BERT at equal tokens: 2bw as in the paper ends above the "
    "validation loss of 1f1b, by 18.5 % (GPT, AdamW), 4.1 % (GPT, Muon) and 22 % (BERT, Muon); with Muon, "
    "early_switch = 1 and staleness = extrapolation by 0.4 and 1.2 % (benchmarks/convergence). Nothing larger was "
    "trained.")
_TRANSFERS = (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True)
class Parts:
    """Where a step's time goes, by what takes it: seconds that add up to the step.

    compute: the busiest rank's forward and backward. tensor: its collectives over tp. optimizer: its norm and update.
    reduction, transfers: what the step would be shorter by without them. bubble: the rest.
    """

    compute: float
    tensor: float
    optimizer: float
    reduction: float
    transfers: float
    bubble: float
    rank: str
    """The slowest, such as stage 0."""

    @property
    def bound_by(self) -> str:
        """What weighs most, in words."""
        parts = {
            f"compute of {self.rank}": self.compute, "tensor-parallel collectives": self.tensor,
            "norm and optimizer": self.optimizer, "reduction of gradients": self.reduction,
            "links between stages": self.transfers, "bubble": self.bubble}
        first, second, *_ = sorted(parts, key=lambda name: -parts[name])
        whole = sum(parts.values()) or 1.0
        text = f"{first} {parts[first] / whole:.0%}"
        return f"{text}, {second} {parts[second] / whole:.0%}" if parts[second] > 0.05 * whole else text


@lru_cache(maxsize=64)
def parts_of(model: Model) -> Parts:
    """Simulated with and without what goes between ranks."""
    step, costs, m = model.step_time, model.costs, model.sizes.num_microbatches
    waits = [sum(sum(model.waits[model.kind(n)]) for n in rank.blocks) for rank in model.ranks]
    busy = [rank.compute + rank.update / m for rank in model.ranks]
    slowest = busy.index(max(busy))
    rank = model.ranks[slowest]
    calls = {kind: time for kind, time in costs.calls.items() if kind not in _REDUCTIONS}
    free = replace(costs, reduce=0.0, gather=0.0, norm=0.0, calls=calls)
    reduction = max(0.0, step - model.simulated(free)) if model.dp > 1 or costs.tied else 0.0
    free = replace(costs, transfer=0.0, latency=0.0, transfer_work=0.0,
                   calls={kind: time for kind, time in costs.calls.items() if kind not in _TRANSFERS})
    transfers = max(0.0, step - model.simulated(free)) if model.pp > 1 else 0.0
    tensor, optimizer = m * waits[slowest], rank.norm + rank.update
    compute = m * rank.compute - tensor
    rest = step - compute - tensor - optimizer - reduction - transfers
    return Parts(compute, tensor, optimizer, reduction, transfers, max(0.0, rest),
                 f"{model.sizes.rank_name} {slowest}")


def bound_by(candidate: Candidate, limit: float) -> str:
    """What keeps the candidate from being faster."""
    text = parts_of(candidate.model).bound_by
    if candidate.memory is not None and candidate.peak > TIGHT * limit:
        text += f"; memory {candidate.peak / limit:.0%} full"
    return text


def describe(config: Config) -> str:
    """The choice in one line: 'tp=1 pp=2 dp=1, micro-batch 2 x 8, 2bw'."""
    parallel, pipeline = config.parallel, config.pipeline
    text = f"tp={parallel.tp} pp={parallel.pp} dp={parallel.dp}"
    text += f", {pipeline.num_microbatches} micro-batches of {config.train.micro_batch_size}, {pipeline.schedule}"
    if pipeline.warmup != "depth":
        text += f" (warm-up {pipeline.warmup})"
    if pipeline.num_chunks > 1:
        text += f" ({pipeline.num_chunks} chunks)"
    if parallel.pp > 1:
        text += f", blocks {'+'.join(map(str, pipeline.split))}"
    if pipeline.recompute != "none":
        text += f", recompute {pipeline.recompute}"
    return text + (", ZeRO-1" if parallel.zero else "")


def table(result: Result) -> Table:
    """The ranked candidates, for a terminal."""
    shown = Table(title=f"{result.considered} configurations considered, the best first", title_justify="left",
                  caption=_caption(result), caption_justify="left")
    for heading, justify in (
            ("", "right"), ("tp", "right"), ("pp", "right"), ("dp", "right"), ("micro-batches", "right"),
            ("schedule", "left"), ("split", "left"), ("step ms", "right"), ("tokens/s", "right"), ("GB", "right"),
            ("bound by", "left")):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for place, candidate in enumerate(result.ranked, 1):
        config, model = candidate.config, candidate.model
        pipeline, (tp, pp, dp) = config.pipeline, candidate.grid
        how = pipeline.schedule + (f", {pipeline.warmup}" if pipeline.warmup != "depth" else "")
        how += f" x {pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
        how += "" if pipeline.recompute == "none" else f", recompute {_short(pipeline.recompute)}"
        how += ", ZeRO-1" if config.parallel.zero else ""
        memory = f"{candidate.peak / 1e9:.2f}" if candidate.memory is not None else "-"
        if host := max((stage.host for stage in candidate.memory or ()), default=0):
            memory += f", host {host / 1e9:.2f}"
        shown.add_row(
            str(place), str(tp), str(pp), str(dp), f"{pipeline.num_microbatches} x {config.train.micro_batch_size}",
            how, _short("+".join(map(str, pipeline.split))), f"{1e3 * model.step_time:.4g}",
            f"{model.tokens_per_s:,.0f}", memory, bound_by(candidate, result.limit))
    return shown


def _caption(result: Result) -> str:
    """By what the order differs from that of step times."""
    text = f"Memory over {TIGHT:.0%} full must make a configuration {ERROR:.1%} faster: so far predictions may be off."
    if any(one.is_stale for one in result.ranked):
        text += f" Old gradients must make it {STALE_GAIN:.0%} faster. {_COST_OF_STALENESS}"
    return text


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:21]}..."


def failures(result: Result) -> list[str]:
    """A line for each of the likeliest that cannot run."""
    lines = [f"not {describe(one.config)}: {one.reason}" for one in result.failed[:_SHOWN_FAILURES]]
    more = len(result.failed) - len(lines)
    return [*lines, f"and {more} more that do not fit"] if more > 0 else lines


def as_json(result: Result) -> dict[str, Any]:
    """Plain values only."""
    return {
        "ok": bool(result.ranked), "considered": result.considered, "memory_limit": result.limit,
        "ranked": [_plain(one, result.limit) for one in result.ranked],
        "failed": [{**_choice(one.config), "reason": one.reason} for one in result.failed]}


def _choice(config: Config) -> dict[str, Any]:
    parallel, pipeline = config.parallel, config.pipeline
    return {
        "tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "zero": parallel.zero,
        "micro_batch_size": config.train.micro_batch_size, "num_microbatches": pipeline.num_microbatches,
        "schedule": pipeline.schedule, "chunks": pipeline.num_chunks, "warmup": pipeline.warmup,
        "early_switch": pipeline.early_switch,
        "split": list(pipeline.split), "recompute": pipeline.recompute}


def _plain(candidate: Candidate, limit: float) -> dict[str, Any]:
    model = candidate.model
    parts = parts_of(model)
    return {
        **_choice(candidate.config), "step_ms": 1e3 * model.step_time, "tokens_per_s": model.tokens_per_s,
        "memory": None if candidate.memory is None else [stage.total for stage in candidate.memory],
        "host_memory": None if candidate.memory is None else [stage.host for stage in candidate.memory],
        "bound_by": bound_by(candidate, limit),
        "parts_ms": {name: 1e3 * getattr(parts, name)
                     for name in ("compute", "tensor", "optimizer", "reduction", "transfers", "bubble")}}


def planned(candidate: Candidate) -> Config:
    """The candidate's configuration, with what is predicted of it."""
    memory: Sequence[float] = [round(stage.total / _MIB, 1) for stage in candidate.memory or ()]
    hardware = candidate.model.machine.profile.hardware
    plan = PlanConfig(step_ms=round(1e3 * candidate.model.step_time, 6), memory_mib=tuple(memory),
                      cores_taken=round(hardware.taken, 2))
    return replace(candidate.config, plan=plan)


def plan_toml(candidate: Candidate) -> str:
    """What plan.toml holds: an ordinary configuration."""
    return f"# {describe(candidate.config)}\n\n{to_toml(planned(candidate))}"


def profile_lines(profile: Profile) -> list[str]:
    """A few lines for people."""
    hardware = profile.hardware
    lines = [f"{hardware.name}, {hardware.hosts} x {hardware.devices_per_host} ranks, {hardware.cores} cores",
             f"{'block':<10} {'tp':>3} {'micro-batch':>11}" + "".join(f" {name:>9}" for name in _TIMES) + "  ms"]
    for (kind, tp, b), cost in profile.blocks.items():
        numbers = (cost.forward, cost.backward, cost.forward_wait + cost.backward_wait, cost.norm + cost.update)
        lines.append(f"{kind:<10} {tp:>3} {b:>11} " + " ".join(f"{1e3 * x:9.3f}" for x in numbers))
    for name, link in profile.links.items():
        reduce = ", ".join(f"all-reduce over {n} {curve.bandwidth / 1e6:,.0f} MB/s" for n, curve in link.reduce.items())
        lines.append(f"{name}: {1e6 * link.send.latency:.0f} us, {link.send.bandwidth / 1e6:,.0f} MB/s; {reduce}")
    return lines
