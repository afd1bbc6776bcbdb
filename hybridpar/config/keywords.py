"""Sections that a Python program gives as keywords: `Trainer(model, optim={"lr": 0.1})`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hybridpar.config.all_sections import Config
from hybridpar.config.names import meant
from hybridpar.config.toml import from_mapping, to_mapping
from hybridpar.errors import ConfigError, Problem

_MAIN_KEYS = ("name", "kind", "schedule", "corpus", "num_steps")
"""Keys that stand for their section in an example."""


def from_keywords(sections: Mapping[str, Any], base: Config, others: Sequence[str] = ()) -> Config:
    """Return `base` with the sections that a program gives put over it.

    Args:
        sections: By name a dict of keys, or a dataclass of the section. Paths stand for their text.
        base: The configuration below.
        others: Names of the function's other keywords, which an unknown name may stand for.

    Raises:
        ConfigError: Names every keyword that is no section, with what to write, and what
            `from_mapping` refuses.
    """
    plain = to_mapping(base)
    problems = [
        problem
        for name, table in sections.items()
        if (problem := _wrong_keyword(name, table, plain, others)) is not None
    ]
    if problems:
        raise ConfigError(*problems)
    tables = {
        name: {key: _as_text(value) for key, value in _table(table).items()}
        for name, table in sections.items()
    }
    try:
        return from_mapping(tables, base)
    except ConfigError as error:
        raise ConfigError(*map(_in_python, error.problems)) from None


def _in_python(problem: Problem) -> Problem:
    """Return a problem whose suggestion is written as Python has it: True, not TOML's true."""
    works = {"true": "True", "false": "False"}.get(problem.suggestion, problem.suggestion)
    return dataclasses.replace(problem, suggestion=works)


def _table(given: Any) -> Mapping[str, Any]:
    """A section's keys and values."""
    return (
        given
        if isinstance(given, Mapping)
        else {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    )


def _as_text(value: Any) -> Any:
    """A value, with texts instead of paths."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_as_text(entry) for entry in value] if isinstance(value, list | tuple) else value


def _wrong_keyword(
    name: str, table: Any, plain: Mapping[str, Mapping[str, Any]], others: Sequence[str]
) -> Problem | None:
    """Return what is wrong with a keyword; None if it is a section with keys."""
    is_table = isinstance(table, Mapping) or (
        dataclasses.is_dataclass(table) and not isinstance(table, type)
    )
    if name == "model" and not isinstance(table, Mapping):
        return Problem(
            name,
            type(table).__name__,
            "the model is the first argument, without a keyword",
            "Trainer(model, ..)",
        )
    if name in plain:
        key = next((one for one in _MAIN_KEYS if one in plain[name]), next(iter(plain[name])))
        works = f"{name}={{{key!r}: {plain[name][key]!r}}}"
        return (
            None
            if is_table
            else Problem(name, table, "must be a dict of the section's keys", works)
        )
    given = "..." if is_table else table
    if not is_table and (
        near := meant(name, [f"{section}.{key}" for section in plain for key in plain[section]])
    ):
        section, _, key = near[0].partition(".")
        works = f"{section}={{{key!r}: {table!r}}}"
        return Problem(
            name, given, "unknown keyword: give a setting in the dict of its section", works
        )
    if near := meant(name, [*plain, *others]):
        return Problem(name, given, "unknown section", " or ".join(near), is_guess=True)
    return Problem(name, given, f"unknown section. Sections: {', '.join(plain)}")
