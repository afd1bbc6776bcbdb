"""Faults as text: what can be said, what is wrong with what cannot, and that each happens once."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridpar.config import Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.flight import NO_FLIGHT
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.train.faults.inject import Fault, Injector, _is_over_link, parse_fault, parse_faults

CONFIG = from_mapping(
    {
        "parallel": {"pp": 2, "dp": 2, "tp": 1},
        "pipeline": {"num_microbatches": 3},
        "train": {"num_steps": 50},
    },
    Config(),
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill rank 3 at step 20", ("kill", 3, 20)),
        ("lose stage 1 at step 1", ("lose", 2, 1)),
        ("hang rank 0 at step 7 micro-batch 0", ("hang", 0, 7, 0)),
        ("slow link 0-2 at step 5 for 1.5 s", ("slow link", 0, 5, -1, 2, 1.5)),
        ("cut link 3-0 at step 5", ("cut link", 3, 5, -1, 0)),
        ("corrupt shard at step 10", ("corrupt shard", 0, 10)),
        ("disk  full rank 2  at step 50", ("disk full", 2, 50)),
        ("hang save rank 2 at step 5", ("hang save", 2, 5)),
        ("hang rank 1 at step 0", ("hang", 1, 0)),
        ("nan gradient rank 2 at step 4 micro-batch 2", ("nan gradient", 2, 4, 2)),
        ("outage stage 1 at step 4 for 1.5 s", ("outage", 2, 4, -1, -1, 1.5)),
    ],
)
def test_valid_faults(text: str, fault: tuple[object, ...]) -> None:
    found = parse_fault(text, CONFIG)
    assert (found.kind, found.rank, found.step, found.microbatch, found.peer, found.seconds)[
        : len(fault)
    ] == fault
    assert found.seconds == (1.5 if "1.5 s" in text else math.inf)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kill rank 3", "must be one of"),
        ("slow link 0-1 at step 3", "must be one of"),
        ("outage rank 1 at step 3", "must be one of"),
        ("kill rank 4 at step 3", "the job has 4 ranks"),
        ("hang stage 2 at step 3", "the pipeline has 2 stages, 0 to 1"),
        ("cut link 0-4 at step 3", "the job has 4 ranks"),
        ("cut link 1-1 at step 3", "between two ranks"),
        ("kill rank 0 at step 51", "0 to train.num_steps = 50"),
        ("kill rank 0 at step 0 micro-batch 1", "1 to train.num_steps = 50"),
        ("nan gradient rank 0 at step 0", "1 to train.num_steps = 50"),
        ("hang save rank 1 at step 3", "writes no checkpoint file"),
        ("kill rank 0 at step 2 micro-batch 3", "0 to 2"),
        ("corrupt shard rank 1 at step 3", "writes no checkpoint file"),
    ],
)
def test_invalid_faults_are_explained(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_fault(text, CONFIG)


def test_on_a_ring_a_rank_holds_several_stages_and_the_last_one_sends_to_the_first() -> None:
    ring = from_mapping({"pipeline": {"schedule": "interleaved", "virtual_stages": 2}}, CONFIG)
    assert parse_fault("hang stage 3 at step 7", ring).rank == 2
    with pytest.raises(ConfigError, match="the pipeline has 4 stages, 0 to 3"):
        parse_fault("hang stage 4 at step 7", ring)


@pytest.mark.parametrize(
    ("sizes", "peer", "sends"),
    [
        (PipelineShape(3, 4, 2), 0, ["SEND_F2"]),
        (PipelineShape(3, 4, 2), 1, ["SEND_B2", "SEND_B5"]),
        (PipelineShape(3, 4), 1, ["SEND_B2"]),
        (PipelineShape(3, 4), 0, ["NORM2", "UPDATE2"]),
        (PipelineShape(3, 4, 2, "v"), 1, ["SEND_B2", "SEND_F3"]),
    ],
    ids=str,
)
def test_messages_of_the_last_of_three_ranks(
    sizes: PipelineShape, peer: int, sends: list[str]
) -> None:
    """Actions by kind and stage; all meet in NORM and UPDATE."""
    axis = SimpleNamespace(rank=2, ranks=(0, 1, 2))
    actions = [Action(kind, stage, 0) for stage in sizes.stages_of(2) for kind in Kind]
    assert [
        f"{action.kind.value}{action.stage}"
        for action in actions
        if _is_over_link(action, axis, sizes, peer)
    ] == sends


def test_all_that_is_wrong_is_said_at_once() -> None:
    twice = "kill rank 0 at step 2"
    with pytest.raises(ConfigError) as error:
        parse_faults([twice, "kill rank 9 at step 2", twice, "explode"], CONFIG)
    assert [problem.value for problem in error.value.problems] == [
        twice,
        "kill rank 9 at step 2",
        "explode",
    ]


def test_a_fault_that_has_happened_is_no_more(tmp_path: Path) -> None:
    faults = [
        Fault("kill rank 0 at step 2", "kill", 0, 2),
        Fault("hang rank 0 at step 3", "hang", 0, 3),
    ]
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / faults[0].name).touch()
    assert Injector(faults, tmp_path, 0, NO_FLIGHT).pending == faults[1:]
    assert Injector(faults, tmp_path, 1, NO_FLIGHT).pending == []


def test_a_lost_rank_does_not_start_again(tmp_path: Path) -> None:
    lost = Fault("lose rank 0 at step 2", "lose", 0, 2)
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / lost.name).touch()
    if (pid := os.fork()) == 0:
        Injector([lost], tmp_path, 0, NO_FLIGHT)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
