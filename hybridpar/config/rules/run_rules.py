"""Rules of the sections about a run's folder and its faults: [run], [checkpoint] and
[anomalies]."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from hybridpar.config.all_sections import Config
from hybridpar.errors import Problem


def run(config: Config) -> Iterator[Problem]:
    section = config.run
    parts = Path(section.name).parts
    inside = parts and not Path(section.name).is_absolute() and ".." not in parts
    if not inside or not section.name.isprintable():
        yield Problem("run.name", section.name, "must be the name of a folder in run.dir", "run")
    elif os.path.abspath(section.folder) == os.path.abspath(config.cache_folder):
        rule = "must not be the folder of prepared corpora (data.cache)"
        yield Problem("run.name", section.name, rule, "run")
    for name in section.trackers:
        if importlib.util.find_spec(name) is None:
            yield Problem("run.trackers", name, "is not installed", f"pip install {name}")


def checkpoint(config: Config) -> Iterator[Problem]:
    section = config.checkpoint
    train = config.train
    sets = config.data.valid_sets
    if section.best_by and sets and section.best_by not in sets:
        rule = f"must be the name of a validation set (data.valid_sets): {', '.join(sets)}"
        yield Problem("checkpoint.best_by", section.best_by, rule, f'"{next(iter(sets))}"')
    if section.keep_best and not train.eval_interval:
        rule = "requires validation losses; train.eval_interval is 0"
        yield Problem("checkpoint.keep_best", section.keep_best, rule, "0")
    elif section.keep_best and train.save_interval % train.eval_interval:
        rule = (
            f"must be a multiple of train.eval_interval = {train.eval_interval}, so that "
            "checkpoint.keep_best can tell which checkpoint is best"
        )
        works = -(-train.save_interval // train.eval_interval) * train.eval_interval
        yield Problem("train.save_interval", train.save_interval, rule, str(works))


def anomalies(config: Config) -> Iterator[Problem]:
    section = config.anomalies
    if section.window < 8 and (section.loss_spike or section.norm_spike):
        rule = (
            "must be at least 8 with loss_spike or norm_spike: fewer steps cannot tell a spike "
            "from noise"
        )
        yield Problem("anomalies.window", section.window, rule, "64")
    for name, found in (
        ("on_non_finite", True),
        ("on_loss_spike", section.loss_spike > 0),
        ("on_norm_spike", section.norm_spike > 0),
    ):
        if found and getattr(section, name) == "skip" and not config.norms_first:
            rule = (
                "not supported with schedule pipedream without clipping, which updates before the "
                "gradient norm is known; set optim.clip_grad, or"
            )
            yield Problem(f"anomalies.{name}", "skip", rule, '"stop"')
    if section.rolls_back and not config.train.save_interval:
        rule = "must be positive with roll_back, which needs a checkpoint to go back to"
        yield Problem("train.save_interval", 0, rule, "100")
