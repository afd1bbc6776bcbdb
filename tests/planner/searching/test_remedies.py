"""Remedies make a configuration fit at the time that is said; the largest model is the largest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planner import made
from planner.costs.test_transfer_costs import LARGE, machine, peak
from train.runs import write_config

from hybridpar.cli import main
from hybridpar.config import Config, from_mapping, load_toml
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.measuring.profile import StateSpeeds
from hybridpar.planner.measuring.profile_file import write_profile
from hybridpar.planner.searching.remedies import UNCHANGED, Fitting, last_values
from hybridpar.prediction.knobs import Knob

CPU = torch.device("cpu")


@pytest.mark.thorough
def test_each_remedy_fits_and_says_what_it_costs() -> None:
    base = made.config(dp=2, m=4, b=2, **LARGE)
    on = machine(base, update=0.5)
    limit = 0.93 * peak(base)
    fitting = Fitting(limit, CPU, on)
    found = {remedy.settings: remedy for remedy in fitting.remedies(base)}
    assert all(remedy.peak <= limit for remedy in found.values())
    zero = replace(base, parallel=replace(base.parallel, zero=1))
    remedy = found["parallel.zero = 1"]
    assert remedy.peak == peak(zero)
    assert remedy.step_time == StepCost(zero, on).step_time
    assert remedy.slower == pytest.approx(
        StepCost(zero, on).step_time / StepCost(base, on).step_time
    )
    assert any(settings.startswith("memory.limit = ") for settings in found)
    assert f"{remedy.slower - 1:+.0%}" in str(remedy)
    slowest = [remedy.slower for remedy in fitting.remedies(base) if remedy.slower is not None]
    assert slowest == sorted(slowest)


@pytest.mark.thorough
def test_blocks_missing_in_the_profile_have_no_time() -> None:
    base = made.config(m=4, b=2, **{**LARGE, "seq_length": 256})
    found = {r.settings: r for r in Fitting(0.97 * peak(base), CPU, machine(base)).remedies(base)}
    assert found['train.dtype = "bf16"'].slower is None  # the profile is of fp32
    assert "time" not in str(found['train.dtype = "bf16"'])
    without = replace(machine(base), profile=replace(machine(base).profile, state=StateSpeeds()))
    budget = next(
        r
        for r in Fitting(0.97 * peak(base), CPU, without).remedies(base)
        if "memory.limit" in r.settings
    )
    assert budget.slower is None


@pytest.mark.thorough
def test_several_together_where_one_is_not_enough() -> None:
    base = made.config(dp=2, m=4, b=4, **{**LARGE, "seq_length": 64})
    alone = min(
        peak(replace(base, parallel=replace(base.parallel, zero=3))),
        peak(replace(base, pipeline=replace(base.pipeline, recompute="all"))),
    )
    (found,) = Fitting(0.45 * alone, CPU).remedies(base)
    assert " with " in found.settings
    assert found.peak <= 0.45 * alone


def test_a_combination_names_each_setting_once() -> None:
    twice = [
        {"parallel": {"pp": 2, "dp": 4}, "pipeline": {"num_microbatches": 16}},
        {"train": {"micro_batch_size": 2}, "pipeline": {"num_microbatches": 32}},
        {"parallel": {"pp": 4, "dp": 2}, "pipeline": {"num_microbatches": 64}},
    ]
    assert " with ".join(map(str, last_values(twice))) == (
        "train.micro_batch_size = 2 with parallel.pp = 4, parallel.dp = 2, "
        "pipeline.num_microbatches = 64"
    )


class Deeper(Fitting):
    """A search in which nothing but a deeper pipeline saves memory."""

    def peak(self, config: Config) -> int:
        return 1000 // config.parallel.pp

    def _changes(self, config: Config) -> Iterator[tuple[Knob, Config]]:
        parallel = {"pp": 2 * config.parallel.pp, "dp": config.parallel.dp // 2}
        knob = Knob({"parallel": parallel}, 0)
        yield knob, from_mapping(knob.changes, config)


def test_deeper_pipelines_do_not_contradict_each_other() -> None:
    (remedy,) = Deeper(260.0, CPU).remedies(made.config(dp=8))
    assert remedy.settings == "parallel.pp = 4, parallel.dp = 2"
    assert remedy.peak == 250


@pytest.mark.thorough
def test_the_largest_model_fits_and_one_layer_more_does_not() -> None:
    base = made.config(dp=2, m=4, b=2, zero=2, **{**LARGE, "seq_length": 48})

    def sized(config: Config, number: int) -> Config:
        return replace(config, model=replace(config.model, num_layers=number))

    zero = replace(base, parallel=replace(base.parallel, zero=3))
    limit = 1.01 * peak(sized(zero, 5))
    largest = dict(Fitting(limit, CPU).largest(base))
    assert largest[UNCHANGED] == 4
    for config, number in ((base, largest[UNCHANGED]), (zero, largest["parallel.zero = 3"])):
        assert peak(sized(config, number)) <= limit < peak(sized(config, number + 1))
    assert (
        largest["memory.limit, as much as there is"]
        > largest["parallel.zero = 3"]
        > largest[UNCHANGED]
    )
    assert set(dict(Fitting(1000.0, CPU).largest(base)).values()) == {0}


@pytest.mark.thorough
def test_check_and_plan_say_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    profile = tmp_path / "profile.json"
    config = load_toml(path)
    b = config.train.micro_batch_size
    room = peak(replace(config, parallel=replace(config.parallel, dp=1)))
    measured = replace(
        made.profile(config, sizes=(b,), degrees=(1,), cores=2),
        state=StateSpeeds(1e7, 1e9, 1e9, 1e9),
    )
    write_profile(measured, profile)
    flags = ["--ranks", "1", "--profile", str(profile), "--memory_gb", str(0.9 * room / 1e9)]
    assert main(["check", str(path), *flags[:4], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["step_ms"] > found["exposed_moves_ms"] == 0
    assert main(["check", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert (
        f"needs {room / 1e9:.3g} GB, and there are {0.9 * room / 1e9:.3g}: what would make it fit"
        in out
    )
    assert "and a step takes" in out
    hosted = ["--memory.host_optimizer", "True", "--pipeline.schedule", "2bw"]
    assert main(["check", str(path), *flags[:4], *hosted]) == 0
    assert "the optimizer on the host" in capsys.readouterr().out.rpartition("predicted: ")[2]
    tiny = replace(
        measured, hardware=replace(measured.hardware, devices_per_host=1, memory=0.05 * room)
    )
    write_profile(tiny, profile)
    assert (
        main(
            [
                "plan",
                str(path),
                "--profile",
                str(profile),
                "--ranks",
                "1",
                "--output",
                str(tmp_path / "plan.toml"),
            ]
        )
        == 1
    )
    assert "fit" in capsys.readouterr().err.partition("nothing fits")[2]
