"""JSON that another program may have written or damaged, read with suspicion."""

from __future__ import annotations

import json
import sys
from typing import Any

Object = dict[str, Any]


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises: ValueError, also for a key that is there twice, and for what nests too deep."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nests too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> Object:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one key twice")
    return found


def mapping(value: Any, what: str) -> Object:
    """`value`, an object. Raises: ValueError, here and below."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def sequence(value: Any, what: str) -> list[Any]:
    """`value`, a list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def integer(value: Any, what: str, least: int = 0, most: int = 2**62) -> int:
    """`value`, a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} is not a whole number from {least} to {most}")
    return value


def integers(value: Any, what: str) -> tuple[int, ...]:
    """`value`, a list of whole numbers of 0 or more."""
    return tuple(integer(one, what) for one in sequence(value, what))


def number(value: Any, what: str) -> float:
    """`value`, a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{what} is not a number")
    return float(value)


def string(value: Any, what: str) -> str:
    """`value`, a text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text")
    return value


def spans(value: Any, what: str, most: int) -> tuple[int, ...]:
    """`value`, the ends of one or more ranges inside [0, most), one range after the other."""
    ends = sequence(value, what)
    if not ends or len(ends) % 2:
        raise ValueError(f"{what} is not pairs")
    return tuple(end for i in range(0, len(ends), 2) for end in span(ends[i : i + 2], what, most))


def span(value: Any, what: str, most: int) -> tuple[int, int]:
    """`value`, the two ends of a range inside [0, most)."""
    ends = sequence(value, what)
    if len(ends) != 2:
        raise ValueError(f"{what} is not a pair")
    stop = integer(ends[1], what, 0, most)
    return integer(ends[0], what, 0, stop), stop
