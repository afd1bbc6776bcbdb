"""Errors that a user can act on. Imports nothing of hybridpar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with what the user asked for: where, what, which rule, and a value that works."""

    field: str
    value: object
    rule: str
    suggestion: str = ""

    def __str__(self) -> str:
        text = f"{self.field} = {self.value!r}: {self.rule}"
        return f"{text}; try {self.suggestion}" if self.suggestion else text


class HybridparError(Exception):
    """Base of the errors raised on purpose; anything else is a defect of ours."""


class ConfigError(HybridparError):
    """The configuration, or an argument, cannot work. Carries every problem found, not just the first."""

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(f"  - {p}" if len(problems) > 1 else str(p) for p in problems))


class DataError(HybridparError):
    """A file that was read is damaged, truncated, or not what its name says."""


class CheckpointError(HybridparError):
    """A checkpoint cannot be loaded (missing, damaged, or made by another model), or cannot be written."""


def config_error(field: str, value: object, rule: str, suggestion: str = "") -> ConfigError:
    """The common case: one problem."""
    return ConfigError(Problem(field, value, rule, suggestion))
