"""All rules about settings that do not go together; each value alone is allowed by its type.

`conflicts` yields every broken rule. Rules that need the job, or ask what the program can run, are
in hybridpar.validate.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.config.all_sections import Config
from hybridpar.config.rules import data_rules, grid_rules, run_rules, training_rules
from hybridpar.errors import Problem

_RULES = (
    grid_rules.parallel,
    grid_rules.pipeline,
    training_rules.optim,
    training_rules.train,
    data_rules.data,
    training_rules.memory,
    run_rules.run,
    run_rules.checkpoint,
    run_rules.anomalies,
    grid_rules.outer,
    grid_rules.compression,
)
"""The rules of each section."""


def conflicts(config: Config) -> Iterator[Problem]:
    """Yield the problems of settings that do not go together, whatever the job."""
    yield from config.model.conflicts()
    for rules in _RULES:
        yield from rules(config)
