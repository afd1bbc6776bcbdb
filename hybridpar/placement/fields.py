"""Read the fields of a JSON document, and collect the errors in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridpar.errors import ConfigError, Problem

LARGEST = 1e30
SMALLEST = 1e-30
"""Largest time or size, and smallest value that must be positive: within these limits no sum or
quotient overflows."""
MAX_PROBLEMS = 10


class Checker:
    """A reader of fields of a JSON document that collects the errors in them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, field_name: str, value: object, rule: str, suggestion: str = "") -> None:
        self.problems.append(Problem(field_name, value, rule, suggestion))

    def finish(self) -> None:
        """Raise a ConfigError that names the first few errors, if there are any."""
        if self.problems:
            raise ConfigError(*self.problems[:MAX_PROBLEMS])

    def mapping(self, value: object, where: str) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self.add(where, value, "must be a JSON object", "{}")
        return {}

    def items(self, value: object, where: str) -> Sequence[Any]:
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return value
        self.add(where, value, "must be a JSON array", "[]")
        return ()

    def number(
        self,
        holder: Mapping[str, Any],
        key: str,
        where: str,
        default: float | None = None,
        positive: bool = False,
    ) -> float:
        """Return a finite number of at least 0, or of at least `SMALLEST` if `positive`."""
        name = f"{where}{key}"
        value = holder.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.add(name, value, "must be a number", "1.0")
        elif not (SMALLEST if positive else 0) <= value <= LARGEST:  # also false for NaN
            self.add(
                name,
                value,
                f"must be {'above 0' if positive else '0 or more'} and at most {LARGEST:g}",
                "1.0",
            )
        else:
            return float(value)
        return 1.0

    def integer(
        self,
        holder: Mapping[str, Any],
        key: str,
        where: str,
        least: int,
        most: int,
        suggestion: str,
    ) -> int:
        name = f"{where}{key}"
        value = holder.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.add(name, value, "must be an integer", suggestion)
        elif not least <= value <= most:
            self.add(name, value, f"must be {least} to {most}", suggestion)
        else:
            return value
        return least

    def flag(self, holder: Mapping[str, Any], key: str, where: str) -> bool:
        value = holder.get(key)
        if isinstance(value, (bool, int)) and value in (0, 1):
            return bool(value)
        self.add(f"{where}{key}", value, "must be true, false, 1 or 0", "true")
        return True

    def ends(
        self, edge: Mapping[str, Any], i: int, position: Mapping[int, int]
    ) -> tuple[int, int] | None:
        """Return the positions of an edge's source and destination by id, or None if one is wrong.

        Args:
            edge: The edge.
            i: Number of the edge, for the error message.
            position: Positions by id.
        """
        found = []
        for key in ("sourceId", "destId"):
            value = edge.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value not in position:
                self.add(
                    f"edges[{i}].{key}",
                    value,
                    "must be the id of a node",
                    str(next(iter(position), "")),
                )
            else:
                found.append(position[value])
        return (found[0], found[1]) if len(found) == 2 else None
