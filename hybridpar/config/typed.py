"""Typed fields: the rules in their types, and plain values (of TOML or JSON) converted to them.

    num_layers: Annotated[int, Within(1, 10_000)] = 4

A rule on a list holds for each entry.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal

from hybridpar.errors import shown


@dataclass(frozen=True)
class Within:
    """Bounds of a number: `least` and `most` are allowed themselves, `above` and `below` are
    not."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf

    def allows(self, value: Any) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    @property
    def rule(self) -> str:
        """The bounds in words."""
        if self.most == self.below == inf and (self.least, self.above) in ((1, -inf), (-inf, 0)):
            return "must be positive"
        if (self.least, self.most, self.below) == (0, inf, inf):
            return "must not be negative"
        if self == FINITE:
            return "must be finite"
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return "must be " + " and ".join(
            f"{word} {bound}" for word, bound in bounds.items() if abs(bound) != inf
        )

    def works(self, value: Any, default: Any) -> str:
        """Return a value of the field that one would want: the default, or a share that was given
        in percent."""
        if self.below == 1 and not isinstance(value, tuple) and value >= 1 and not default:
            return f"{value / 100:g}" if 2 <= value < 100 else "0.1"
        return str(list(default) if isinstance(default, tuple) else default)


@dataclass(frozen=True)
class Size(Within):
    """Bounds of a number of bytes, which may also be written with a unit: "40MiB" or "1.5 GB"."""


_UNITS = {
    f"{prefix}{kind}": base ** (place + 1)
    for base, kind in ((1000, "B"), (1024, "iB"))
    for place, prefix in enumerate("KMGT")
} | {"B": 1}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_size(text: str) -> int:
    """Return the bytes that a text such as "40MiB" or "1.5 GB" means.

    Raises: ValueError with the rule that the text breaks.
    """
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise ValueError("must be a number of bytes, or a size with one of the units KiB, MiB, GiB")
    size = round(float(found[1]) * units[found[2].lower()])
    if not size and float(found[1]):  # 0 means no limit
        raise ValueError("must be 0 or at least one byte")
    return size


@dataclass(frozen=True)
class OneOf:
    """Names that a text may be; `example`: a value of the field that is allowed."""

    names: tuple[str, ...]
    example: str

    @property
    def rule(self) -> str:
        return f"must be one of {', '.join(self.names)}"

    def allows(self, value: Any) -> bool:
        return value in self.names

    def works(self, value: Any, default: Any) -> str:
        """A value of the field that is allowed."""
        return self.example


Rule = Within | OneOf
Positive = Annotated[float, Within(above=0)]
NotNegative = Annotated[float, Within(0)]
Share = Annotated[float, Within(0, below=1)]
Count = Annotated[int, Within(0)]
Bytes = Annotated[int, Size(0)]
AtLeastOne = Annotated[int, Within(1)]
Whole = Annotated[int, Within(0, 2**62)]
FINITE = Within(-sys.float_info.max, sys.float_info.max)


@functools.cache
def hints_of(kind: type[Any]) -> dict[str, tuple[Any, Rule | None]]:
    """The type of each field of a dataclass, and its rule, if it has one."""
    plain = typing.get_type_hints(kind)
    full = typing.get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in full.items()}
    return {
        f.name: (
            plain[f.name],
            next((note for note in notes[f.name] if isinstance(note, Rule)), None),
        )
        for f in dataclasses.fields(kind)
    }


def broken_rules(settings: Any) -> Iterator[tuple[str, Any, Rule]]:
    """Every field of a dataclass whose value its rule does not allow: name, value, rule."""
    kind: Any = type(settings)
    for name, (_, rule) in hints_of(kind).items():
        if not _allowed(value := getattr(settings, name), rule) and rule is not None:
            yield name, value, rule


def _allowed(value: Any, rule: Rule | None) -> bool:
    if isinstance(value, tuple | dict):
        return all(
            _allowed(entry, rule)
            for entry in (value.values() if isinstance(value, dict) else value)
        )
    return rule is None or value is None or rule.allows(value)


def from_plain(kind: Any, value: Any, where: str, *, lenient: bool = False) -> Any:
    """`value`, of JSON, as a dataclass, a dict or tuple of such, or a plain type, with a rule
    (Annotated) or without.

    Fields with a default may be missing. lenient: values that a dataclass has no field for are
    passed over.
    Raises: ValueError with the place, the value and the rule that it breaks.
    """
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    read = functools.partial(from_plain, lenient=lenient)
    try:
        if origin is Annotated:
            return _checked(read(inner[0], value, where), inner[1], value, where)
        if dataclasses.is_dataclass(kind):
            table = vars(value) if type(value) is kind else convert(value, dict)
            return _dataclass_from(kind, table, where, lenient)
        if origin in (dict, Mapping):
            return {
                inner[0](key): read(inner[1], entry, f"{where}.{key}")
                for key, entry in convert(value, dict).items()
            }
        if origin is tuple and dataclasses.is_dataclass(inner[0]):
            entries = value if isinstance(value, tuple) else convert(value, list)
            return tuple(read(inner[0], entry, f"{where}[{i}]") for i, entry in enumerate(entries))
        if origin is UnionType and dataclasses.is_dataclass(inner[0]):
            return None if value is None else read(inner[0], value, where)
        return convert(value, kind)
    except Misfit:
        raise
    except ValueError as error:
        raise Misfit(f"{where} is {shown(value)}, which {error}") from None


def span(value: Any, where: str, most: int) -> tuple[int, int]:
    """`value`, of JSON, as the two ends of a range inside [0, most). Raises: ValueError."""
    start, stop = from_plain(tuple[int, int], value, where)
    if not 0 <= start <= stop <= most:
        raise Misfit(
            f"{where} is {shown(value)}, which must be the ends of a range from 0 to {most}"
        )
    return start, stop


def entries_of(kind: Any) -> Any:
    """The dataclass of the entries of a list, by its annotated type; None if it is no such list."""
    inner = (*typing.get_args(kind), None)[0]
    return inner if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(inner) else None


class Misfit(ValueError):
    """A value that cannot be converted, with its place."""


def _checked(found: Any, rule: Rule | None, value: Any, where: str) -> Any:
    if rule is not None and not _allowed(found, rule):
        raise Misfit(f"{where} is {shown(value)}, which {rule.rule}")
    return found


def _dataclass_from(kind: Any, table: Mapping[str, Any], where: str, lenient: bool) -> Any:
    hints = hints_of(kind)
    values = {}
    for name, value in table.items():
        if name not in hints:
            if lenient:
                continue
            raise Misfit(f"{where}.{name} is unknown; known names: {', '.join(hints)}")
        (type_, rule), place = hints[name], f"{where}.{name}"
        values[name] = _checked(
            from_plain(type_, value, place, lenient=lenient), rule, value, place
        )
    for field in dataclasses.fields(kind):
        if (
            field.name not in table
            and field.default is field.default_factory is dataclasses.MISSING
        ):
            raise Misfit(f"{where}: {field.name!r} is missing")
    return kind(**values)


def convert(value: Any, kind: Any) -> Any:
    """`value`, of TOML or JSON, as the annotated type. Raises: ValueError with the rule it
    breaks."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is Literal:
        options = typing.get_args(kind)
        if value not in options or isinstance(value, bool):
            raise ValueError(f"must be one of {', '.join(map(str, options))}")
        return value
    if origin in (tuple, Sequence):
        inner = typing.get_args(kind)
        is_text = inner[0] is str or typing.get_origin(inner[0]) is Literal
        items = [value] if isinstance(value, str) and is_text else value
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise ValueError("must be a list")
        if origin is tuple and inner[-1] is not Ellipsis and len(items) != len(inner):
            raise ValueError(f"must have {len(inner)} entries")
        return tuple(
            map(
                convert,
                items,
                [inner[0]] * len(items) if Ellipsis in inner or origin is Sequence else inner,
            )
        )
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError("must be a table with names as keys")
        return {name: convert(entry, typing.get_args(kind)[1]) for name, entry in value.items()}
    if origin in (typing.Union, UnionType):
        return _convert_to_any(value, typing.get_args(kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise ValueError("is too large")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"must be of type {kind.__name__}")
    return value


def _convert_to_any(value: Any, kinds: Sequence[Any]) -> Any:
    rules = []
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError as error:
            rules.append(str(error))
    raise ValueError(", or ".join(rules))
