"""Every value that a refusal suggests helps: applied to random configurations until none is
refused.

A suggestion is a value of the refused field, or `section.key = value`; of several, divided by ", or
", each must help.
"""

from __future__ import annotations

import json
import re
import typing
from copy import deepcopy
from pathlib import Path
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal

import pytest
import tomllib

from hybridpar.cli.checking import Check
from hybridpar.cli.entry import flags_of, own_flags, parse
from hybridpar.cli.planning import Plan
from hybridpar.cli.simulating import Simulate
from hybridpar.cli.values import parse_grid
from hybridpar.config import Config, from_mapping
from hybridpar.config.typed import OneOf, hints_of
from hybridpar.errors import ConfigError, Problem
from hybridpar.planner.machines.cluster import read_cluster
from hybridpar.planner.machines.hardware import DEVICES, LINKS, find_device, find_link
from hybridpar.validate import problems

SECTIONS = (
    "model",
    "parallel",
    "pipeline",
    "optim",
    "train",
    "data",
    "memory",
    "compression",
    "checkpoint",
    "anomalies",
    "outer",
    "faults",
    "kernels",
    "run",
    "plan",
)
_WORDS = {
    "recompute": (
        "none",
        "all",
        "stage",
        "selective",
        "0",
        "0,2-5",
        "stage:0",
        "selective:0,7",
        "some",
    )
}
_UNTOUCHED = {
    "spec",
    "rule",
    "cache",
    "tokenizer",
    "device",
    "corpus",
    "valid_corpus",
    "valid_sets",
}
"""Keys that name what must exist elsewhere."""
_MOST_ROUNDS = 8


def draw_value(random: Random, name: str, kind: Any, rule: Any) -> Any:
    """A value of an annotated type, which its rule or its section may forbid."""
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is Annotated:
        return draw_value(random, name, inner[0], next(iter(inner[1:]), rule))
    if origin is Literal:
        return random.choice(inner)
    if origin in (typing.Union, UnionType):
        return draw_value(random, name, random.choice(inner), rule)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return [
                draw_value(random, name, inner[0], rule) for _ in range(random.choice((0, 1, 2, 4)))
            ]
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
        hints = {
            name: hint
            for name, hint in hints_of(type(getattr(usual, section))).items()
            if name not in _UNTOUCHED
        }
        share = (
            random.choice((0.0, 0.1, 0.3))
            if section not in ("pipeline", "parallel")
            else random.choice((0.2, 0.5))
        )
        document[section] = {
            name: draw_value(random, name, *hint)
            for name, hint in hints.items()
            if random.random() < share
        }
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
    """Every way out that the problem names, as fields and texts of their values. "ranks": the
    number of processes."""
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


def applied(
    document: dict[str, Any], world_size: int, choice: list[tuple[str, str]]
) -> tuple[dict[str, Any], int]:
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
    document = draw_document(random)
    world = random.choice((1, 2, 4, 6, 8))
    for _ in range(_MOST_ROUNDS * 3):
        found = refusals(document, world)
        if not found:
            return
        for problem in found:
            assert problem.suggestion, f"seed {seed}: {problem}"
            for choice in choices(problem):
                left = refusals(*applied(document, world, choice))
                same = [
                    other
                    for other in left
                    if (other.field, other.rule) == (problem.field, problem.rule)
                ]
                assert not same, f"seed {seed}: {problem}\n  {choice} does not help: {same}"
        for problem in found:
            document, world = applied(document, world, choices(problem)[0])
    raise AssertionError(
        f"seed {seed}: suggestions lead to no configuration that is accepted: {found}"
    )


@pytest.mark.thorough
def test_suggestions_help(request: pytest.FixtureRequest) -> None:
    for seed in range(20_000 if request.config.getoption("--thorough") else 80):
        require_help(seed)


_NUMBERS = (-1, 0, 1, 2, 3, 8, 0.5, 1.0, 1.5, 40.0, 2_000_000, 10**12, float("inf"), float("nan"))
_CLUSTER = (
    "servers",
    "devices_per_server",
    "device",
    "inner",
    "outer",
    "outer_links",
    "levels",
    "price",
    "stragglers",
    "others",
)
_LINK = ("name", "gbit_per_s", "back_gbit_per_s", "latency_us", "share", "half_duplex")
_TABLES = {
    "device": ("name", "tflops", "memory_gib", "memory_gb_per_s", "matmul_share"),
    "inner": _LINK,
    "outer": _LINK,
    "link": _LINK,
    "levels": ("groups", "link", "links"),
    "others": ("servers", "device"),
}


def draw_table(random: Random, keys: tuple[str, ...]) -> dict[str, Any]:
    """A table of a cluster file: some of its keys, some of them misspelled, some with a value of
    another's form."""
    table = {}
    for key in keys:
        if random.random() < 0.15:
            continue
        misspelled = random.choice(
            (key[:-1], key + "s", key.upper(), key.replace("_", ""), "colour")
        )
        table[misspelled if random.random() < 0.08 else key] = draw_entry(random, key)
    return table


def draw_entry(random: Random, key: str) -> Any:
    """A value of a key of a cluster file."""
    if random.random() < 0.1:
        return random.choice((True, "text", [], {}, [3], *_NUMBERS))
    if key in ("levels", "others"):
        return [draw_table(random, _TABLES[key]) for _ in range(random.choice((0, 1, 2)))]
    if key in _TABLES and random.random() < 0.5:
        return draw_table(random, _TABLES[key])
    if key in _TABLES:
        name = random.choice([*DEVICES] if key == "device" else [*LINKS])
        return random.choice((name, name[:-2], name.upper(), "wire"))
    return (
        "mine"
        if key == "name"
        else random.choice((True, False))
        if key == "half_duplex"
        else (random.choice(_NUMBERS) if random.random() < 0.3 else random.choice((1, 2, 8)))
    )


def as_toml(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def cluster_refusals(path: Path, document: dict[str, Any]) -> list[Problem]:
    path.write_text(
        "\n".join(f"{key} = {as_toml(value)}" for key, value in document.items()), encoding="utf-8"
    )
    try:
        read_cluster(path)
    except ConfigError as error:
        return [*error.problems]
    return []


def with_suggestion(document: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The document of a cluster file with the suggestion: another value, or another name of an
    unknown key, or none."""
    changed: Any = deepcopy(document)
    file, _, field = problem.field.partition(": ")
    assert file == "cluster.toml", "each problem names its file"
    *parents, key = [int(word) if word.isdigit() else word for word in re.findall(r"\w+", field)]
    table = changed
    for parent in parents:
        table = table[parent]
    if not problem.rule.startswith("unknown key"):
        table[key] = value_of(problem.suggestion)
    elif (value := table.pop(key)) is not None and problem.suggestion != "without it":
        table[problem.suggestion] = value
    return changed


def test_suggestions_for_a_cluster_help(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for seed in range(20_000 if request.config.getoption("--thorough") else 80):
        document = draw_table(Random(seed), _CLUSTER)
        for _ in range(60):  # refusals, of one value after another
            if not (found := cluster_refusals(path, document)):
                break
            for problem in found:
                assert problem.suggestion, f"seed {seed}: {problem}"
            changed = with_suggestion(document, found[0])
            same = [
                other
                for other in cluster_refusals(path, changed)
                if (other.field, other.rule) == (found[0].field, found[0].rule)
            ]
            assert not same, f"seed {seed}: {same} after {found[0]}"
            document = changed
        else:
            raise AssertionError(
                f"seed {seed}: suggestions lead to no cluster that is accepted: {found}"
            )


@pytest.mark.parametrize(
    ("key", "works"),
    [
        ("outer_link", "outer_links"),
        ("servrs", "servers"),
        ("straggler", "stragglers"),
        ("level", "levels"),
        ("device_per_server", "devices_per_server"),
        ("Price", "price"),
        ("colour", "without it"),
    ],
)
def test_an_unknown_key_of_a_cluster_is_told_the_nearest(
    key: str, works: str, tmp_path: Path
) -> None:
    (found, *_) = cluster_refusals(tmp_path / "cluster.toml", {key: 1})
    assert found.field == f"cluster.toml: {key}"
    assert found.suggestion == works


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("[train]\nnum_steps = 3\n", encoding="utf-8")
    return path


def said_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command line that is refused; empty if it is not."""
    try:
        parse(args)
    except SystemExit:
        return capsys.readouterr().err
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("command", [Plan, Check, Simulate])
def test_a_misspelled_flag_is_told_one_that_is_known(
    command: type[Any], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(1)
    name = command.__name__.lower()
    known = flags_of(command, Config())
    for flag in sorted(flag for flag in known if len(flag) > 3):
        cut = random.randrange(1, len(flag))
        wrong = flag[:cut] + flag[cut + 1 :]
        if wrong in known:
            continue
        said = said_of([name, str(config_file), f"--{wrong}", "1"], capsys)
        near = re.findall(r"--([\w.]+)", said.partition("did you mean")[2])
        assert near, said
        assert {*near} <= known, said


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("command", [Plan, Check, Simulate])
@pytest.mark.parametrize(
    "words", [["-1"], ["0"], ["1.5"], ["many"], ["nan"], ["inf"], ["99999999999"], []]
)
def test_suggestions_for_numbers_of_flags_help(
    command: type[Any], words: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hints = typing.get_type_hints(command)
    start = [command.__name__.lower(), str(config_file)]
    for flag in own_flags(command):
        if hints.get(flag) not in (int, float, tuple[int, ...]):
            continue
        if said := said_of([*start, f"--{flag}", *words], capsys):
            tried = said.rpartition("try ")[2].split()
            works = tried[1:] if tried[:1] == [f"--{flag}"] else tried
            assert works, said
            assert not said_of([*start, f"--{flag}", *works], capsys), said


@pytest.mark.parametrize("text", ["tp2", "tp=0", "x=1", "tp=2,tp=2", "", "tp=2;pp=2"])
def test_the_suggestion_for_a_grid_helps(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_grid(text)
    assert parse_grid(caught.value.problems[0].suggestion)


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("h100", "h100-80gb"),
        ("H200", "h200-141gb"),
        ("v100", "v100-16gb"),
        ("a100_80gb", "a100-80gb"),
        ("a100-40", "a100-40gb"),
        ("tpu", "a100-80gb"),
    ],
)
def test_a_device_is_told_the_nearest_name(name: str, works: str) -> None:
    with pytest.raises(ConfigError, match=f"try {works}$"):
        find_device(name)


@pytest.mark.parametrize(
    ("field", "name", "works"),
    [
        ("outer", "ib400", "infiniband-ndr"),
        ("outer", "infiniband-100", "infiniband-edr"),
        ("outer", "eth25", "ethernet-25"),
        ("outer", "100gbe", "ethernet-100"),
        ("inner", "nvlink-4", "nvlink4"),
        ("inner", "PCIe5", "pcie5"),
        ("outer", "wire", "ethernet-25"),
        ("inner", "wire", "nvlink3"),
    ],
)
def test_a_link_is_told_the_nearest_name(field: str, name: str, works: str) -> None:
    with pytest.raises(ConfigError, match=f"try {works}$"):
        find_link(name, field)
