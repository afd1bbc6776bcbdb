"""Every value that a refusal suggests helps: applied to random configurations until none is refused.

A suggestion is a value of the refused field, or `section.key = value`; of several, divided by ", or ", each must help.
"""

from __future__ import annotations

import json
import re
import typing
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal

import pytest
import tomllib

from hybridpar.config import Config, from_mapping
from hybridpar.config.typed import OneOf, hints_of
from hybridpar.errors import ConfigError, Problem
from hybridpar.planner.hardware import find_device, find_link
from hybridpar.validate import problems

SECTIONS = ("model", "parallel", "pipeline", "optim", "train", "data", "memory", "compression", "checkpoint",
            "anomalies", "outer", "faults")
_WORDS = {"recompute": ("none", "all", "stage", "selective", "0", "0,2-5", "stage:0", "selective:0,7", "some")}
_UNTOUCHED = {"spec", "rule", "cache", "tokenizer", "device", "corpus", "valid_corpus"}
"""Keys that name what must exist elsewhere."""
_MOST_ROUNDS = 8


def draw_value(random: Random, name: str, kind: Any, rule: Any) -> Any:
    """A value of an annotated type, which its rule or its section may forbid."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return draw_value(random, name, inner[0], next(iter(inner[1:]), rule))
    if origin is Literal:
        return random.choice(inner)
    if origin in (typing.Union, UnionType):
        return draw_value(random, name, random.choice(inner), rule)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return [draw_value(random, name, inner[0], rule) for _ in range(random.choice((0, 1, 2, 4)))]
        return [draw_value(random, name, each, rule) for each in inner]
    if kind is bool:
        return random.random() < 0.5
    if isinstance(rule, OneOf):
        return random.choice((*rule.names, "other"))
    if kind is int:
        return random.choice((-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 33))
    if kind is float:
        return random.choice((-1.0, 0.0, 0.1, 0.5, 1.0, 2.5, 100.0))
    return random.choice(_WORDS.get(name, ("", "none", "a")))


def draw_document(random: Random) -> dict[str, Any]:
    """Some keys of some sections; of the sections that must fit together more."""
    document: dict[str, Any] = {}
    usual = Config()
    for section in SECTIONS:
        hints = {name: hint for name, hint in hints_of(type(getattr(usual, section))).items()
                 if name not in _UNTOUCHED}
        share = random.choice((0.0, 0.1, 0.3)) if section not in ("pipeline", "parallel") else random.choice((0.2, 0.5))
        document[section] = {name: draw_value(random, name, *hint) for name, hint in hints.items()
                             if random.random() < share}
    return document


def refusals(document: dict[str, Any], world_size: int) -> list[Problem]:
    try:
        return problems(from_mapping(document), world_size)
    except ConfigError as error:
        return [*error.problems]


def value_of(text: str) -> Any:
    """A suggested value as TOML would have it; a bare word is text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        if text in ("True", "False"):
            return text == "True"
        return text.strip("'")


def choices(problem: Problem) -> list[list[tuple[str, str]]]:
    """Every way out that the problem names, as fields and texts of their values. "ranks": the number of processes."""
    found = []
    for one in problem.suggestion.split(", or "):
        if "my_package" in one:  # stands for a class of the user's
            continue
        if several := re.fullmatch(r"(\w+=\d+)( \w+=\d+)*", one):
            pairs = [pair.split("=") for pair in several[0].split()]
            found.append([(f"{problem.field}.{key}", value) for key, value in pairs])
        elif ranks := re.match(r"(\d+) processes", one):
            found.append([("ranks", ranks[1])])
        else:
            field, equals, value = one.partition(" = ")
            named = equals and field.count(".") == 1 and " " not in field
            found.append([(field, value) if named else (problem.field, one)])
    return found


def applied(document: dict[str, Any], world_size: int, choice: list[tuple[str, str]]) -> tuple[dict[str, Any], int]:
    """The document and the number of processes with a suggestion in them."""
    changed = json.loads(json.dumps(document))
    for field, text in choice:
        if field == "ranks":
            world_size = int(text)
            continue
        section, _, key = field.partition(".")
        changed.setdefault(section, {})[key] = value_of(text)
    return changed, world_size


def require_help(seed: int) -> None:
    random = Random(seed)
    document, world = draw_document(random), random.choice((1, 2, 4, 6, 8))
    for _ in range(_MOST_ROUNDS * 3):
        found = refusals(document, world)
        if not found:
            return
        for problem in found:
            assert problem.suggestion, f"seed {seed}: {problem}"
            for choice in choices(problem):
                left = refusals(*applied(document, world, choice))
                same = [other for other in left if (other.field, other.rule) == (problem.field, problem.rule)]
                assert not same, f"seed {seed}: {problem}\n  {choice} does not help: {same}"
        for problem in found:
            document, world = applied(document, world, choices(problem)[0])
    raise AssertionError(f"seed {seed}: suggestions lead to no configuration that is accepted: {found}")


def test_suggestions_help(request: pytest.FixtureRequest) -> None:
    for seed in range(20_000 if request.config.getoption("--thorough") else 400):
        require_help(seed)


@pytest.mark.parametrize(("name", "works"), [
    ("h100", "h100-80gb"), ("H200", "h200-141gb"), ("v100", "v100-16gb"), ("a100_80gb", "a100-80gb"),
    ("a100-40", "a100-40gb"), ("tpu", "a100-80gb")])
def test_a_device_is_told_the_nearest_name(name: str, works: str) -> None:
    with pytest.raises(ConfigError, match=f"try {works}$"):
        find_device(name)


@pytest.mark.parametrize(("field", "name", "works"), [
    ("outer", "ib400", "infiniband-ndr"), ("outer", "infiniband-100", "infiniband-edr"),
    ("outer", "eth25", "ethernet-25"), ("outer", "100gbe", "ethernet-100"),
    ("inner", "nvlink-4", "nvlink4"), ("inner", "PCIe5", "pcie5"),
    ("outer", "wire", "ethernet-25"), ("inner", "wire", "nvlink3")])
def test_a_link_is_told_the_nearest_name(field: str, name: str, works: str) -> None:
    with pytest.raises(ConfigError, match=f"try {works}$"):
        find_link(name, field)
