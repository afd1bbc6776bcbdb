"""Keys of the configuration that have been renamed or removed.

Every run folder and checkpoint lists all keys of the version that wrote it, so old keys are read
wherever a configuration is read: a renamed key stands for its new name, and a removed key is
dropped where it has the default that it had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.errors import ConfigError, Problem

RENAMED = {
    "pipeline.chunks": "pipeline.virtual_stages",
    "pipeline.placement": "pipeline.stage_layout",
}
"""The new name of each renamed key, in the same section."""


@dataclass(frozen=True)
class Removed:
    """A key, or a value of a key, that is no more.

    Args:
        works: The value to give instead. Of a key its old default, which is what happens today.
        reason: Why, and what does the same.
    """

    works: Any
    reason: str


REMOVED = {
    "parallel.tp_pieces": Removed(
        1, "it was faster across slow links alone, where parallel.pp and parallel.dp are faster yet"
    ),
    "compression.gradients_limit": Removed(
        2.0, "a batch sends at most twice compression.gradients_kept"
    ),
    "compression.tensor": Removed(
        "none", "keep ranks of tp on fast links, and compress what other ranks send"
    ),
    "train.keep_memory": Removed(True, "giving memory back takes time in every step"),
    "train.planned_memory": Removed(False, "losses and weights are the same without it"),
}
"""Keys that were removed."""
REMOVED_VALUES = {
    ("compression.messages", "subspace"): Removed("int4", "int4 learns more for the same bytes"),
}
"""Values that were removed, of keys that are still there."""


def translate(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a configuration's sections with the keys of today, and what is wrong with old keys.

    Args:
        document: Keys and values by section. A section that is not a table is left alone.
    """
    problems: list[Problem] = []
    sections = {
        name: _translate_section(name, table, problems) if isinstance(table, Mapping) else table
        for name, table in document.items()
    }
    return sections, problems


def _translate_section(
    section: str, table: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Return the keys and values that a section's table has today; adds to `problems`."""
    translated = {}
    for key, value in table.items():
        name = f"{section}.{key}"
        new_name = RENAMED.get(name, name)
        new_key = new_name.removeprefix(f"{section}.")
        if new_key != key and table.get(new_key, value) != value:
            rule = f"is the old name of {new_name}, which has another value here"
            problems.append(Problem(name, value, rule, f"{new_name} alone"))
        elif problem := _no_more(name, value):
            problems.append(problem)
        elif name not in REMOVED:
            translated[new_key] = value
    return translated


def _no_more(name: str, value: Any) -> Problem | None:
    """Return what is wrong with a value that is no more; None if it may be read or dropped."""
    removed = REMOVED.get(name)
    if removed is None and isinstance(value, str):
        removed = REMOVED_VALUES.get((name, value))
    if removed is None or value == removed.works:
        return None
    return Problem(name, value, f"was removed: {removed.reason}", json.dumps(removed.works))


def translate_flags(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with today's names of flags, without removed ones.

    Raises: ConfigError if a removed flag has another value than its old default.
    """
    translated = []
    problems = []
    left = list(words)
    while left:
        head, equals, value = left.pop(0).partition("=")
        name = head[2:].replace("-", "_") if head.startswith("--") else ""
        if name in RENAMED:
            head = f"--{RENAMED[name]}"
        if name not in REMOVED:
            translated.append(head + equals + value)
            continue
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        if problem := _no_more(name, _as_value(value)):
            problems.append(problem)
    if problems:
        raise ConfigError(*problems)
    return translated


def _as_value(word: str) -> Any:
    """Return the number, truth value or text that a word of the command line stands for."""
    try:
        return json.loads(word.lower())
    except ValueError:
        return word
