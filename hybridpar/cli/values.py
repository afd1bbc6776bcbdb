"""Types of command arguments, and the parser of a grid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagConversionOff, Positional, arg

from hybridpar.config import Config, Within, broken_rules
from hybridpar.errors import Problem, config_error, not_utf8

_FILE = (
    "The configuration: a TOML file with sections such as [model] and [train]; scripts/configs has "
    "examples."
)
ConfigFile = Positional[Annotated[Path, arg(metavar="CONFIG.toml", help=_FILE)]]
Overrides = Annotated[Config, arg(name=""), FlagConversionOff]
Threads = Annotated[int, Within(0, 2**10)]
Ranks = Annotated[int, Within(0, 2**12)]
"""Number of processes on one machine."""
Devices = Annotated[int, Within(0, 2**16)]
JobRanks = Annotated[int, Within(0, 2**20)]
"""Number of processes of a job, on all its machines."""
MicroBatches = Annotated[tuple[int, ...], Within(1, 2**20)]


def as_utf8(text: str) -> str:
    """Return an argument whose bytes are UTF-8 as text, also in an ASCII locale; unchanged if the
    bytes are not UTF-8."""
    try:
        return os.fsencode(text).decode() if not_utf8(text) else text
    except UnicodeError:
        return text


def out_of_range(command: Any) -> list[Problem]:
    """Return a problem for every flag of a command whose value is out of range."""
    return [
        Problem(
            name,
            list(value) if isinstance(value, tuple) else value,
            rule.rule,
            str(
                rule.least if isinstance(value, tuple) else getattr(type(command), name, rule.least)
            ),
        )
        for name, value, rule in broken_rules(command)
        if isinstance(rule, Within)
    ]


def parse_grid(text: str) -> dict[str, int]:
    """Parse 'tp=2,pp=2,dp=2' into sizes by axis.

    Raises:
        ConfigError: The text is no grid.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if (
            axis not in ("tp", "cp", "pp", "dp", "ep")
            or not size.isdecimal()
            or not 0 < int(size) <= 2**16
            or axis in sizes
        ):
            raise config_error(
                "grid", text, "must give the sizes of tp, cp, pp, dp and ep", "tp=2,pp=2,dp=2"
            )
        sizes[axis] = int(size)
    return sizes
