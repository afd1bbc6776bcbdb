"""From results to tables: what each variant loses to its baseline, how sure that is, and what it is
worth in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.convergence import plots
from benchmarks.convergence.results import Result, read_all
from benchmarks.convergence.study import (
    BASES,
    BUDGET_BASELINE,
    MUON_RATES,
    RATE_RULES,
    SEEDS,
    SWEEPS,
    Variant,
    groups,
    rate_suffix,
    taken_rate,
    variants,
)

BEGIN = "<!-- tables: python -m benchmarks.convergence report -->"
END = "<!-- end of tables -->"
BAR_PERCENT = 0.5
START_TOLERANCE = 1e-3
"""Largest difference of the loss before the first step: bf16, summed in another order where a batch
is cut finer."""
# 97.5 % quantiles of Student's t by degrees of freedom: two-sided 95 % intervals of a few seeds
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Losses = Mapping[int, float]
"""Final validation loss by seed."""


@dataclass(frozen=True)
class Gap:
    """Mean difference to the baseline over the seeds that both have, in percent of the baseline's
    loss.

    `interval`: half the width of its 95 % confidence interval; None with a single seed. `loss`: the
    difference itself.
    """

    percent: float
    interval: float | None
    loss: float

    @property
    def significant(self) -> bool:
        """Whether seeds alone do not explain it."""
        return self.interval is not None and abs(self.percent) > self.interval


def gap(losses: Losses, baseline: Losses) -> Gap | None:
    """How far `losses` are above `baseline`, seed by seed; None if no seed has both."""
    seeds = sorted(losses.keys() & baseline.keys())
    if not seeds:
        return None
    percents = [100 * (losses[s] / baseline[s] - 1) for s in seeds]
    interval = _T[len(seeds) - 1] * stdev(percents) / sqrt(len(seeds)) if len(seeds) > 1 else None
    return Gap(fmean(percents), interval, fmean(losses[s] - baseline[s] for s in seeds))


def worth(loss_gap: float, budgets: Mapping[float, float]) -> float | None:
    """The share of the tokens with which the baseline ends `loss_gap` above its loss with all of
    them.

    `budgets`: how far above it is with each share that was tried; 1.0 gives 0. Linear in the
    logarithm of the share between them, and beyond the outermost two. None where fewer than two
    shares are known.
    """
    known = sorted(budgets.items(), reverse=True)  # from all tokens, gap 0, to fewer, larger gaps
    if len(known) < 2:
        return None
    segments = list(pairwise(known))
    (a, gap_a), (b, gap_b) = next((s for s in segments if loss_gap <= s[1][1]), segments[-1])
    return exp(log(a) + (log(b) - log(a)) * (loss_gap - gap_a) / (gap_b - gap_a))


def by_variant(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Results by variant and seed. Raises: ValueError if two runs of a seed did not start alike."""
    first: dict[int, Result] = {}
    table: dict[str, dict[int, Result]] = {}
    for result in results:
        like = first.setdefault(result.seed, result)
        begins = result.val_loss[0][1]
        alike = like.val_loss[0][1]
        if abs(begins - alike) > START_TOLERANCE:
            raise ValueError(
                f"{result.model}, seed {result.seed}: {result.variant} begins with validation loss "
                f"{begins}, {like.variant} with {alike}: they have other data or weights"
            )
        table.setdefault(result.variant, {})[result.seed] = result
    return table


class Study:
    """All results of one model, and what follows from them."""

    def __init__(self, model: str, results: Sequence[Result]):
        self.model = model
        self.results = results
        self.runs = by_variant(results)

    def losses(self, variant: str) -> dict[int, float]:
        return {seed: result.final_val_loss for seed, result in self.runs.get(variant, {}).items()}

    def gap(self, variant: Variant) -> Gap | None:
        return gap(self.losses(variant.name), self.losses(variant.baseline))

    def budgets(self) -> dict[float, float]:
        """How far above its full result synchronous training is with a share of the tokens."""
        found = {1.0: 0.0}
        for variant in groups(self.model)["budgets"]:
            if known := self.gap(variant):
                run, full = (
                    next(iter(self.runs[name].values()))
                    for name in (variant.name, variant.baseline)
                )
                found[run.tokens / full.tokens] = known.loss
        return found

    # -- Markdown

    def markdown(self) -> str:
        """Everything about this model."""
        if not self.results:
            return f"### {self.model.upper()}\n\nNo results yet."
        chosen = groups(self.model)
        parts = [
            f"### {self.model.upper()}",
            self._facts(),
            self._table(chosen["adamw"]),
            self._table(chosen["muon"]),
            self._budget_line(),
            self._rate_table("AdamW", "", taken_rate(self.model)),
            self._rate_table("Muon", "muon-", MUON_RATES[self.model]),
        ]
        parts.append(
            f"![Loss curves](plots/{self.model}_curves.svg)\n![Final "
            f"loss](plots/{self.model}_final.svg)"
        )
        return "\n\n".join(part for part in parts if part)

    def _facts(self) -> str:
        run = self.results[0]
        commits = sorted({r.machine["commit"][:7] for r in self.results})
        hours = sum(r.seconds for r in self.results) / 3600
        return (
            f"{max(r.tokens for r in self.results):,} tokens a run; {run.eval_tokens:,} tokens of "
            "validation; "
            f"{len(self.results)} runs, {hours:.1f} core-hours on {run.machine['cpu']}, torch "
            f"{run.machine['torch']}, Python {run.machine['python']}; commits {', '.join(commits)}."
        )

    def _table(self, chosen: Sequence[Variant]) -> str:
        """A row for each variant that has results; empty where none has."""
        budgets = self.budgets()
        rows = []
        for variant in chosen:
            if not (losses := self.losses(variant.name)):
                continue
            difference = self.gap(variant) if variant.name != variant.baseline else None
            share = (
                worth(difference.loss, budgets)
                if difference and variant.baseline == BUDGET_BASELINE
                else None
            )
            cells = (
                f"{variant.name}: {variant.about}",
                variant.stale,
                spread_text(losses),
                gap_text(difference),
                f"{100 * share:.0f} %" if share else "",
            )
            rows.append(f"| {' | '.join(cells)} |")
        head = [
            "| variant | stale micro-batches | validation loss at the end | against 1f1b | tokens "
            "worth |",
            "|---|---|---|---|---|",
        ]
        return "\n".join([*head, *rows]) if rows else ""

    def _budget_line(self) -> str:
        texts = [
            f"{100 * share:.0f} % of the tokens: +{loss:.4f}"
            for share, loss in sorted(self.budgets().items())
            if share < 1
        ]
        if not texts:
            return ""
        return (
            "Synchronous runs of other lengths, each with its own decay, against the full one: "
            f"{'; '.join(texts)}."
        )

    def _rate_table(self, optimizer: str, prefix: str, taken: float) -> str:
        """A row for each learning rate that has a result; empty where only the one taken has."""
        rows = []
        seed = SEEDS[0]
        for lr in sorted({*SWEEPS[prefix], taken}):
            suffix = "" if lr == taken else rate_suffix(lr)
            sync, *others = (
                self.losses(f"{prefix}{rule}{suffix}").get(seed) for rule in RATE_RULES
            )
            if sync is not None:
                against = {seed: sync}
                cells = [
                    f"{sync:.4f}",
                    *(
                        ""
                        if loss is None
                        else f"{loss:.4f}, {gap_text(gap({seed: loss}, against))}"
                        for loss in others
                    ),
                ]
                rows.append(f"| {lr:g}{' (taken)' if lr == taken else ''} | {' | '.join(cells)} |")
        head = [
            f"| {optimizer}, learning rate (seed {seed}) | {' | '.join(RATE_RULES)} |",
            "|---|" + "---|" * len(RATE_RULES),
        ]
        return "\n".join([*head, *rows]) if len(rows) > 1 else ""


def spread_text(losses: Losses) -> str:
    """Mean and standard deviation over the seeds."""
    values = list(losses.values())
    if len(values) == 1:
        return f"{values[0]:.4f} (1 seed)"
    return f"{fmean(values):.4f} ± {stdev(values):.4f}" + (
        f" ({len(values)} seeds)" if len(values) != 3 else ""
    )


def gap_text(value: Gap | None) -> str:
    """'+1.80 % ± 0.30': bold within the bar, with a star where seeds alone explain it."""
    if value is None:
        return ""
    text = f"{value.percent:+.2f} %" + (
        f" ± {value.interval:.2f}" if value.interval is not None else ""
    )
    text = f"**{text}**" if value.percent <= BAR_PERCENT else text
    return text + ("" if value.interval is None or value.significant else " (within seed noise)")


def write_report(folder: Path, readme: Path) -> None:
    """Draws the plots beside `readme` and puts the tables between its markers.

    Raises: ValueError if the markers are not there.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: needs the lines {BEGIN} and {END}")
    studies = [Study(model, read_all(folder, model)) for model in BASES]
    for study in studies:
        if study.results:
            known = [v for v in variants(study.model).values() if v.name in study.runs]
            plots.draw(study.model, known, study.runs, readme.parent / "plots")
    tables = "\n\n".join(study.markdown() for study in studies)
    readme.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")
