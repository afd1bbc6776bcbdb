"""costs.json there and back, what damages it, and what is said at the end of a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.timelines import recorded

from hybridpar.cli import main
from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig, to_toml
from hybridpar.errors import ConfigError, DataError
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Kind
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.reporting.costs_file import (
    RunCosts,
    describe,
    read_costs,
    run_costs,
    write_costs,
)
from hybridpar.train.reporting.trace import Host

CONFIG = Config(
    model=ModelConfig(num_layers=2),
    parallel=ParallelConfig(pp=2, dp=1),
    pipeline=PipelineConfig("2bw", 4, early_switch=2),
)
COSTS = Costs((0.01, 0.02), (0.02, 0.04), 0.005, {Kind.NORM: 0.001}, norm=0.001, latency=0.002)


def measured() -> RunCosts:
    run = run_costs(
        JobPlan(CONFIG),
        recorded("2bw", PipelineShape(2, 4), COSTS, 10, host=Host("here", "cpu", 2)),
    )
    assert run is not None
    return run


def test_written_costs_are_read_back(tmp_path: Path) -> None:
    run = measured()
    write_costs(run, tmp_path / "costs.json")
    again = read_costs(tmp_path / "costs.json")
    assert (again.schedule_options, again.shape, again.hardware) == (
        run.schedule_options,
        run.shape,
        run.hardware,
    )
    assert again.schedule_options.early_switch == 2
    assert again.measured.costs.forward == pytest.approx((0.01, 0.02))
    assert again.measured.costs.calls[Kind.NORM] == pytest.approx((0.001, 0.001))
    assert again.measured.costs.cores == 2.0
    for mine, own in zip(
        again.measured.costs.variation[Kind.B], run.measured.costs.variation[Kind.B], strict=True
    ):
        assert mine == pytest.approx(own)
    assert again.measured.step_time == pytest.approx(run.measured.step_time, abs=1e-9)
    assert again.timeline().step_time(4) == pytest.approx(run.timeline().step_time(4), abs=1e-7)
    write_costs(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "costs.json").read_text()


def test_the_names_of_older_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(measured(), path)
    document = json.loads(path.read_text())
    shape = document.pop("shape")
    document["sizes"] = shape | {"chunks": shape["virtual_stages"]}
    del document["sizes"]["virtual_stages"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(document))
    assert read_costs(old) == read_costs(path)


def delete(document: dict[str, Any], key: str) -> None:
    del document[key]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", "costs 0", "format is 'costs 0'.* when it continues to train"),
        ("shape.num_ranks", 3, r"num_microbatches|has 2 numbers, not 3|not 3"),
        ("shape.num_ranks", 0, "must be at least 1"),
        ("shape.num_microbatches", 1, "out of range: 0 to 0"),
        ("schedule.schedule", "3bw", "must be one of"),
        ("schedule.clip", 1, "schedule.clip is 1"),
        ("costs_s.forward", [0.1], r"costs_s\.forward has 1 numbers, not 2"),
        ("costs_s.forward", [0.1, -1], "has -1.0, which is not a duration"),
        ("costs_s.norm", "1", r"costs_s\.norm is '1'"),
        ("costs_s.norm", None, r"costs_s\.norm is None"),
        ("costs_s.cores", 0, r"costs_s\.cores is 0"),
        ("costs_s.latency", [0.1, 0.2], r"costs_s\.latency has 2 numbers, not 1"),
        ("costs_s.variation", {"F": [[1.0], [1.0]]}, r"costs_s\.variation\.B is missing"),
        (
            "costs_s.variation",
            {"F": [[1.0]], "B": [[1.0]]},
            r"costs_s\.variation\.F is not 2 rows of numbers",
        ),
        (
            "costs_s.variation",
            {"F": [[1.0], []], "B": [[1.0]]},
            r"costs_s\.variation\.F is not 2 rows of numbers",
        ),
        (
            "costs_s.variation",
            {"F": [[1.0], [-1]], "B": [[1.0], [1]]},
            "has -1.0, which is not a duration",
        ),
        ("costs_s.calls", {}, r"costs_s\.calls\.SEND_F is missing"),
        ("measured", [], "measured is"),
        ("measured.idle_share", [0.1], "has 1 numbers, not 2"),
        ("measured.parts_s", [{}, {}], r"measured\.parts_s\[0\]: 'compute' is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, place: str, value: Any, message: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(measured(), path)
    document = json.loads(path.read_text())
    *sections, key = place.split(".")
    target = document
    for section in sections:
        target = target[section]
    assert key in target
    target[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as error:
        read_costs(path)
    assert str(error.value).startswith(str(path))


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"run = '{tmp_path}': has no costs.json")):
        read_costs(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_costs(tmp_path / "costs.json")


def test_the_report_says_what_was_measured_what_is_simulated_and_where_the_rest_goes() -> None:
    step, idle, slowest = describe(measured())
    # 4 x (0.02 + 0.04) on stage 1, its update and its part of the norm
    assert "246 ms measured" in step
    assert "246 ms simulated from the measured costs (100%)" in step
    assert idle == "idle by stage: 49 %, 0 % measured, 49 %, 0 % simulated"
    assert slowest.startswith(
        "slowest stage 1: computing 240 ms (98% of the step; the mean stage 180 ms)"
    )
    assert "norm and optimizer 6.00 ms (2%)" in slowest
    assert "without a core" not in slowest


def test_ranks_that_hold_several_stages_are_not_called_stages() -> None:
    run = measured()
    costs = replace(
        run.measured.costs,
        forward=(0.01, 0.02) * 2,
        backward=(0.02, 0.04) * 2,
        variation={},
        transfer=0.0,
        latency=0.0,
        transfer_work=0.0,
    )
    chunks = replace(
        run,
        schedule_options=ScheduleOptions("interleaved"),
        shape=PipelineShape(2, 4, 2),
        measured=replace(run.measured, costs=costs),
    )
    _, idle, slowest = describe(chunks)
    assert idle.startswith("idle by rank: ")
    assert slowest.startswith("slowest rank 1: ")
    assert "the mean rank 180 ms" in slowest


# -- hybridpar simulate --run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(CONFIG))
    write_costs(measured(), folder / "costs.json")
    return folder


def test_a_run_predicts_itself_and_other_schedules(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = simulated(run_folder, capsys, "--pipeline.early_switch", "2")
    assert own["step_time"] == pytest.approx(own["measured_step_time"], rel=1e-3)
    assert own["unit"] == "s"
    other = simulated(
        run_folder,
        capsys,
        "--pipeline.schedule",
        "1f1b",
        "--pipeline.early_switch",
        "off",
        "--pipeline.num_microbatches",
        "8",
    )
    assert (other["schedule"], other["num_microbatches"]) == ("1f1b", 8)
    # (m + p - 1) times forward and backward of the slower stage would be 9 x 0.06
    assert 8 * 0.06 < other["step_time"] < 9 * 0.06 + 0.03
    assert other["measured_step_time"] == own["measured_step_time"]


def simulated(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["simulate", "--run", str(folder), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_times_are_in_milliseconds_and_pictures_and_traces_too(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = run_folder / "a.svg"
    trace = run_folder / "a.json"
    flags = ["--batches", "5", "--svg", str(svg), "--perfetto", str(trace)]
    assert main(["simulate", "--run", str(run_folder), *flags]) == 0
    out = capsys.readouterr().out
    assert re.search(r"a batch takes 246(\.\d)? ms, from the costs of", out)
    assert "(where one took 246" in out
    assert "stage 1: idle  0." in out
    assert "time in milliseconds" in svg.read_text()
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert next(e["dur"] for e in slices if e["name"] == "B0@1v0") == pytest.approx(40e3)


def test_settings_that_costs_depend_on_cannot_change(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (
        ["--model.hidden_size", "512"],
        ["--pipeline.split", "1", "3"],
        ["--train.dtype", "bf16"],
        ["--optim.name", "sgd"],
    ):
        assert main(["simulate", "--run", str(run_folder), *flags]) == 1
        assert f"{flags[0][2:]} = " in (message := capsys.readouterr().err)
        assert "which was measured with" in message
    assert (
        main(["simulate", "--run", str(run_folder), "--optim.lr", "1", "--train.num_steps", "7"])
        == 0
    )


def test_a_run_without_costs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "costs.json").unlink()
    assert main(["simulate", "--run", str(run_folder)]) == 1
    assert "has no costs.json, which a run measures while it trains" in capsys.readouterr().err
    assert main(["simulate", "--run", str(run_folder / "not")]) == 1
    assert "does not exist; try" in capsys.readouterr().err


def test_the_early_switch_that_a_run_can_afford(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is little to hide here: the smallest switch is faster than stopping, and stage 0 never
    waits for it."""
    auto = simulated(
        run_folder, capsys, "--pipeline.early_switch", "auto", "--pipeline.num_microbatches", "8"
    )
    rule = simulated(run_folder, capsys, "--pipeline.num_microbatches", "8")
    assert auto["step_time"] <= 1.01 * rule["step_time"]
