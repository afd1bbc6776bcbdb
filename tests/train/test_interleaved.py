"""Several chunks of the model on each rank: the same numbers as any other schedule, wherever a run
goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import gpt
from ranks import run_ranks
from torch import Tensor
from train.runs import run_job, write_config
from train.stretches import run, state

from hybridpar import checkpoint
from hybridpar.checkpoint.format.manifest import read_manifest
from hybridpar.config import Config, from_mapping, load_toml
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.train.engine import StepResult
from hybridpar.train.forecasts.preview import costs_of_run, preview
from hybridpar.train.inference.generate import Generator, Sampling
from hybridpar.train.reporting.costs_file import read_costs
from hybridpar.validate import problems
from hybridpar.verify.run import verify

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}
BERT = {"kind": "bert", "vocab_size": 67, "sentence_head": "nsp"}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved"}


def make(
    grid: dict[str, int], pipeline: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """5 layers of odd sizes, that is 7 blocks."""
    own = {
        "parallel": {"dp": 1, **grid},
        "pipeline": {"num_microbatches": 4, **INTERLEAVED, **(pipeline or {})},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((5, 24, 3, 10, 61), own, sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "pipeline", "model"),
    [
        (
            {"pp": 3},
            {"num_microbatches": 4, "split": [1, 1, 2, 1, 1, 1]},
            {"tie_embeddings": False},
        ),
        ({"pp": 3}, {"num_microbatches": 2}, BERT | DROPOUT),
        (
            {"pp": 2},
            {
                "virtual_stages": 3,
                "split": [2, 1, 1, 1, 1, 1],
                "recompute": "stage:1,4",
                "num_microbatches": 3,
            },
            DROPOUT,
        ),
        ({"tp": 2, "pp": 2}, {"recompute": "0,2-3"}, BERT | {"tie_embeddings": False}),
        ({"pp": 2, "dp": 2}, {"num_microbatches": 5}, DROPOUT),
        (
            {"pp": 2, "dp": 2, "zero": 1},
            {"schedule": "2bw", "virtual_stages": 3, "num_microbatches": 3, "sync_steps": 1},
            DROPOUT,
        ),
        (
            {"pp": 3},
            {"schedule": "2bw", "virtual_stages": 2, "warmup": "latency", "split_backward": True},
            BERT,
        ),
    ],
    ids=str,
)
def test_against_the_oracle(
    grid: dict[str, int], pipeline: dict[str, Any], model: dict[str, Any]
) -> None:
    """Loss, norm, gradients and weights in float64, as in tests/verify/test_grids.py."""
    steps = (
        4 if pipeline.get("schedule") == "2bw" else 3
    )  # whose third is the first on older weights but the start's
    config = make(grid, pipeline, model=model)
    report = verify(config, {axis: size for axis, size in grid.items() if axis != "zero"}, steps)
    assert report.ok, report.first_divergence
    assert set(report.worst) == {"init", "loss", "grad_norm", "gradient", "weight"}


def losses(
    results: list[tuple[list[StepResult], dict[str, Tensor], dict[str, float]]],
) -> list[float]:
    return [step.loss for step in results[0][0]]


@pytest.mark.thorough
@pytest.mark.ranks
def test_equal_to_1f1b_to_the_bit_however_often_they_change(tmp_path: Path) -> None:
    """Nothing is added in another order but the norm, which clips nothing here: 2 steps of each, on
    other grids too."""
    stretches: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, {}),
        (2, {"schedule": "1f1b"}),
        (3, {}),
        (2, {"virtual_stages": 3}),
    )
    sections: dict[str, Any] = {"model": DROPOUT, "optim": {"clip_grad": 0.0}}
    last = 2 * len(stretches)
    whole = run_ranks(
        run, 2, make({"pp": 2}, {"schedule": "1f1b"}, **sections), tmp_path / "whole", last
    )
    changing: list[float] = []
    for i, (pp, pipeline) in enumerate(stretches, 1):
        results = run_ranks(
            run, pp, make({"pp": pp}, pipeline, **sections), tmp_path / "changing", 2 * i
        )
        changing += losses(results)
    assert changing == losses(whole)
    expected = state(whole)
    found = state(results)
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert results[0][2] == whole[0][2], "evaluations"


@pytest.mark.ranks
def test_a_checkpoint_says_which_blocks_are_where(tmp_path: Path) -> None:
    """A rank's file has several runs of blocks; together they are the model."""
    config = make({"pp": 2}, {"split": [2, 1, 1, 3]})
    _, first, _ = run_ranks(run, 2, config, tmp_path, 1)[0]
    manifest = read_manifest(tmp_path / "step_00000001")
    assert [shard.blocks for shard in manifest.shards] == [(0, 2, 3, 4), (2, 3, 4, 7)]
    _, weights = checkpoint.load_full(tmp_path / "step_00000001")
    assert {name.split(".")[1] for name in weights} >= set("012345")
    name = "weights/1/blocks.3.mlp.up.weight"
    assert torch.equal(weights[name.removeprefix("weights/1/")], first[name])


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_job_leaves_what_any_job_leaves(tmp_path: Path) -> None:
    """Evaluations, checkpoints, costs of each stage, pictures by rank; text comes out of it on one
    process."""
    path = write_config(tmp_path, "interleaved")
    config = ("--parallel.pp", "2", "--pipeline.num_microbatches", "3")
    run_job(
        2,
        "train",
        path,
        *config,
        "--train.num_steps",
        "18",
        "--train.eval_interval",
        "9",
        "--train.save_interval",
        "9",
    )
    folder = tmp_path / "runs" / "run"
    costs = read_costs(folder / "costs.json")
    assert (costs.shape, costs.schedule_options.schedule) == (PipelineShape(2, 3, 2), "interleaved")
    assert [
        len(of_stages)
        for of_stages in (costs.measured.costs.forward, costs.measured.costs.backward)
    ] == [4, 4]
    assert len(costs.measured.costs.latency) == 2, "one to the next rank, one back"
    assert ">rank 1</text>" in (folder / "executed.svg").read_text()
    assert ">rank 1</text>" in (folder / "plan.svg").read_text()
    now = from_mapping(
        {"parallel": {"pp": 2}, "pipeline": {"num_microbatches": 9}},
        load_toml(folder / "config.toml"),
    )
    assert costs_of_run(folder, now) == costs
    assert preview(
        JobPlan(now), 2, costs.measured.costs
    ).step_time > 1.5 * costs.timeline().step_time(3)
    with pytest.raises(
        ConfigError,
        match=r"measured with 2 stages per rank.*try 2, with pipeline.schedule = interleaved",
    ):
        costs_of_run(folder, from_mapping({"pipeline": {"schedule": "1f1b"}}, now))
    assert "".join(Generator.load(folder, print).generate("Stone", Sampling(8, seed=1)))


@pytest.mark.parametrize(
    ("grid", "pipeline", "field", "rule"),
    [
        ({}, {}, "parallel.pp", "at least 2 with 2 stages per rank"),
        (
            {"pp": 2},
            {"virtual_stages": 4},
            "pipeline.virtual_stages",
            "the model has only 7 blocks; try 3",
        ),
        ({"pp": 4}, {}, "pipeline.virtual_stages", "try pipeline.schedule = 1f1b"),
        (
            {"pp": 2},
            {"virtual_stages": 1},
            "pipeline.virtual_stages",
            "must be at least 2, or 0 for the default",
        ),
        (
            {"pp": 2},
            {"schedule": "1f1b", "virtual_stages": 2},
            "pipeline.virtual_stages",
            "only with interleaved",
        ),
        ({"pp": 2}, {"virtual_stages": -1}, "pipeline.virtual_stages", "must not be negative"),
        (
            {"pp": 2},
            {"split": [4, 3]},
            "pipeline.split",
            r"4 positive numbers (parallel.pp * pipeline.virtual_stages) that add up to 7",
        ),
        ({"pp": 2}, {"recompute": "stage:4"}, "pipeline.recompute", "stages from 0 to 3"),
        ({"pp": 2}, {"warmup": "latency"}, "pipeline.warmup", "not supported with"),
        ({"pp": 2}, {"sync_steps": 3}, "pipeline.sync_steps", "not supported with"),
    ],
    ids=str,
)
def test_orders_that_cannot_run_are_named(
    grid: dict[str, int], pipeline: dict[str, Any], field: str, rule: str
) -> None:
    config = make(grid, pipeline)
    parallel = config.parallel
    found = problems(config, parallel.tp * parallel.pp)
    assert [problem.field for problem in found] == [field]
    assert rule in str(ConfigError(*found))
