"""Rotary positions in config.json, and keys rotary_* of [model].

transformers 5 writes rope_parameters, with base and scaling inside; older files have rope_theta
beside rope_scaling. Both are read, and a quantity with two values is refused. A model with another
base in its layers with windows has rope_parameters for each kind of layer, or rope_local_base_freq.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridpar.checkpoint.huggingface.families import Family, Rotary
from hybridpar.config import ModelConfig
from hybridpar.errors import Problem, shown

Plain = Mapping[str, Any]
FULL = "full_attention"
WINDOWED = "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
PLACES = ("rope_scaling", "rope_parameters")
"""Keys with settings of rotary positions, in older and newer files."""
_GENERAL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LATER = {"dynamic": "it depends on the length of each text, while others are generated"}
"""Scalings that are no part of a model that is trained."""
_NUMBERS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_factor",
        "high_freq_factor": "high_factor",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "magnitude",
    },
    "longrope": {"factor": "factor", "attention_factor": "magnitude"},
}
"""Numbers of each scaling, and their keys rotary_* of [model]."""
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OTHERS = {
    "llama3": (ORIGINAL,),
    "yarn": (ORIGINAL, "truncate", "mscale", "mscale_all_dim"),
    "longrope": (ORIGINAL, "short_factor", "long_factor"),
}
EXTENDED = tuple(_OTHERS)
"""Scalings that have the longest text before the extension."""


@dataclass(frozen=True)
class _Reader:
    """Reads the rotary settings of one configuration, and collects what is wrong with them."""

    plain: Plain
    family: Family
    rotary: Rotary
    problems: list[Problem]

    def refuse(self, name: str, value: object, rule: str, works: str = "") -> None:
        self.problems.append(Problem(f"{self.family.settings}: {name}", value, rule, works))

    def contradict(self, found: Mapping[str, Any]) -> None:
        """Refuse values of one quantity that differ, by the names of their keys."""
        (name, value), *others = found.items()
        for other, other_value in others:
            if other_value != value:
                rule = (
                    f"contradicts {other} = {shown(other_value)}: both say the same thing of the "
                    f"model"
                )
                self.refuse(name, value, rule, "the right one alone")

    def places(self) -> dict[str, Plain]:
        """Return the settings of layers without a window, by the names of their keys."""
        found = {}
        for name in PLACES:
            rope = self.plain.get(name) or {}
            if not isinstance(rope, Mapping):
                self.refuse(name, rope, "must be a table of settings, or null", "null")
                continue
            if self.rotary.window_base is not None and name == "rope_parameters":
                for key in rope.keys() - {FULL, WINDOWED}:
                    rule = f"must have settings for {FULL} and {WINDOWED} alone"
                    self.refuse(f"{name}.{key}", rope[key], rule)
                rope = rope.get(FULL) or {}
                name = f"{name}.{FULL}"
                if not isinstance(rope, Mapping):
                    self.refuse(name, rope, "must be a table of settings, or null", "null")
                    continue
            found[name] = rope
        return found

    def spellings(
        self, places: Mapping[str, Plain], key: str, inner: str, default: Any
    ) -> dict[str, Any]:
        """Return the values of one quantity, by the names of their keys.

        Args:
            key: Its name in config.json.
            inner: Its name in rope_parameters and rope_scaling, and in config.json of most
                families.
            default: The value if transformers would read neither.
        """
        found = {key: self.plain[key]} if self.plain.get(key) is not None else {}
        found |= {
            f"{name}.{inner}": rope[inner]
            for name, rope in places.items()
            if rope.get(inner) is not None
        }
        found = found or {key: default}
        if self.plain.get(inner) is None:
            return found
        return {**found, inner: self.plain[inner]}

    def kind_of(self, name: str, rope: Plain) -> str | None:
        """Return the scaling of one place; None if it is refused."""
        kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
        if len(set(map(str, kinds.values()))) > 1:
            self.contradict({f"{name}.{key}": value for key, value in kinds.items()})
            return None
        kind = next(iter(kinds.values()), "default")
        kind = self.rotary.renamed.get(kind, kind) if isinstance(kind, str) else kind
        if kind == "default" or kind in self.rotary.scalings:
            return str(kind)
        reason = _LATER.get(str(kind), "")
        rule = f"scaling {shown(kind)} is not supported for {self.family.model_type}"
        works = ("null", *(f'rope_type "{one}"' for one in self.rotary.scalings))
        self.refuse(name, rope, f"{rule}: {reason}" if reason else rule, " or ".join(works))
        return None


def read_rotary(plain: Plain, values: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Set the keys rotary_* of [model], and yield settings that are wrong or not supported."""
    assert family.rotary is not None
    problems: list[Problem] = []
    reader = _Reader(plain, family, family.rotary, problems)
    places = reader.places()
    kinds = {name: reader.kind_of(name, rope) for name, rope in places.items()}
    _base_and_fraction(reader, places, values)
    if family.rotary.window_base is not None:
        _window_base(reader, values)
    scaled = {name: kind for name, kind in kinds.items() if kind not in (None, "default")}
    for name, rope in places.items():
        kind = kinds[name]
        known = {*_GENERAL, *_NUMBERS.get(kind or "", {}), *_OTHERS.get(kind or "", ())}
        unknown = sorted(rope.keys() - known)
        if kind is not None and unknown:
            rule = f"unknown setting of rope_type {kind}"
            reader.refuse(f"{name}.{unknown[0]}", rope[unknown[0]], rule)
    if len(set(scaled.values())) > 1:
        reader.contradict({f"{name}.rope_type": kind for name, kind in scaled.items()})
    elif scaled and not problems:
        kind = str(next(iter(scaled.values())))
        values["rotary_scaling"] = kind
        _scaling(reader, {name: places[name] for name in scaled}, kind, values)
    yield from problems


def _base_and_fraction(
    reader: _Reader, places: Mapping[str, Plain], values: dict[str, Any]
) -> None:
    rotary = reader.rotary
    family = reader.family
    bases = reader.spellings(places, rotary.base, "rope_theta", rotary.default_base)
    parts = reader.spellings(
        places, rotary.fraction, "partial_rotary_factor", rotary.default_fraction
    )
    reader.contradict(bases)
    reader.contradict(parts)
    name, part = next(iter(parts.items()))
    fixed = family.model.get("rotary_fraction", part)
    if not is_number(part) or not 0 < part <= 1 or part != fixed:
        rule = "must be above 0 and at most 1"
        if "rotary_fraction" in family.model:
            rule = f"not supported: {family.model_type} rotates all features of a head"
        reader.refuse(name, part, rule, "1.0")
    else:
        values["rotary_fraction"] = float(part)
    name, base = next(iter(bases.items()))
    if not is_number(base) or base <= 0:
        reader.refuse(name, base, "must be a finite number above 0", "10000.0")
    else:
        values["rotary_base"] = float(base)


def _window_base(reader: _Reader, values: dict[str, Any]) -> None:
    """Set the base of layers with a window, which have no scaling."""
    found = {}
    if reader.plain.get("rope_local_base_freq") is not None:
        found["rope_local_base_freq"] = reader.plain["rope_local_base_freq"]
    rope = reader.plain.get("rope_parameters")
    rope = rope.get(WINDOWED) if isinstance(rope, Mapping) else None
    name = f"rope_parameters.{WINDOWED}"
    if isinstance(rope, Mapping):
        if reader.kind_of(name, rope) not in (None, "default") or rope.keys() - set(_GENERAL[:3]):
            reader.refuse(
                name, rope, "layers with windows have no scaling here", "rope_theta alone"
            )
        if rope.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = rope["rope_theta"]
    elif rope is not None:
        reader.refuse(name, rope, "must be a table of settings, or null", "null")
    found = found or {"rope_local_base_freq": reader.rotary.window_base}
    reader.contradict(found)
    name, base = next(iter(found.items()))
    if not is_number(base) or base <= 0:
        reader.refuse(name, base, "must be a finite number above 0", "10000.0")
    else:
        values["window_rotary_base"] = float(base)


def _scaling(
    reader: _Reader, places: Mapping[str, Plain], kind: str, values: dict[str, Any]
) -> None:
    """Set the numbers of a scaling."""

    def single(inner: str) -> tuple[str, Any]:
        found = {
            f"{name}.{inner}": rope[inner]
            for name, rope in places.items()
            if rope.get(inner) is not None
        }
        if not found:
            return f"{next(iter(places))}.{inner}", None
        reader.contradict(found)
        return next(iter(found.items()))

    for inner in _NEEDED.get(kind, ()):
        name, value = single(inner)
        if value is None:
            reader.refuse(name, None, f"missing; rope_type {kind} needs it")
    for inner, ours in _NUMBERS[kind].items():
        name, value = single(inner)
        if value is None:
            continue
        if not is_number(value) or value <= 0:
            reader.refuse(name, value, "must be a finite number above 0")
            continue
        values[f"rotary_{ours}"] = float(value)
    if kind in EXTENDED:
        _original_positions(reader, places, values)
    if kind == "yarn":
        _yarn(reader, single, values)
    if kind == "longrope":
        _longrope(reader, single, values)


def _original_positions(
    reader: _Reader, places: Mapping[str, Plain], values: dict[str, Any]
) -> None:
    default = reader.rotary.original_positions or values.get("max_positions")
    found = reader.spellings(places, ORIGINAL, ORIGINAL, default)
    reader.contradict(found)
    name, value = next(iter(found.items()))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**24:
        reader.refuse(name, value, "must be an integer above 0", "8192")
    else:
        values["rotary_original_positions"] = value


def _yarn(
    reader: _Reader, single: Callable[[str], tuple[str, Any]], values: dict[str, Any]
) -> None:
    name, truncate = single("truncate")
    if truncate is not None:
        if not isinstance(truncate, bool):
            reader.refuse(name, truncate, "must be true or false")
        else:
            values["rotary_truncate"] = truncate
    name, scale = single("mscale")
    all_name, all_scale = single("mscale_all_dim")
    if not scale or not all_scale or "rotary_magnitude" in values:
        return
    if not is_number(scale) or not is_number(all_scale):
        reader.refuse(name, scale, f"must be a number, as {all_name} = {shown(all_scale)}")
        return
    grown = 0.1 * math.log(max(1.0, values.get("rotary_factor", 1.0)))
    values["rotary_magnitude"] = (scale * grown + 1) / (all_scale * grown + 1)


def _longrope(
    reader: _Reader, single: Callable[[str], tuple[str, Any]], values: dict[str, Any]
) -> None:
    for inner, ours in (("short_factor", "short_factors"), ("long_factor", "long_factors")):
        name, factors = single(inner)
        if factors is None:
            continue
        if not isinstance(factors, list) or not all(is_number(f) and f > 0 for f in factors):
            reader.refuse(name, factors, "must be a list of finite numbers above 0")
            continue
        values[f"rotary_{ours}"] = tuple(float(f) for f in factors)
    original = values.get("rotary_original_positions")
    longest = values.get("max_positions")
    if not original or not longest:
        return
    ratio = longest / original
    name, factor = single("factor")
    if factor is None:
        values["rotary_factor"] = ratio
    elif factor != ratio and "rotary_magnitude" not in values:
        rule = (
            f"contradicts max_position_embeddings / {ORIGINAL} = {ratio:g}: versions of "
            f"transformers take one or the other"
        )
        reader.refuse(name, factor, rule, f"{ratio:g}, or attention_factor beside it")


def write_rotary(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of config.json for a model's rotary positions, in the form that all versions
    of transformers read."""
    assert family.rotary is not None
    plain: dict[str, Any] = {family.rotary.base: model.rotary_base}
    if "rotary_fraction" not in family.model:
        plain[family.rotary.fraction] = model.rotary_fraction
    if family.rotary.window_base is not None:
        plain["rope_local_base_freq"] = model.window_rotary_base or model.rotary_base
    if not family.rotary.scalings:
        return plain
    kind = model.rotary_scaling
    if kind == "none":
        return plain | {"rope_scaling": None}
    is_short = family.rotary.original_positions is not None
    rope: dict[str, Any] = {"type" if is_short else "rope_type": kind}
    for inner, ours in _NUMBERS[kind].items():
        rope[inner] = getattr(model, f"rotary_{ours}")
    if kind == "yarn":
        rope["truncate"] = model.rotary_truncate
    if kind == "longrope":
        rope["short_factor"] = list(model.rotary_short_factors)
        rope["long_factor"] = list(model.rotary_long_factors)
        if model.rotary_factor == model.num_positions / model.rotary_original_positions:
            del rope["factor"]  # older versions know no such key
    if not rope.get("attention_factor", True):
        del rope["attention_factor"]
    if kind in EXTENDED:
        (plain if is_short else rope)[ORIGINAL] = model.rotary_original_positions
    return plain | {"rope_scaling": rope}


def is_number(value: Any) -> bool:
    """Return whether a value is a number of at least 0 that fits a float."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )
