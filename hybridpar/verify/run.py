"""`hybridpar verify`: train a few batches on a process grid and in one process, in float64, and
compare tensor by tensor.

With several sites each is compared, including the outer step (verify/sites.py).

Compared for every batch: choices of experts (verify/choices.py), loss, global gradient norm, every
gradient (reduced over micro-batches and replicas, before clipping), every updated weight. Before
the first batch all weights must start from the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.comm.ranks import run_on_ranks
from hybridpar.config import Config
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import SyntheticSamples, synthetic_loader
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.nn.context import Context
from hybridpar.nn.placement import Placement, Range
from hybridpar.schedules.action import Action
from hybridpar.scratch import scratch_folder
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.engine import Engine, StepResult
from hybridpar.verify.causes import likely_causes
from hybridpar.verify.choices import (
    ChoiceRecorder,
    Choices,
    Flips,
    Tokens,
    compare_choices,
    join_choices,
    replay,
)
from hybridpar.verify.oracle import GRADIENT_FLOOR, TOLERANCE, Oracle, OracleStep
from hybridpar.verify.sites import SiteOracles

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Error of one tensor, relative to the largest element of the expected one."""

    batch: int
    what: str
    name: str
    error: float


@dataclass
class Report:
    """The worst difference of each kind, and the first tensor beyond the tolerance (None if all
    agree).

    `causes` are likely reasons, `choices` the comparison of choices of experts. `str(report)` is
    the first difference with its causes.
    """

    grid: dict[str, int]
    num_batches: int
    worst: dict[str, Difference] = field(default_factory=dict)
    first_divergence: Difference | None = None
    tensors_compared: int = 0
    causes: list[str] = field(default_factory=list)
    choices: Flips = field(default_factory=Flips)

    def __str__(self) -> str:
        where = " ".join(f"{axis}={size}" for axis, size in self.grid.items())
        first = self.first_divergence
        if first is None:
            chosen = f"; {self.choices}" if self.choices.num_choices else ""
            return f"{where}: {self.tensors_compared} tensors agree within {TOLERANCE:g}{chosen}"
        lines = [
            f"{where}: {first.what} of {first.name} differs first, in batch {first.batch}, by "
            f"{first.error:.1e} "
            f"(tolerance {TOLERANCE:g})",
            *(f"likely: {cause}" for cause in self.causes),
        ]
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        return self.first_divergence is None

    def add(
        self, batch: int, what: str, name: str, error: float, tolerance: float = TOLERANCE
    ) -> None:
        """Record one comparison."""
        self.tensors_compared += 1
        difference = Difference(batch, what, name, error)
        if what not in self.worst or not error <= self.worst[what].error:
            self.worst[what] = difference
        if not error <= tolerance and self.first_divergence is None:
            self.first_divergence = difference

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        first = self.first_divergence
        return {
            "ok": self.ok,
            "grid": self.grid,
            "batches": self.num_batches,
            "tensors_compared": self.tensors_compared,
            "tolerance": TOLERANCE,
            "worst": {what: asdict(difference) for what, difference in self.worst.items()},
            "first_divergence": first and asdict(first),
            "causes": self.causes,
            **({"choices": self._choices_as_json()} if self.choices.num_choices else {}),
        }

    def _choices_as_json(self) -> dict[str, Any]:
        found = asdict(self.choices) | {"near_tie": self.choices.is_near_tie}
        margin = found["smallest_margin"]
        return found | {"smallest_margin": margin if math.isfinite(margin) else None}


@dataclass
class GridRun:
    """The results of a grid: one entry per batch, tensors assembled from their shards."""

    initial: Tensors
    losses: list[float]
    metrics: list[dict[str, float]]
    norms: list[float]
    gradients: list[Tensors]
    weights: list[Tensors]
    disagreements: list[str]
    """Names of replicas (over dp, tp or of tied weights) that are not equal bit for bit."""
    choices: list[Choices]
    """Choices of experts of each replica."""
    other_sites: list[GridRun] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """The results of one rank of a grid."""

    site: int
    replica: int
    cp: int
    tokens: list[tuple[Range, ...]]
    """The tokens of each sample that it has, by micro-batch; empty if it has all."""
    tp: int
    placements: dict[str, Placement]
    snapshots: list[Tensors]
    """The weights before each update, and after the last."""
    gradients: list[Tensors]
    losses: list[float]
    metrics: list[dict[str, float]]
    norms: list[float]
    choices: Choices


@dataclass(frozen=True)
class Disturbance:
    """Events in the grid's training.

    The gradient of the batches `nan_batches` becomes NaN on one replica of the last stage, so all
    ranks must skip the update. After `resume_at` batches (0: never) everything is saved, thrown
    away and loaded.
    """

    nan_batches: frozenset[int] = frozenset()
    resume_at: int = 0


CALM = Disturbance()


def verify(
    config: Config, grid: Mapping[str, int], num_batches: int = 4, disturbance: Disturbance = CALM
) -> Report:
    """Train `num_batches` batches on `grid` ({'tp': 2, 'pp': 2, 'dp': 2}) in as many local
    processes as it has ranks, and compare.

    Model, schedule, optimizer and micro-batches come from `config`; the precision is float64, and
    the data is random (with padding that differs between samples).

    Raises:
        ConfigError: The configuration or the grid cannot work.
        HybridparError: A rank failed; has its traceback.
    """
    if not isinstance(num_batches, int) or num_batches < 1:
        raise config_error("num_batches", num_batches, "must be a whole number of at least 1", "4")
    config = on_grid(config, grid)
    if config.feeds_back:
        raise config_error(
            "compression.gradients",
            config.compression.gradients,
            "not supported by verify: replicas send only a part of their gradients, and the "
            "one-process run uses all of them",
            "none",
        )
    train = replace(config.train, dtype="fp64", fp8=False, device="cpu")
    config = replace(config, train=train, outer=replace(config.outer, precision="full"))
    run = run_grid(config, num_batches, disturbance)
    report = compare(config, run, num_batches, disturbance)
    if report.choices.is_near_tie:
        replayed = compare(config, run, num_batches, disturbance, replays=True)
        replayed.choices = report.choices
        report = replayed
    if report.first_divergence is not None:
        report.causes = likely_causes(config, report.first_divergence.what)
        if report.choices.flips:
            report.causes.append(str(report.choices))
    return report


def on_grid(config: Config, grid: Mapping[str, int]) -> Config:
    """Return `config` on a grid; axes that are left out have size 1. Raises: ConfigError."""
    if not isinstance(grid, Mapping):
        raise config_error("grid", grid, "must map names of axes to their sizes", '{"pp": 2}')
    sizes = {axis: grid.get(axis, 1) for axis in ("tp", "cp", "pp", "dp", "ep")}
    wrong = [
        Problem("grid", axis, "unknown axis", "tp, cp, pp, dp or ep")
        for axis in sorted(set(grid) - set(sizes))
    ]
    wrong += [
        Problem(f"grid {axis}", size, "must be a whole number of at least 1", "1")
        for axis, size in sizes.items()
        if not isinstance(size, int) or size < 1
    ]
    if wrong:
        raise ConfigError(*wrong)
    parallel = replace(
        config.parallel,
        tp=sizes["tp"],
        cp=sizes["cp"],
        pp=sizes["pp"],
        dp=sizes["dp"],
        ep=sizes["ep"],
    )
    memory = config.memory if parallel.pp == config.parallel.pp else config.memory.on_another_grid()
    return replace(config, parallel=parallel, memory=memory)


def run_grid(config: Config, num_batches: int, disturbance: Disturbance = CALM) -> GridRun:
    """Run the engine on config.parallel in new local Gloo processes. Raises: HybridparError if a
    rank failed."""
    with scratch_folder() as folder:
        parts = run_on_ranks(
            _train,
            config.parallel.num_ranks,
            config,
            num_batches,
            disturbance,
            folder,
            timeout_s=config.train.timeout_s,
        )
    first, *others = (
        [part for part in parts if part.site == site] for site in range(config.parallel.sites)
    )
    return replace(_merge(first), other_sites=list(map(_merge, others)))


class _Disturbed(BatchPolicy):
    """A policy whose loss gradient is NaN in some batches."""

    def __init__(self, job: JobPlan, nan_batches: frozenset[int]):
        super().__init__(job)
        self._nan_batches = nan_batches

    def loss_gradient(self, action: Action) -> float:
        batch, index = divmod(action.microbatch, self.shape.num_microbatches)
        return (
            math.nan if index == 0 and batch in self._nan_batches else super().loss_gradient(action)
        )


def _train(config: Config, num_batches: int, disturbance: Disturbance, folder: Path) -> _Part:
    grid = ProcessGrid(sizes_of(config.parallel))
    job = JobPlan(config)

    def make_engine() -> Engine:
        policy = _Disturbed(job, disturbance.nan_batches if grid.dp.is_last else frozenset())
        return Engine(job, grid, torch.device("cpu"), policy=policy)

    recorder = ChoiceRecorder()

    def watched(engine: Engine) -> Engine:
        for segments in engine.executor.stages.values():
            for stage in segments:
                recorder.watch((int(number), block) for number, block in stage.blocks.items())
        return engine

    engine = watched(make_engine())
    loader = synthetic_loader(config, grid.replica, grid.num_replicas, seed=config.train.seed)
    snapshots: list[Tensors] = []
    gradients: list[Tensors] = []
    steps: list[StepResult] = []

    def on_gradients(batch: int, tensors: Tensors) -> None:
        snapshots.append(_copy(engine.state.weights.full_weights()))
        gradients.append(_copy(tensors))

    if 0 < disturbance.resume_at < num_batches:
        engine.train(loader, disturbance.resume_at, steps.append, on_gradients)
        checkpoint.save(folder / "checkpoints", engine, "")
        engine = watched(make_engine())
        assert checkpoint.resume(folder / "checkpoints", engine, "", print) == disturbance.resume_at
    engine.train(loader, num_batches - engine.batches_done, steps.append, on_gradients)
    snapshots.append(_copy(engine.state.weights.full_weights()))
    return _Part(
        grid.site.rank,
        grid.dp.rank,
        grid.cp.rank,
        _tokens_of(engine.context, loader, num_batches * job.shape.num_microbatches),
        grid.tp.rank,
        engine.state.placements,
        snapshots,
        gradients,
        [step.loss for step in steps],
        [step.metrics for step in steps],
        [step.grad_norm for step in steps],
        dict(recorder.experts),
    )


def _tokens_of(context: Context, loader: BatchLoader, count: int) -> list[tuple[Range, ...]]:
    """Return the tokens of each sample that this rank has in the first micro-batches."""
    if not context.is_split:
        return []
    numbers = (divmod(number, loader.num_microbatches) for number in range(count))
    return [context.of(context.cut(loader.microbatch(*number))).own for number in numbers]


def _merge(parts: list[_Part]) -> GridRun:
    disagreements: list[str] = []

    def assembled(of_parts: Iterable[list[Tensors]]) -> list[Tensors]:
        return [_assemble(parts, tensors, disagreements) for tensors in zip(*of_parts, strict=True)]

    initial, *weights = assembled(part.snapshots for part in parts)
    gradients = assembled(part.gradients for part in parts)
    choices = _choices_of(parts, disagreements)
    first = parts[0]
    return GridRun(
        initial,
        first.losses,
        first.metrics,
        first.norms,
        gradients,
        weights,
        sorted(set(disagreements)),
        choices,
    )


def _choices_of(parts: list[_Part], disagreements: list[str]) -> list[Choices]:
    """Return the choices of each replica; record ranks of tp that chose otherwise than others."""
    found: dict[int, dict[int, tuple[Tokens, Choices]]] = {}
    for part in parts:
        of_replica = found.setdefault(part.replica, {})
        _, of_rank = of_replica.setdefault(part.cp, (part.tokens, {}))
        for block, choices in part.choices.items():
            known = of_rank.setdefault(block, choices)
            if not all(map(torch.equal, known, choices)):
                disagreements.append(f"choices of experts in block {block}")
    return [join_choices([*found[replica].values()]) for replica in sorted(found)]


def _copy(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _assemble(
    parts: list[_Part], locals_of: tuple[Tensors, ...], disagreements: list[str]
) -> Tensors:
    """Return the global tensors from all ranks' local ones; record replicas that are not equal
    to the bit."""
    shards: dict[str, dict[int, Tensor]] = {}
    placements: dict[str, Placement] = {}
    for part, tensors in zip(parts, locals_of, strict=True):
        for name, tensor in tensors.items():
            placements[name] = part.placements[name]
            known = shards.setdefault(name, {}).setdefault(part.tp, tensor)
            if not _equal(known, tensor):
                disagreements.append(name)
    full: Tensors = {}
    tied: dict[str, Tensor] = {}
    for name, by_rank in shards.items():
        place = placements[name]
        locals_ = [by_rank[r] for r in sorted(by_rank)]
        full[name] = place.assemble(locals_)
        if any(not _equal(place.take(full[name], r), local) for r, local in enumerate(locals_)):
            disagreements.append(name)
        if place.tied and not _equal(tied.setdefault(place.tied, full[name]), full[name]):
            disagreements.append(name)
    return full


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal to the bit, with NaN equal to NaN."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def compare(
    config: Config,
    run: GridRun,
    num_batches: int,
    disturbance: Disturbance = CALM,
    *,
    replays: bool = False,
) -> Report:
    """Train the oracle on the same batches and compare everything with the grid's results.

    Args:
        replays: The oracle visits the experts that the grid chose, and no choices are compared.
    """
    parallel = config.parallel
    job = JobPlan(config)
    shape = job.shape
    m = shape.num_microbatches
    schedule = job.schedule
    stage_of = {block: stage for stage, blocks in enumerate(job.split) for block in blocks}

    def version(block: int, t: int, j: int) -> int:
        if t < schedule.options.sync_steps:
            return t
        drained = disturbance.resume_at if t >= disturbance.resume_at else 0
        return schedule.version(
            shape, stage_of[block], t * m + j, max(drained, schedule.options.sync_steps)
        )

    def delay(t: int) -> float:
        return schedule.mean_delay(shape, 0) if t >= schedule.options.sync_steps else 0.0

    oracles = SiteOracles(
        config, lambda: Oracle(job, version, m, delay=delay, poisoned=disturbance.nan_batches)
    )
    loader = BatchLoader(
        SyntheticSamples(config.model, config.train.seed, packed=config.data.is_packed),
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=m * parallel.replicas,
    )
    several = {"cp": parallel.cp} if parallel.cp > 1 else {}
    several |= {"ep": parallel.ep} if parallel.ep > 1 else {}
    several |= {"sites": parallel.sites} if parallel.sites > 1 else {}
    report = Report(
        {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, **several}, num_batches
    )
    sites = [run, *run.other_sites]
    for of_site, oracle in zip(sites, oracles.sites, strict=True):
        for name in of_site.disagreements:
            report.add(0, "replicas", name, float("inf"))
        for name, tensor in of_site.initial.items():
            report.add(
                0, "init", name, relative_error(tensor, oracle.history[0][name]), tolerance=0.0
            )
    compares_choices = parallel.sites == 1 and config.pipeline.schedule != "own" and not replays
    if replays:
        replay(oracles.sites[0].blocks.items(), run.choices)
    for t in range(num_batches):
        steps = oracles.step(t, loader, [of_site.gradients[t] for of_site in sites])
        if compares_choices:
            flips = compare_choices(oracles.sites[0].choices, run.choices, t, m)
            for block, count in flips.flips.items():
                report.add(t, "choice", f"{count} tokens in block {block}", math.inf)
            report.choices += flips
        for of_site, step in zip(sites, steps, strict=True):
            _compare_step(report, t, of_site, step)
    return report


def _compare_step(report: Report, t: int, run: GridRun, step: OracleStep) -> None:
    report.add(t, "loss", "loss", abs(run.losses[t] - step.loss) / (abs(step.loss) or 1.0))
    for name, metric in step.metrics.items():
        found = run.metrics[t][name]
        is_equal = found == metric or (math.isnan(found) and math.isnan(metric))
        report.add(
            t, "metric", name, 0.0 if is_equal else abs(found - metric) / (abs(metric) or 1.0)
        )
    skipped = not math.isfinite(step.grad_norm)
    if skipped:
        report.add(
            t, "grad_norm", "grad_norm", float("inf") if math.isfinite(run.norms[t]) else 0.0
        )
    else:
        report.add(
            t,
            "grad_norm",
            "grad_norm",
            abs(run.norms[t] - step.grad_norm) / (step.grad_norm or 1.0),
        )
    for name, tensor in run.gradients[t].items() if not skipped else ():
        # a gradient that is zero in exact arithmetic is rounding noise: measure it against the
        # whole gradient
        report.add(
            t,
            "gradient",
            name,
            relative_error(tensor, step.gradients[name], GRADIENT_FLOOR * step.grad_norm),
        )
    for name, tensor in run.weights[t].items():
        report.add(t, "weight", name, relative_error(tensor, step.weights[name]))


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest expected element (or `floor`); inf if
    shapes differ or there is NaN."""
    if actual.shape != expected.shape or torch.isnan(actual).any():
        return float("inf")
    if torch.equal(actual, expected):
        return 0.0
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), floor, 1e-300)
