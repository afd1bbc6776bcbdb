"""Any step of a run, on any grid and schedule, is the same when it is run again in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from train.runs import run_job, tiny, write_config

from hybridpar.cli import main
from hybridpar.config import Launch, from_mapping, to_toml
from hybridpar.errors import ConfigError, DataError
from hybridpar.train import job as loop
from hybridpar.train.batches.batch_policy import StepResult
from hybridpar.train.batches.batch_updates import WeightUpdates
from hybridpar.train.faults.errors import AnomalyError
from hybridpar.verify import replay as replay_module
from hybridpar.verify.replay import bundle_of_step, replay

ALONE = Launch(0, 0, 1, 1)


def test_a_weight_that_is_not_finite_is_named_by_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update makes it so, also when it is made again. No checkpoint has such a weight."""
    config = tiny(tmp_path, train={"num_steps": 5, "eval_interval": 0, "save_interval": 5})
    name = "blocks.2.mlp.up.weight"
    apply = WeightUpdates.apply

    def spoil(self: WeightUpdates, batch: int, part: int, result: StepResult | None) -> None:
        apply(self, batch, part, result)
        if batch == 2:
            for leaves in self.state.weights.leaves:
                leaves[name].data.view(-1)[7] = math.inf

    monkeypatch.setattr(WeightUpdates, "apply", spoil)
    with pytest.raises(AnomalyError, match=f"step 5: weights/./{name} is not finite"):
        loop.train(config, ALONE)
    capsys.readouterr()
    assert (
        main(["replay", str(config.run.folder / "anomalies" / "step_00000005.json"), "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == [None, None]
    assert found["first_not_finite"]["weight"] == f"{name} of version 3"
    assert found["first_not_finite"]["activation"] == "blocks.2, micro-batch 0"
    assert found["first_not_finite"]["gradient"].startswith("blocks.3.")


class Row(dict[str, Any]):
    """A row of metrics; counts those that are in memory."""

    alive = most = 0

    def __init__(self, step: int):
        super().__init__(step=step, loss=float(step), grad_norm=1.0, skipped=step % 1000 == 0)
        Row.alive += 1
        Row.most = max(Row.most, Row.alive)

    def __del__(self) -> None:
        Row.alive -= 1


def test_the_metrics_of_a_long_run_are_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path, train={"num_steps": 10_000})
    config.run.folder.mkdir(parents=True)
    (config.run.folder / "config.toml").write_text(to_toml(config))
    monkeypatch.setattr(replay_module, "stream_metrics", lambda path: map(Row, range(1, 10_001)))
    bundle = bundle_of_step(config.run.folder, 2500)
    assert (bundle.step, bundle.loss, bundle.skipped) == (2500, 2500.0, (1000, 2000))
    with pytest.raises(ConfigError, match="has no such step; try 1 to 10000"):
        bundle_of_step(config.run.folder, 10_001)
    assert Row.most < 10


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("schedule", "sections"),
    [
        ("2bw", {"train": {"dtype": "bf16"}}),
        ("gpipe", {"optim": {"name": "muon"}}),
        ("2bw", {"model": {"kind": "bert"}}),
    ],
    ids=str,
)
def test_any_step_of_a_run_can_be_replayed(
    tmp_path: Path, schedule: str, sections: dict[str, Any]
) -> None:
    base = {
        "train": {"num_steps": 6, "eval_interval": 3, "save_interval": 4},
        "model": {"dropout": 0.1},
    }
    config = tiny(tmp_path, schedule, **base)
    config = from_mapping(sections, config)
    loop.train(config, ALONE)
    for step, start in ((3, None), (6, 4)):
        report = replay(config.run.folder, step, print)
        assert "nan" not in "\n".join(report.lines()), "metrics do not have norms by stage"
        assert report.agrees
        assert report.bundle.checkpoint == start
        assert not report.weights + report.activation + report.gradient
    with pytest.raises(ConfigError, match="has no such step; try 1 to 6"):
        replay(config.run.folder, 7, print)


@pytest.mark.ranks
def test_a_grid_is_replayed_on_one_process(tmp_path: Path) -> None:
    """Two stages with early switches; fp32, so the order of summation shows in the seventh
    digit."""
    config = write_config(tmp_path)
    run_job(
        2,
        "train",
        config,
        "--parallel.pp",
        "2",
        "--pipeline.early_switch",
        "1",
        "--pipeline.num_microbatches",
        "4",
        "--train.save_interval",
        "4",
    )
    report = replay(tmp_path / "runs" / "run", 6, print)
    assert report.result.loss == pytest.approx(report.bundle.loss, rel=1e-5)
    assert report.result.grad_norm == pytest.approx(report.bundle.grad_norm, rel=1e-4)
    assert math.hypot(*report.stage_norms) == pytest.approx(report.result.grad_norm, rel=1e-6)


PLAIN = ("--model.tie_embeddings", "False", "--optim.clip_grad", "0")


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        (PLAIN, True),
        (
            (
                "--pipeline.sync_steps",
                "3",
                "--pipeline.num_microbatches",
                "1",
                "--optim.staleness",
                "lr_rescale",
            ),
            False,
        ),
    ],
    ids=["plain", "short"],
)
def test_pipedreams_stages_are_replayed_in_one_process(
    tmp_path: Path, flags: tuple[str, ...], exact: bool
) -> None:
    """Each on its version of the weights: to the bit, where nothing is summed over stages."""
    config = write_config(tmp_path, "pipedream")
    run_job(
        3,
        "train",
        config,
        "--parallel.pp",
        "3",
        "--train.num_steps",
        "11",
        "--train.eval_interval",
        "6",
        "--train.save_interval",
        "8",
        *flags,
    )
    for step, start in ((8, 0), (9, 8), (11, 8)):
        report = replay(tmp_path / "runs" / "run", step, print)
        assert (report.bundle.checkpoint or 0) == start
        if exact:
            assert report.result.losses == report.bundle.losses
            assert report.result.grad_norm == pytest.approx(
                report.bundle.grad_norm, rel=1e-12
            )  # of squares, by stage
        else:
            assert report.result.loss == pytest.approx(report.bundle.loss, rel=1e-6)
            assert report.result.grad_norm == pytest.approx(report.bundle.grad_norm, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_bundle_of_stages_says_on_which_versions_they_ran(tmp_path: Path) -> None:
    config = write_config(tmp_path, "pipedream")
    run_job(
        2,
        "train",
        config,
        "--parallel.pp",
        "2",
        "--train.num_steps",
        "8",
        "--train.eval_interval",
        "0",
        "--train.save_interval",
        "4",
        "--inject",
        "nan gradient rank 0 at step 7",
    )
    path = tmp_path / "runs" / "run" / "anomalies" / "step_00000007.json"
    plain = json.loads(path.read_text())
    assert plain["versions"] == [[5, 6], [6, 6]]
    report = replay(path, 0, print)
    assert (report.result.loss, report.agrees) == (
        pytest.approx(report.bundle.loss, rel=1e-6),
        False,
    )
    path.write_text(json.dumps(plain | {"versions": [[6, 6], [6, 6]]}))
    with pytest.raises(
        DataError, match=r"step 7 ran on weight versions .* the pipeline drained at steps"
    ):
        replay(path, 0, print)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_ring_of_stages_is_replayed(tmp_path: Path) -> None:
    run_job(2, "train", write_config(tmp_path, "interleaved"), "--parallel.pp", "2")
    report = replay(tmp_path / "runs" / "run", 6, print)
    assert report.agrees
    assert math.hypot(*report.stage_norms) == pytest.approx(report.result.grad_norm, rel=1e-6)


def test_replay_needs_a_step_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, "pipedream")
    folder = config.run.folder
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n')
    assert main(["replay", str(folder)]) == 1
    assert "it selects a step of a run folder" in capsys.readouterr().err
