"""Whole runs that meet an anomaly: it is skipped, rolled back, or ends them; on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train.runs import fork_ranks, metrics, poison_gradients, run_job, steps, tiny, write_config

from hybridpar import checkpoint
from hybridpar.cli import main
from hybridpar.config import Config, Launch
from hybridpar.errors import ConfigError, HybridparError
from hybridpar.optim import learning_rate
from hybridpar.train import job as loop
from hybridpar.train.batches.batch_policy import StepResult
from hybridpar.train.batches.batch_updates import WeightUpdates
from hybridpar.train.faults.errors import AnomalyError
from hybridpar.verify.replay import replay

ALONE = Launch(0, 0, 1, 1)


def test_an_anomaly_is_skipped_and_leaves_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, checkpoint={"asynchronous": False})
    with monkeypatch.context() as poison:
        poison_gradients(poison, {4})
        assert loop.train(config, ALONE).step == 8
    rows = {row["step"]: row for row in metrics(config.run.folder)}
    assert (rows[5]["anomaly"], rows[5]["policy"], rows[5]["skipped"]) == (
        "non_finite",
        "skip",
        True,
    )
    assert not any("anomaly" in row for step, row in rows.items() if step != 5)
    path = config.run.folder / "anomalies" / "step_00000005.json"
    bundle = json.loads(path.read_text())
    assert bundle["samples"] == [16, 20]
    assert bundle["versions"] == [[3, 3]], "2bw: weights one batch old"
    assert (bundle["checkpoint"], bundle["grad_norm"]) == (4, None)
    capsys.readouterr()
    # the weights and the data are healthy, so it does not happen again; with its checkpoint it can
    # be run again
    (config.run.folder / "checkpoints" / "step_00000008").rename(tmp_path / "later")
    assert main(["replay", str(path)]) == 1
    assert "keeps the newest checkpoint.keep" in capsys.readouterr().err


def test_a_spike_is_rolled_back_and_training_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"loss_spike": 30.0, "on_loss_spike": "roll_back", "window": 8}
    config = tiny(
        tmp_path,
        anomalies=settings,
        train={"num_steps": 14, "eval_interval": 0, "save_interval": 4},
        checkpoint={"keep": 10},
    )
    advance = WeightUpdates.apply

    def broken(self: WeightUpdates, batch: int, part: int, result: StepResult | None) -> None:
        advance(self, batch, part, result)
        if batch == 8 and not hasattr(self, "broken"):
            self.broken = True  # type: ignore[attr-defined]
            with torch.no_grad():
                for leaf in self.state.weights.leaves_of(batch + 1).values():
                    leaf.mul_(30.0)

    monkeypatch.setattr(WeightUpdates, "apply", broken)
    assert loop.train(config, ALONE).step == 14
    rows = metrics(config.run.folder)
    event = next(row for row in rows if "rolled_back_to" in row)
    assert event == {"step": 11, "anomaly": "loss_spike", "rolled_back_to": 8}, (
        "batch 10 is the first on W(9)"
    )
    assert [step for step, _, _ in steps(rows)] == list(range(1, 15))
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert by_step[11] > 2 * by_step[10]
    assert by_step[12] < 1.2 * by_step[10]
    rates = {row["step"]: row["lr"] for row in rows if "lr" in row}
    assert rates[12] == learning_rate(8, config.optim, 14), "the weights have had 8 updates"
    report = replay(config.run.folder, 12, print)
    assert report.agrees, "from the checkpoint of step 8, over the batches that were gone over"
    assert (report.bundle.checkpoint, report.bundle.start) == (8, 11)
    (config.run.folder / "checkpoints" / "step_00000008").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError,
        match="comes after a roll back to the checkpoint of step 8, which has been removed",
    ):
        replay(config.run.folder, 12, print)


def test_a_run_stops_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison_gradients(monkeypatch, {5})
    config = tiny(tmp_path, anomalies={"on_non_finite": "stop"})
    with pytest.raises(
        AnomalyError,
        match=r"step 6: the gradient norm is nan; stopped, the newest checkpoint is of "
        r"step 4",
    ):
        loop.train(config, ALONE)
    assert checkpoint.saved_steps(config.run.folder / "checkpoints") == [4, 2]
    assert [step for step, _, _ in steps(metrics(config.run.folder))] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(AnomalyError, match="step 6"):  # the same command meets it again
        loop.train(config, ALONE)


def spoil_updates(monkeypatch: pytest.MonkeyPatch, update: int, *, once: bool = False) -> None:
    """An update gives the head's weight an infinity, from gradients that are finite. once: not
    after a roll back."""
    healthy = WeightUpdates.apply
    spoiled = set[int]()

    def overflowing(self: WeightUpdates, batch: int, part: int, result: StepResult | None) -> None:
        healthy(self, batch, part, result)
        if (
            self.state.grid.pp.is_last
            and self.state.optimizer.num_updates == update
            and not (once and spoiled)
        ):
            spoiled.add(batch)
            self.state.await_copy()
            list(self.state.weights.leaves_of(batch + 1).values())[-1].data.view(-1)[0] = torch.inf

    monkeypatch.setattr(WeightUpdates, "apply", overflowing)


NOT_FINITE = r"is not finite, so that state is not saved: try a lower optim\.lr than 0\.01"


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("update", "save_interval"), [(6, 1), (8, 2), (8, 3)])
def test_weights_that_are_not_finite_end_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    update: int,
    save_interval: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also those of the last step, which no later loss shows. The checkpoint before stays, though
    only one is kept."""
    spoil_updates(monkeypatch, update)
    config = tiny(
        tmp_path,
        checkpoint={"keep": 1},
        train={"num_steps": 8, "eval_interval": 0, "save_interval": save_interval},
    )
    newest = (update - 1) // save_interval * save_interval
    with pytest.raises(
        AnomalyError,
        match=rf"step {update}: weights/{update}/.* {NOT_FINITE}; stopped, the newest "
        rf"checkpoint is of step {newest}",
    ):
        loop.train(config, ALONE)
    root = config.run.folder / "checkpoints"
    assert [path.name for path in root.iterdir()] == [f"step_{newest:08d}"]
    (tmp_path / "tiny.toml").write_text((config.run.folder / "config.toml").read_text())
    assert main(["train", str(tmp_path / "tiny.toml")]) == 1, "the same command meets it again"
    assert "is not finite" in capsys.readouterr().err
    assert checkpoint.saved_steps(root) == [newest]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("last", [7, 12])
def test_weights_that_are_not_finite_are_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_updates(monkeypatch, 7, once=True)
    config = tiny(
        tmp_path,
        anomalies={"on_non_finite": "roll_back"},
        train={"num_steps": last, "eval_interval": 0, "save_interval": 7 if last == 12 else 4},
    )
    assert loop.train(config, ALONE).step == last
    rows = metrics(config.run.folder)
    back = 0 if last == 12 else 4
    assert {"step": 7, "anomaly": "non_finite_state", "rolled_back_to": back} in rows
    then = "going on with step 8" if last == 12 else "step 7 was the last, so training ends"
    assert f"rolled back to the checkpoint of step {back}; {then}" in capsys.readouterr().err
    assert [step for step, _, _ in steps(rows)] == list(range(1, last + 1))
    weights = checkpoint.load_full(config.run.folder / "checkpoints" / f"step_{last:08d}")[1]
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_roll_back_that_changes_nothing_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_updates(monkeypatch, 7)
    config = tiny(
        tmp_path,
        anomalies={"on_non_finite": "roll_back"},
        checkpoint={"keep": 1},
        train={"num_steps": 30, "eval_interval": 0, "save_interval": 1},
    )
    with pytest.raises(
        AnomalyError, match=rf"step 8: .* {NOT_FINITE}; stopped, the newest checkpoint is of step 6"
    ):
        loop.train(config, ALONE)
    assert checkpoint.saved_steps(config.run.folder / "checkpoints") == [6]


@pytest.mark.ranks
def test_weights_of_one_rank_end_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_updates(monkeypatch, 5)
    config = tiny(
        tmp_path, parallel={"pp": 2}, train={"num_steps": 6, "save_interval": 5, "eval_interval": 0}
    )
    out = fork_ranks(2, lambda: _outcome(config))
    assert len(set(found := [line for line in out.splitlines() if line.startswith("raised")])) == 1
    assert len(found) == 2
    assert "step 5: weights/5/" in found[0]
    assert "stopped, there is no checkpoint" in found[0]
    assert not list((tmp_path / "runs" / "run" / "checkpoints").iterdir())


def _outcome(config: Config) -> int:
    try:
        loop.train(config, Launch.from_environment())
    except HybridparError as error:
        print("raised", type(error).__name__, error)
    return 0


@pytest.mark.thorough
@pytest.mark.ranks
def test_replicas_that_differ_are_rolled_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas have unsent parts of their gradients."""
    config = write_config(tmp_path, "1f1b")
    flags = (
        "--parallel.dp",
        "2",
        "--anomalies.audit_interval",
        "3",
        "--anomalies.on_divergence",
        "roll_back",
        "--train.eval_interval",
        "0",
        "--compression.gradients",
        "dct",
        "--compression.gradients_smallest",
        "64",
        "--compression.gradients_kept",
        "0.1",
    )
    run_job(2, "train", config, *flags)
    whole = steps(metrics(tmp_path / "runs" / "run"))
    healthy = WeightUpdates.apply

    def spoiled(self: WeightUpdates, batch: int, part: int, result: StepResult | None) -> None:
        healthy(self, batch, part, result)
        if batch == 4 and self.state.grid.rank == 1 and not hasattr(self, "spoiled"):
            self.spoiled = True  # type: ignore[attr-defined]
            self.state.await_copy()
            next(iter(self.state.weights.leaves_of(batch + 1).values())).data.view(-1)[0] += 1.0

    monkeypatch.setattr(WeightUpdates, "apply", spoiled)
    out = run_job(2, "train", config, *flags, "--run.name", "spoiled")
    assert "step 6: replicas differ: weights/" in out
    assert "of rank 1 is not what rank 0 has: roll back" in out
    assert "rolled back to the checkpoint of step 4; going on with step 5" in out
    rows = metrics(tmp_path / "runs" / "spoiled")
    assert {"step": 4, "anomaly": "divergence", "rolled_back_to": 4} in rows
    assert steps(rows) == whole, "the same batches again, to the bit"
