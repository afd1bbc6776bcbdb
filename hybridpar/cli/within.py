"""What the numbers of a command's own flags may be; those of the configuration are checked by hybridpar.validate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


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
