"""Objects between ranks: back as they were, and nothing runs when crafted bytes are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from hybridpar.comm import gather_objects
from hybridpar.comm.objects import from_bytes, to_bytes
from hybridpar.config import Config, PipelineConfig
from hybridpar.grid import ProcessGrid
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.simulate.costs import Costs

OBJECTS: list[Any] = [
    None,
    True,
    3,
    2**70,
    0.1,
    1e-320,
    math.inf,
    "text \u20ac \udc80 \n",
    b"\x00\xff",
    [],
    [1, [2]],
    (),
    (1, (2, "x")),
    {},
    {"a": 1, 2: (3,), (4, 5): None},
    {1, 2},
    Path("runs/x"),
    Kind.F,
    Action(Kind.B, 1, 2, 3),
    Costs((0.1,), (0.2,), 0.3, {Kind.NORM: 0.001}),
    PipelineConfig("2bw", 4),
    Config(),
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_comes_back_as_it_was(value: Any) -> None:
    back = from_bytes(to_bytes(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True)], ids=repr
)
def test_a_number_of_numpy_is_python_s(value: Any) -> None:
    back = from_bytes(to_bytes([value]))[0]
    assert back == value
    assert type(back) in (float, int, bool)


def test_a_number_that_is_none_comes_back() -> None:
    assert math.isnan(from_bytes(to_bytes(math.nan)))


@pytest.mark.parametrize(
    "value",
    [object(), torch.zeros(2), len, Exception("x"), type("Mine", (), {})()],
    ids=lambda value: type(value).__name__,
)
def test_objects_without_a_form_are_refused_by_their_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="comm/objects"):
        to_bytes(value)


@pytest.mark.parametrize(
    "content",
    [
        {"record": ["subprocess:Popen", {"args": ["true"]}]},
        {"record": ["hybridpar.comm.objects:sys", {}]},
        {"record": ["hybridpar.comm.objects:Path", {}]},
        {"record": ["hybridpar.cli:main", {}]},
        {"record": ["hybridpar.not_imported_yet:X", {}]},
        {"enum": ["hybridpar.config.sections.pipeline:PipelineConfig", 1]},
        {"record": ["hybridpar.config.sections.pipeline:PipelineConfig", {"no_such_field": 1}]},
        {"unknown": 1},
        {},
        {"tuple": 1},
        {"dict": [[1]]},
        {"a": 1, "b": 2},
        {"bytes": "?"},
    ],
    ids=str,
)
def test_crafted_bytes_run_nothing(content: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds
        from_bytes(json.dumps(content).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"{", b"[" * 100_000, b"\xff"], ids=lambda data: repr(data[:4])
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        from_bytes(data)


@pytest.mark.ranks
def test_ranks_have_the_objects_of_all_in_order() -> None:
    for found in run_ranks(gathered, 3):
        assert found == [("", 0, Kind.F), ("x", 1, Kind.F), ("xx", 2, Kind.F)]


def gathered() -> list[tuple[str, int, Kind]]:
    """Objects of lengths that differ."""
    grid = ProcessGrid(dp=3)
    before = grid.dp.traffic.calls["all_gather"]
    found = gather_objects(("x" * grid.dp.rank, grid.dp.rank, Kind.F), grid.dp)
    assert grid.dp.traffic.calls["all_gather"] == before + 1
    return found
