"""What the values of a command's own flags may be; those of the configuration are checked by hybridpar.validate."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any

from hybridpar.errors import Problem, config_error


@dataclass(frozen=True)
class Within:
    """The least and the most that a flag's number, or each of its list, may be."""

    least: int
    most: int

    def holds(self, value: object) -> bool:
        numbers = value if isinstance(value, tuple) else (value,)
        return all(self.least <= number <= self.most for number in numbers)


Threads = Annotated[int, Within(0, 2**10)]
Ranks = Annotated[int, Within(0, 2**12)]
"""On one machine."""
Devices = Annotated[int, Within(0, 2**16)]
MicroBatches = Annotated[tuple[int, ...], Within(1, 2**20)]


def out_of_range(command: Any) -> list[Problem]:
    """What is wrong with a command's own numbers."""
    problems = []
    for name, hint in typing.get_type_hints(type(command), include_extras=True).items():
        for within in getattr(hint, "__metadata__", ()):
            value = getattr(command, name)
            if isinstance(within, Within) and not within.holds(value):
                shown = list(value) if isinstance(value, tuple) else value
                rule = f"must be at least {within.least} and at most {within.most}"
                problems.append(Problem(name, shown, rule, str(getattr(type(command), name, within.least))))
    return problems


def parse_grid(text: str) -> dict[str, int]:
    """'tp=2,pp=2,dp=2' as numbers by axis. Raises: ConfigError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in ("tp", "pp", "dp") or not size.isdecimal() or not 0 < int(size) <= 2**16 or axis in sizes:
            raise config_error("grid", text, "must be sizes of tp, pp and dp", "tp=2,pp=2,dp=2")
        sizes[axis] = int(size)
    return sizes
