"""pipeline.schedule = "auto": the fastest order that fits, the same on all ranks, kept by the run;
equal training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from train.runs import TOML, run_job, write_corpus

from hybridpar.config import Config, PipelineConfig, from_mapping, load_toml
from hybridpar.config.rules import conflicts
from hybridpar.errors import HybridparError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import Footprints, predict
from hybridpar.prediction.predict import kept_by_stage
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.autotuning.auto_schedule import (
    choose,
    filled,
    of_first_rank,
    shapes,
    simulated,
)
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.faults.errors import SetupError
from hybridpar.verify.run import verify

CPU = torch.device("cpu")


def make(pp: int, m: int, num_layers: int = 4, **pipeline: Any) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": num_layers,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 40,
            },
            "parallel": {"pp": pp, "dp": 1},
            "train": {"micro_batch_size": 4, "device": "cpu"},
            "pipeline": {"num_microbatches": m, "schedule": "auto", **pipeline},
        }
    )


def costs_for(config: Config) -> Costs:
    """A stage of each rank takes 1, 1.2 and 0.8."""
    v = JobPlan(config).shape.virtual_stages
    return Costs(1 / v, 2 / v, backward_input=1.2 / v)


def test_the_simplest_of_the_fastest_that_fit() -> None:
    """Within 1 % of the shortest step of all that fit, and the first of these; 1f1b where none
    fits."""
    config, trace = make(2, 4, num_layers=2), Footprints()
    found = [
        one
        for shape in shapes(config)
        for one in simulated(shape, costs_for(shape[0]), (1,) * JobPlan(shape[0]).shape.num_stages)
    ]
    assert {
        (one.pipeline.schedule, one.pipeline.stage_layout, one.pipeline.num_virtual_stages)
        for one in found
    } >= {
        ("1f1b", "loop", 1),
        ("own", "loop", 1),
        ("1f1b", "v", 2),
        ("own", "v", 2),
        ("interleaved", "loop", 2),
        ("own", "loop", 2),
    }
    peaks = [
        max(
            stage.total
            for stage in predict(
                JobPlan(replace(config, pipeline=one.pipeline)), device=CPU, trace=trace
            )
        )
        for one in found
    ]
    assert (found[0].pipeline.schedule, found[0].step_time) == ("1f1b", pytest.approx(15))
    chosen = []
    for limit in (2 * max(peaks), peaks[0], 1):
        fitting = [one for one, peak in zip(found, peaks, strict=True) if peak <= limit] or found[
            :1
        ]
        longest = 1.01 * min(one.step_time for one in fitting)
        chosen.append(choose(config, found, limit, CPU, trace))
        assert chosen[-1] == next(one for one in fitting if one.step_time <= longest)
    assert chosen[0].step_time < chosen[1].step_time
    assert chosen[2] == found[0]


def test_a_filled_order_keeps_no_more_bytes_than_the_fullest_rank() -> None:
    """Equally many micro-batches on each stage would make the last keep twice as much, as each of
    its own takes twice."""
    config = make(3, 8, split_backward=True, schedule="1f1b")
    job = JobPlan(config)
    costs = Costs(1, 2, backward_input=1)
    kept = (1.0, 1.0, 2.0)

    def most(unit: tuple[float, ...]) -> float:
        made = JobPlan(replace(config, pipeline=filled(job, costs, unit))).schedule
        return max(made.max_live_activations(job.shape, rank) * kept[rank] for rank in range(3))

    assert (most(kept), most((1.0,) * 3)) == (3.0, 6.0)
    first, _, last = kept_by_stage(job, CPU, Footprints())
    assert last > first > 0, "the head keeps logits"


def settled(config: Config) -> PipelineConfig:
    grid = ProcessGrid(pp=config.parallel.pp, dp=config.parallel.dp)
    return autotune(config, grid, CPU, lambda line: None).pipeline


@pytest.mark.thorough
@pytest.mark.ranks
def test_all_ranks_find_the_same() -> None:
    first, *others = run_ranks(
        settled, 4, from_mapping({"parallel": {"dp": 2}}, make(2, 3, num_layers=2))
    )
    assert first.schedule != "auto"
    assert others == [first] * 3


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_run_keeps_what_it_has_found(tmp_path: Path) -> None:
    """A resumed run tries nothing again, and its own configuration names a schedule."""
    path = tmp_path / "auto.toml"
    path.write_text(
        TOML.format(schedule="auto", corpus=write_corpus(tmp_path / "corpus.txt"), runs=tmp_path)
    )
    grid = ("--parallel.pp", "2")
    assert "the fastest here" in run_job(2, "train", path, *grid, "--train.num_steps", "3")
    kept = load_toml(tmp_path / "run" / "config.toml").pipeline
    assert kept.schedule in ("1f1b", "interleaved", "own")
    assert "the fastest here" not in run_job(2, "train", path, *grid)
    assert load_toml(tmp_path / "run" / "config.toml").pipeline == kept


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "1f1b", "stage_layout": "v", "activations": "half"},
        {"schedule": "interleaved", "virtual_stages": 3, "zero_bubble": True},
    ],
    ids=str,
)
def test_orders_that_are_filled_train_the_same(pipeline: dict[str, Any]) -> None:
    """Loss, gradients and weights are those of one process, to 1e-9 in float64."""
    config = make(2, 5, split_backward=True, **pipeline)
    job = JobPlan(config)
    found = filled(
        job,
        Costs(
            [1.0, 1.4, 0.7] * 2 if "virtual_stages" in pipeline else [1.0, 1.3, 0.8, 1.9],
            2.0,
            latency=0.3,
        ),
        (1,) * job.shape.num_stages,
    )
    config = replace(config, pipeline=found)
    JobPlan(config).prove()
    report = verify(config, {"pp": 2}, 3)
    assert report.ok, report.first_divergence


def refused(wrong: type[Exception]) -> str:
    def fail() -> None:
        raise wrong("no schedule")

    with pytest.raises(SetupError) as caught:
        of_first_rank(fail, ProcessGrid(pp=2).world)
    return str(caught.value)


@pytest.mark.ranks
def test_all_ranks_end_with_what_the_first_one_says() -> None:
    assert run_ranks(refused, 2, HybridparError) == ["no schedule"] * 2
    first, other = run_ranks(refused, 2, ValueError)
    assert first == other
    assert "ValueError: no schedule" in first


def test_a_single_stage_has_nothing_to_choose() -> None:
    assert settled(make(1, 4)) == replace(make(1, 4).pipeline, schedule="1f1b")


def test_found_settings_are_not_given() -> None:
    wrong = conflicts(make(2, 4, virtual_stages=2, zero_bubble=True))
    assert {problem.field for problem in wrong} == {
        "pipeline.virtual_stages",
        "pipeline.zero_bubble",
    }
    assert not [*conflicts(make(2, 4, num_microbatches=7, recompute="all"))]
