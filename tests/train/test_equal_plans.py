"""Replicas with different plans are told before their collectives miss each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.memory.ghost import Tracker
from hybridpar.memory.silent import silent_grid
from hybridpar.train.engine import Engine
from hybridpar.train.equal_plans import plan_digest, require_equal_plans
from hybridpar.train.errors import SetupError


def make(zero: int = 3, parts: int = 0, m: int = 3) -> Config:
    return from_mapping({
        "model": {"num_layers": 3, "hidden_size": 24, "num_heads": 2, "seq_length": 7, "vocab_size": 61},
        "parallel": {"dp": 2, "pp": 2, "zero": zero}, "pipeline": {"num_microbatches": m},
        "memory": {"parts": parts}, "train": {"micro_batch_size": 1}})


def compare(changed: int, config: Config, other: Config) -> str:
    """What a job says in which one rank has another configuration. Collectives: those of the comparison."""
    grid = ProcessGrid(pp=2, dp=2)
    engine = Engine(other if grid.rank == changed else config, grid, torch.device("cpu"))
    try:
        require_equal_plans(engine)
    except SetupError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_all_ranks_are_told_which_replicas_differ_and_in_what() -> None:
    assert run_ranks(compare, 4, -1, make(), make()) == [""] * 4
    said = run_ranks(compare, 4, 3, make(), make(parts=1))
    assert len(set(said)) == 1
    assert "ranks 2 and 3 are replicas of each other and have different plans" in said[0]
    assert "memory.parts is 0 on rank 2 and 1 on rank 3" in said[0]


def test_a_digest_is_of_the_plan_and_its_moves() -> None:
    def digest(config: Config, rank: int = 0) -> str:
        with Tracker(torch.device("cpu")) as tracker:
            return plan_digest(Engine(config, silent_grid(config, rank), tracker.device))

    plain = make(zero=1)
    assert digest(plain) == digest(plain, rank=1) != digest(plain, rank=2)  # a replica, and another stage
    assert digest(replace(plain, pipeline=replace(plain.pipeline, num_microbatches=4))) != digest(plain)
