"""Settings that have no meaning under the chosen schedule are named in a line and left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hybridpar
from hybridpar.cli.entry import parse
from hybridpar.config import Config, from_mapping, without_unused
from hybridpar.validate import problems

GPT_TINY = Path(__file__).parent.parent / "scripts" / "configs" / "gpt_tiny.toml"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "naive", "interleaved", "pipedream", "auto"])
def test_the_configuration_of_2bw_runs_with_every_schedule(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "check",
        str(GPT_TINY),
        "--ranks",
        "2",
        "--parallel.pp",
        "2",
        "--pipeline.schedule",
        schedule,
    ]
    config = parse(words).config
    assert not problems(config, 2)
    assert config.optim.staleness == "none"
    assert config.pipeline.early_switch == "off"
    assert capsys.readouterr().err.splitlines() == [
        f'hybridpar: pipeline.early_switch = 1 is left out: pipeline.schedule = "{schedule}" '
        f'does not use it; "2bw" does',
        'hybridpar: optim.staleness = "extrapolation" is left out: pipeline.schedule = '
        f'"{schedule}" does not use it; "2bw" does',
    ]


def test_one_process_of_a_job_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["train", str(GPT_TINY), "--pipeline.schedule", "1f1b"], speaks=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("sections", "left_out"),
    [
        (
            {
                "pipeline": {"schedule": "2bw", "early_switch": 1},
                "optim": {"staleness": "prediction"},
            },
            [],
        ),
        ({"pipeline": {"schedule": "1f1b"}, "optim": {"staleness": "nesterov"}}, []),
        (
            {
                "pipeline": {"schedule": "pipedream", "sync_steps": 3},
                "optim": {"staleness": "lr_rescale"},
            },
            [],
        ),
        (
            {
                "pipeline": {
                    "schedule": "gpipe",
                    "warmup": "latency",
                    "sync_steps": 3,
                    "zero_bubble": True,
                }
            },
            ["pipeline.warmup", "pipeline.zero_bubble", "pipeline.sync_steps"],
        ),
        ({"pipeline": {"schedule": "1f1b", "gradient_buffers": 2}}, ["pipeline.gradient_buffers"]),
        ({"optim": {"staleness": "lr_rescale", "staleness_steps": 5}}, ["optim.staleness"]),
        (
            {
                "pipeline": {
                    "stage_layout": "v",
                    "split_backward": True,
                    "zero_bubble": True,
                    "warmup": "latency",
                }
            },
            ["pipeline.warmup", "pipeline.zero_bubble"],
        ),
        (
            {"pipeline": {"schedule": "1f1b", "virtual_stages": 2}},
            [],
        ),  # changes the stages: refused, with the schedule that has it
    ],
)
def test_only_what_means_nothing_is_left_out(sections: dict[str, Any], left_out: list[str]) -> None:
    config = from_mapping(sections, Config())
    kept, lines = without_unused(config)
    assert [line.partition(" = ")[0] for line in lines] == left_out
    assert (kept == config) == (not left_out)
    assert without_unused(kept) == (kept, [])


def test_python_leaves_out_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = hybridpar.Trainer(config=GPT_TINY, pipeline={"schedule": "1f1b"})
    assert trainer.config.optim.staleness == "none"
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_settings_of_the_rate_beside_points_are_left_out() -> None:
    points = [[0, 0.0], [5, 1e-3]]
    config = from_mapping(
        {"optim": {"lr": 1e-2, "warmup_steps": 3, "decay": "wsd", "lr_points": points}}
    )
    found, lines = without_unused(config)
    assert lines == [
        f"optim.{name} = {value} is left out: optim.lr_points gives the learning rate of every "
        "update"
        for name, value in (("lr", "0.01"), ("warmup_steps", "3"), ("decay", '"wsd"'))
    ]
    assert found.optim == from_mapping({"optim": {"lr_points": points}}).optim
