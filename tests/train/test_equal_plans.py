"""Ranks with other settings, data or plans are told, before their collectives miss or they learn
nonsense."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from train.runs import on_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.data import Data
from hybridpar.errors import HybridparError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.prediction.ghost import Tracker
from hybridpar.train.engine import Engine
from hybridpar.train.equal_plans import (
    plan_digest,
    require_equal_data,
    require_equal_plans,
    require_equal_settings,
)
from hybridpar.train.faults.errors import SetupError
from hybridpar.train.launching.launch import Job


def make(zero: int = 3, parts: int = 0, m: int = 3) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 3,
                "hidden_size": 24,
                "num_heads": 2,
                "seq_length": 7,
                "vocab_size": 61,
            },
            "parallel": {"dp": 2, "pp": 2, "zero": zero},
            "pipeline": {"num_microbatches": m},
            "memory": {"parts": parts},
            "train": {"micro_batch_size": 1},
        }
    )


def compare(changed: int, config: Config, other: Config) -> str:
    """The error of a job in which one rank has another configuration. Collectives: like the
    comparison."""
    grid = ProcessGrid(pp=2, dp=2)
    engine = Engine(JobPlan(other if grid.rank == changed else config), grid, torch.device("cpu"))
    try:
        require_equal_plans(engine)
    except SetupError as error:
        return str(error)
    return ""


def test_settings_that_differ_are_named_but_for_those_that_are_a_machines_own() -> None:
    theirs = {"optim": {"lr": 1.0}, "pipeline": {"num_microbatches": 4}}
    own = {
        "data": {"cache": "x"},
        "run": {"dir": "y"},
        "train": {"threads": 3},
        "faults": {"restarts": 1},
    }

    def compared(*changes: dict[str, dict[str, object]]) -> list[object]:
        configs = [from_mapping(change, make()) for change in changes]

        def compare(job: Job) -> None:
            try:
                require_equal_settings(configs[job.launch.rank], job)
            except HybridparError:
                assert job.launch.rank or job.store.check(["parted/1", "parted/2"]), (
                    "the store goes with rank 0"
                )
                raise

        return list(map(str, on_ranks(3, compare)))

    assert compared({}, own, {}) == 3 * ["None"]
    assert compared({}, {}, theirs) == 3 * [
        "rank 2: pipeline.num_microbatches is 4 here and 3 on rank 0, optim.lr is 1.0 here and "
        "0.0003 on rank 0; all ranks must run the same version with the same file and flags"
    ]


def test_other_data_are_told() -> None:
    """A stage would have the tokens of one text, and another one the labels of another."""

    def compare(job: Job) -> None:
        fingerprint = "b" if job.launch.rank == 1 else "a"
        require_equal_data(Data(SimpleNamespace(fingerprint=fingerprint), {}, (), None), job)  # type: ignore[arg-type]

    found = set(map(str, on_ranks(3, compare)))
    assert len(found) == 1
    assert found.pop().startswith(
        "rank 1: the samples of train do not match rank 0's (fingerprint b, on rank 0 a)"
    )


@pytest.mark.ranks
def test_all_ranks_are_told_which_replicas_differ() -> None:
    assert run_ranks(compare, 4, -1, make(), make()) == [""] * 4
    said = run_ranks(compare, 4, 3, make(), make(parts=1))
    assert len(set(said)) == 1
    assert "ranks 2 and 3 are replicas of each other but have different plans" in said[0]


def test_a_digest_is_of_the_plan_and_its_moves() -> None:
    def digest(config: Config, rank: int = 0) -> str:
        with Tracker(torch.device("cpu")) as tracker:
            return plan_digest(Engine(JobPlan(config), silent_grid(config, rank), tracker.device))

    plain = make(zero=1)
    assert (
        digest(plain) == digest(plain, rank=1) != digest(plain, rank=2)
    )  # a replica, and another stage
    assert digest(replace(plain, pipeline=replace(plain.pipeline, num_microbatches=4))) != digest(
        plain
    )
