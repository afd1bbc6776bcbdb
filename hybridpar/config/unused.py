"""Settings that have no meaning under the chosen schedule: left out, with a line about each.

A configuration file that was written for one schedule can so be run with another one by a single
flag. Settings that change which model or grid is trained are never left out; hybridpar.config.rules
refuses those.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hybridpar.config.all_sections import Config
from hybridpar.config.sections.pipeline import PipelineConfig

_STALENESS = {"extrapolation": ("2bw",), "prediction": ("2bw",), "lr_rescale": ("2bw", "pipedream")}
"""Schedules whose gradients are as old as each remedy assumes. Other remedies work with every
schedule."""
_PIPELINE = {
    "warmup": ("1f1b", "2bw"),
    "early_switch": ("2bw",),
    "gradient_buffers": ("2bw",),
    "zero_bubble": ("1f1b", "interleaved"),
    "sync_steps": ("2bw", "pipedream"),
}
"""Options of the section `pipeline`, and the schedules that have them."""
_NOT_ON_A_V = ("warmup", "early_switch", "zero_bubble")
"""Options that pipeline.stage_layout = "v" fixes."""


_RATES = ("lr", "min_lr", "warmup_steps", "decay", "decay_steps")
"""Settings of the learning rate that optim.lr_points replaces."""


def schedules_with_staleness(remedy: str) -> tuple[str, ...]:
    """Return the schedules that a remedy for stale gradients works with; empty if it works with all
    of them."""
    return _STALENESS.get(remedy, ())


def without_unused(config: Config) -> tuple[Config, list[str]]:
    """Return `config` with the default for every setting that its schedule does not use.

    Returns:
        The configuration, and a line for people about each setting that was left out.
    """
    lines = []
    pipeline, unused = _without_unused_options(config.pipeline)
    lines += unused
    optim = config.optim
    works = schedules_with_staleness(optim.staleness)
    if works and pipeline.schedule not in works:
        lines.append(_line("optim.staleness", optim.staleness, _only(pipeline.schedule, works)))
        optim = replace(optim, staleness="none", staleness_steps=0)
    for name in _RATES if optim.lr_points else ():
        value = getattr(optim, name)
        usual = getattr(type(optim)(), name)
        if value != usual:
            lines.append(
                _line(
                    f"optim.{name}",
                    value,
                    "optim.lr_points gives the learning rate of every update",
                )
            )
            optim = replace(optim, **{name: usual})
    return replace(config, pipeline=pipeline, optim=optim), lines


def _without_unused_options(pipeline: PipelineConfig) -> tuple[PipelineConfig, list[str]]:
    usual = PipelineConfig()
    changes: dict[str, Any] = {}
    lines = []
    for name, works in _PIPELINE.items():
        value = getattr(pipeline, name)
        if value == getattr(usual, name):
            continue
        if pipeline.schedule not in works:
            reason = _only(pipeline.schedule, works)
        elif pipeline.stage_layout == "v" and name in _NOT_ON_A_V:
            reason = 'pipeline.stage_layout = "v" fixes it'
        else:
            continue
        changes[name] = getattr(usual, name)
        lines.append(_line(f"pipeline.{name}", value, reason))
    return replace(pipeline, **changes), lines


def _only(schedule: str, works: tuple[str, ...]) -> str:
    with_schedules = " and ".join(json.dumps(name) for name in works)
    return f'pipeline.schedule = "{schedule}" does not use it; {with_schedules} does'


def _line(name: str, value: object, reason: str) -> str:
    return f"{name} = {json.dumps(value)} is left out: {reason}"
