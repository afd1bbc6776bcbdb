"""Variants that are compared: a synchronous baseline for each model (gpt.toml, bert.toml), and variants as
changes to it.

    micro-batches of batch t    0  1  2  3  4  5  6  7
    sync                        t  t  t  t  t  t  t  t        the version of the weights that each runs on
    2bw                         -  -  -  -  -  -  -  -        - is t-1
    2bw, early switch, L = 1    -  -  -  -  t  t  t  t        the first STAGES - 1 + L

Which version a micro-batch runs on is a function of its index alone, so a grid changes nothing but
the order of summation, and one process stands for a pipeline of STAGES. A pipeline's `early_switch`
L is STAGES - 1 + L there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridpar.config import Config, RunConfig, from_mapping, load_toml

HERE = Path(__file__).parent
STAGES = 4
SEEDS = (1, 2, 3)
BASES = {model: HERE / f"{model}.toml" for model in ("gpt", "bert")}
SWEEPS = {"": (1e-3, 2e-3, 4e-3), "muon-": (2e-3, 4e-3, 8e-3, 16e-3)}
"""Learning rates by the prefix of the optimizer's variants: AdamW and Muon."""

Changes = Mapping[str, Any]
"""'section.key' -> its value, or a function of the baseline that gives it."""


@dataclass(frozen=True)
class Variant:
    """A training rule. `stale`: which micro-batches of a batch run on the older weights."""

    name: str
    about: str
    changes: Changes = field(default_factory=dict)
    stale: str = "all"
    baseline: str = "sync"
    """The variant it is compared with, seed by seed."""
    seeds: tuple[int, ...] = SEEDS


BW = {"pipeline.schedule": "2bw"}
EARLY = {**BW, "pipeline.early_switch": STAGES - 1 + 1}
CUT_FINER = {"pipeline.num_microbatches": 16, "train.micro_batch_size": 2}
CUT_FINEST = {"pipeline.num_microbatches": 32, "train.micro_batch_size": 1}
EXTRAPOLATED = {"optim.staleness": "extrapolation"}
MORE_MOMENTUM = {"optim.betas": [0.95, 0.95]}
MUON = {"optim.name": "muon", "optim.momentum": 0.95, "optim.nesterov": True}
RATE_RULES: Mapping[str, tuple[str, Changes]] = {
    "sync": ("none", {}),
    "2bw": ("all", BW),
    "2bw-early-extrapolation": ("4 of 8", {**EARLY, **EXTRAPOLATED}),
}
"""Variants that run at several learning rates."""
BUDGET_BASELINE = "muon-sync"
"""Also run with fewer tokens."""
MUON_RATES = {"gpt": 8e-3, "bert": 8e-3}
"""Settings of all runs with Muon but the sweep's. AdamW's are in the .toml files."""


def _corrected(how: str) -> Changes:
    return {**BW, "optim.staleness": how}


def _rate(lr: float) -> Changes:
    """A peak learning rate, and its floor."""
    return {"optim.lr": lr, "optim.min_lr": lr / 10}


def _steps(share: float) -> Changes:
    """A shorter run with its own decay."""
    return {"train.num_steps": lambda base: round(share * base.train.num_steps)}


def _adamw() -> Iterator[Variant]:
    yield Variant("sync", "1f1b", stale="none")
    yield Variant("2bw", "2bw as in the paper", BW)
    yield Variant("2bw-early", "early switch, L = 1", EARLY, "4 of 8")
    yield Variant("2bw-extrapolation", "extrapolation", _corrected("extrapolation"))
    yield Variant("2bw-prediction", "weight prediction", _corrected("prediction"))
    yield Variant("2bw-nesterov", "Nesterov correction", _corrected("nesterov"))
    yield Variant("2bw-lr_rescale", "learning rate rescaled at first", _corrected("lr_rescale"))
    yield Variant(
        "2bw-sync-warmup",
        "1f1b during the warm-up",
        {**BW, "pipeline.sync_steps": lambda base: base.optim.warmup_steps},
        "all, later",
    )
    one = SEEDS[:1]
    yield Variant(
        "2bw-early-m16",
        "early switch, L = 1, batch cut into 16",
        {**EARLY, **CUT_FINER},
        "4 of 16",
        seeds=one,
    )
    yield Variant(
        "2bw-early-m32",
        "early switch, L = 1, batch cut into 32",
        {**EARLY, **CUT_FINEST},
        "4 of 32",
        seeds=one,
    )
    yield Variant(
        "2bw-early-extrapolation",
        "early switch, L = 1, extrapolation",
        {**EARLY, **EXTRAPOLATED},
        "4 of 8",
        seeds=one,
    )
    yield Variant(
        "2bw-early-m32-extrapolation",
        "early switch, L = 1, batch cut into 32, extrapolation",
        {**EARLY, **CUT_FINEST, **EXTRAPOLATED},
        "4 of 32",
        seeds=one,
    )
    yield Variant(
        "2bw-extrapolation-beta95",
        "extrapolation, first beta 0.95",
        {**BW, **EXTRAPOLATED, **MORE_MOMENTUM},
        seeds=one,
    )
    yield Variant("sync-beta95", "1f1b, first beta 0.95", MORE_MOMENTUM, "none", seeds=one)
    yield Variant("2bw-beta95", "first beta 0.95", {**BW, **MORE_MOMENTUM}, seeds=one)


def _muon(lr: float) -> Iterator[Variant]:
    muon = {**MUON, **_rate(lr)}
    for name, about, changes, stale in (
        ("sync", "1f1b", {}, "none"),
        ("2bw", "2bw as in the paper", BW, "all"),
        ("2bw-early", "early switch, L = 1", EARLY, "4 of 8"),
        ("2bw-extrapolation", "extrapolation", _corrected("extrapolation"), "all"),
        (
            "2bw-early-extrapolation",
            "early switch, L = 1, extrapolation",
            {**EARLY, **EXTRAPOLATED},
            "4 of 8",
        ),
        (
            "2bw-early-m16-extrapolation",
            "early switch, L = 1, batch cut into 16, extrapolation",
            {**EARLY, **CUT_FINER, **EXTRAPOLATED},
            "4 of 16",
        ),
        ("2bw-prediction", "weight prediction", _corrected("prediction"), "all"),
    ):
        yield Variant(f"muon-{name}", f"Muon, {about}", {**muon, **changes}, stale, "muon-sync")


def _rates(prefix: str, optimizer: Changes, taken: float) -> Iterator[Variant]:
    """The learning rates that the one taken was chosen from: one seed, and 2bw to tell staleness
    from instability."""
    for lr in SWEEPS[prefix]:
        if lr != taken:
            for rule, (stale, changes) in RATE_RULES.items():
                yield Variant(
                    f"{prefix}{rule}{rate_suffix(lr)}",
                    f"{rule}, learning rate {lr:g}",
                    {**optimizer, **_rate(lr), **changes},
                    stale,
                    f"{prefix}sync{rate_suffix(lr)}",
                    SEEDS[:1],
                )


def rate_suffix(lr: float) -> str:
    """End of the names of variants with a learning rate of their own."""
    return f"-lr{1e3 * lr:g}e-3"


def _budgets(lr: float) -> Iterator[Variant]:
    """Cost of fewer tokens: the measure of what a loss is worth."""
    for share in (0.9, 0.8):
        percent = round(100 * share)
        yield Variant(
            f"{BUDGET_BASELINE}-{percent}",
            f"Muon, 1f1b, {percent} % of the tokens",
            {**MUON, **_rate(lr), **_steps(share)},
            "none",
            BUDGET_BASELINE,
            SEEDS[:1],
        )


def groups(model: str) -> dict[str, tuple[Variant, ...]]:
    """The variants by the question they answer."""
    return {
        "adamw": tuple(_adamw()),
        "muon": tuple(_muon(MUON_RATES[model])),
        "budgets": tuple(_budgets(MUON_RATES[model])),
        "rates": tuple(_rates("", {}, taken_rate(model))),
        "muon-rates": tuple(_rates("muon-", MUON, MUON_RATES[model])),
    }


def taken_rate(model: str) -> float:
    """AdamW's learning rate."""
    return load_toml(BASES[model]).optim.lr


def variants(model: str) -> dict[str, Variant]:
    """All variants by name."""
    return {variant.name: variant for group in groups(model).values() for variant in group}


def changes_of(base: Config, variant: Variant) -> dict[str, Any]:
    """The changes of `variant` to `base`, with their values."""
    return {
        name: value(base) if callable(value) else value for name, value in variant.changes.items()
    }


def config_of(base: Config, variant: Variant, seed: int) -> Config:
    """The configuration of one run. Raises: ConfigError if a change is not one that the
    configuration knows."""
    sections: dict[str, dict[str, Any]] = {"train": {"seed": seed}}
    for name, value in changes_of(base, variant).items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return from_mapping(sections, base)


def comparable(config: Config) -> Config:
    """`config` without what has no influence on the numbers: equal ones train the same run."""
    train = replace(config.train, threads=0, save_interval=0, log_interval=1, timeout_s=60.0)
    return replace(config, train=train, run=RunConfig(), data=replace(config.data, cache=""))
