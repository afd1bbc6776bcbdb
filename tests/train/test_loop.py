"""A whole run in one process: what it leaves behind, and that it goes on where it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.runs import metrics, on_ranks, steps, write_config

from hybridpar.checkpoint.background import Task
from hybridpar.cli import main
from hybridpar.config import Config, Launch, from_mapping, load_toml, to_toml
from hybridpar.errors import CheckpointError, ConfigError, HybridparError
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape, Schedule
from hybridpar.train import job as loop
from hybridpar.train.evaluation import Evaluator
from hybridpar.train.faults.errors import RankError
from hybridpar.train.folder import in_use, measured, require_shared, with_kept_batch
from hybridpar.train.launching.launch import Job
from hybridpar.train.run import Run
from hybridpar.validate import resolve

ALONE = Launch(0, 0, 1, 1)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_toml(write_config(tmp_path))


def with_train(config: Config, **changes: Any) -> Config:
    return replace(config, train=replace(config.train, **changes))


def named(config: Config, name: str) -> Config:
    return replace(config, run=replace(config.run, name=name))


@pytest.mark.full_report
def test_a_run_leaves_everything_in_its_folder(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = loop.train(config, ALONE, is_verbose=True)
    folder = config.run.folder
    assert (outcome.step, outcome.exit_code, outcome.resumed_from) == (6, 0, 0)
    assert {p.name for p in folder.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "plan.svg",
        "executed.svg",
        "trace.json",
        "tokenizer.json",
        "sample.txt",
        "checkpoints",
    }
    rows = metrics(folder)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 6]
    assert rows[1].keys() >= {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "step_ms",
        "consumed_tokens",
        "mfu",
    }
    assert rows[1]["consumed_tokens"] == 2 * 2 * 16
    assert load_toml(folder / "config.toml") == replace(
        config, parallel=replace(config.parallel, dp=1)
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000006",
    ]
    assert (folder / "sample.txt").read_text().startswith("The")
    err = capsys.readouterr().err
    assert "MFU = tokens/s x" in err
    assert "cpu, 1 thread a process" in err
    assert "step 6/6" in err
    pytest.importorskip("matplotlib")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_first_run_says_what_a_newcomer_can_use(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five steps without an evaluation, so that there are costs to speak of; all else is for
    --verbose."""
    loop.train(with_train(config, num_steps=8, eval_interval=0, save_interval=0), ALONE)
    err = re.sub(
        r"(?m)^(step [2-7]/8  |training tokenizer|encoding).*\n", "", capsys.readouterr().err
    )
    folder = re.escape(str(config.run.folder))
    assert re.fullmatch(
        rf"{folder}: gpt, 2bw, fp32 on tp=1 pp=1 dp=1, cpu, 1 thread a process; starting\n"
        r"step 1/8  loss .*\n"
        r"step 8/8  loss .*\n"
        rf"step 8: saved {folder}/checkpoints/step_00000008 \([\d.]+ MB in [\d.e-]+ s\)\n"
        r"[\d.]+ ms a step \(median of 8\)\n"
        rf"{folder}/sample.txt: .* \.\.\. \(still noise: the loss is 5\.\d, and guessing has "
        r"5\.7\)\n",
        err,
    ), err


def test_a_model_that_has_learned_shows_its_text(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_NOISE", 2.0)
    loop.train(with_train(config, num_steps=1, eval_interval=0), ALONE)
    text = (config.run.folder / "sample.txt").read_text()
    assert capsys.readouterr().err.endswith(f"/sample.txt:\n{text}\n")


@contextlib.contextmanager
def failing_after(step: int) -> Iterator[None]:
    """Has evaluations fail after a step."""

    def evaluate(self: Evaluator) -> Any:
        if self._engine.batches_done >= step:
            raise RuntimeError("on purpose")
        return usual(self)

    usual = Evaluator.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", evaluate)
        yield


def test_a_start_that_has_made_no_step_does_not_keep_its_name(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_after(0), pytest.raises(RankError, match="on purpose"):
        loop.train(config, ALONE)
    assert metrics(config.run.folder) == []
    wider = replace(config, model=replace(config.model, hidden_size=32))
    with failing_after(3), pytest.raises(RankError, match="on purpose"):
        loop.train(with_train(wider, save_interval=0), ALONE)
    assert "since the last time: model.hidden_size: 16 -> 32" in capsys.readouterr().err
    assert load_toml(config.run.folder / "config.toml").model == wider.model
    assert [row["step"] for row in metrics(config.run.folder)] == [0, 1, 2, 3]
    with pytest.raises(
        HybridparError, match=r"belongs to another run: model\.hidden_size is 32 there and 16 here"
    ):
        loop.train(config, ALONE)


def test_a_wrong_plan_is_refused_before_the_first_step(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A schedule that uses weights older than the two versions that it keeps."""

    def too_old(
        schedule: Schedule, sizes: PipelineShape, stage: int, microbatch: int, first_batch: int
    ) -> int:
        return max(microbatch // sizes.num_microbatches - 3, 0)

    monkeypatch.setitem(SCHEDULES, "2bw", replace(SCHEDULES["2bw"], version_rule=too_old))
    path = tmp_path / "wrong.toml"
    path.write_text(to_toml(config))
    assert main(["train", str(path)]) != 0
    err = capsys.readouterr().err
    assert "rank 0 holds" in err
    assert "but schedule 2bw allows" in err
    assert "Traceback" not in err
    assert not (config.run.folder / "metrics.jsonl").exists()


def test_a_finished_run_says_so_and_is_left_alone(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.train(config, ALONE)
    before = {p: p.stat().st_mtime_ns for p in config.run.folder.rglob("*")}
    assert loop.train(config, ALONE).exit_code == 0
    assert "finished, 6 steps are done" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in config.run.folder.rglob("*")} == before


@pytest.mark.thorough
def test_a_run_whose_last_checkpoint_is_damaged_is_not_finished(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """It resumes from the checkpoint before. With none that is whole it says so, and begins
    nothing."""
    loop.train(config, ALONE)
    root = config.run.folder / "checkpoints"
    whole = steps(metrics(config.run.folder))
    for step in (6, 4):
        path = root / f"step_{step:08d}" / "pp0-tp0.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        if step == 6:
            outcome = loop.train(config, ALONE)
            assert (outcome.resumed_from, outcome.step) == (4, 6)
            err = capsys.readouterr().err
            assert "step_00000006/pp0-tp0.safetensors: is damaged" in err
            assert "finished" not in err
            assert steps(metrics(config.run.folder)) == whole
            assert loop.train(config, ALONE).resumed_from == 6, "it is whole again"
            path.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match="none of the 2 checkpoints is complete; move them away to start from the beginning",
    ):
        loop.train(config, ALONE)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("schedule", "number"), [("2bw", signal.SIGTERM), ("1f1b", signal.SIGUSR1)]
)
def test_a_signal_saves_and_the_same_command_goes_on(
    config: Config, schedule: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, pipeline=replace(config.pipeline, schedule=schedule))  # type: ignore[arg-type]
    config = with_train(
        config, eval_interval=0, save_interval=0, num_steps=12, stop_signals=("TERM", "HUP", "USR1")
    )
    loop.train(named(config, "whole"), ALONE)
    on_step = Run._on_step

    def interrupt(run: Run, result: Any) -> None:
        on_step(run, result)
        if result.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Run, "_on_step", interrupt)
    outcome = loop.train(config, ALONE)
    assert outcome.exit_code == 128 + number
    assert 3 < outcome.step < 8
    monkeypatch.setattr(Run, "_on_step", on_step)
    again = loop.train(config, ALONE)
    assert (again.resumed_from, again.step, again.exit_code) == (outcome.step, 12, 0)
    assert steps(metrics(config.run.folder)) == steps(metrics(named(config, "whole").run.folder))


def test_metrics_are_cut_back_to_the_resumed_step(config: Config) -> None:
    loop.train(config, ALONE)
    folder = config.run.folder
    whole = metrics(folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000006")  # as if killed after step 5
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    outcome = loop.train(config, ALONE)
    assert outcome.resumed_from == 4
    assert steps(metrics(folder)) == steps(whole)
    assert [r.get("val_loss") for r in metrics(folder)] == [r.get("val_loss") for r in whole]


@pytest.mark.thorough
def test_a_run_goes_on_under_another_schedule(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.train(config, ALONE)
    pipeline = replace(config.pipeline, schedule="1f1b", num_microbatches=4)  # type: ignore[arg-type]
    longer = with_train(replace(config, pipeline=pipeline), num_steps=8, micro_batch_size=1)
    outcome = loop.train(longer, ALONE)
    assert (outcome.resumed_from, outcome.step) == (6, 8)
    err = capsys.readouterr().err
    for change in (
        "train.num_steps: 6 -> 8",
        "schedule: '2bw' -> '1f1b'",
        "pipeline.num_microbatches: 2 -> 4",
    ):
        assert change in err
    assert metrics(config.run.folder)[-2]["consumed_tokens"] == 8 * 4 * 16
    # micro-batches follow, so that batches keep their size; that is said each time
    for num_steps in (9, 10):
        loop.train(with_train(longer, num_steps=num_steps, micro_batch_size=2), ALONE)
        err = capsys.readouterr().err
        assert "pipeline.num_microbatches = 2, not 4: the run keeps its batches of 4 samples" in err
        assert metrics(config.run.folder)[-2]["consumed_tokens"] == num_steps * 4 * 16
    with pytest.raises(CheckpointError, match=r"batches of 4 samples .* has 12 samples"):
        loop.train(with_train(longer, num_steps=11, micro_batch_size=3), ALONE)


@pytest.mark.thorough
def test_micro_batches_that_follow_must_fit_the_schedule(config: Config) -> None:
    """The error comes before ranks connect, and on all of them alike: a rank that failed alone
    would be restarted."""
    loop.train(config, ALONE)
    longer = with_train(config, num_steps=8, micro_batch_size=4)
    deeper = replace(longer, parallel=replace(config.parallel, pp=4, dp=1))
    rule = r"has batches of 4 samples, which takes 1 micro-batches here; must be at least 3"
    four = replace(config.pipeline, num_microbatches=4)
    with pytest.raises(
        ConfigError, match=rule + r'.*try train\.continue_with = \["pipeline\.num_microbatches"\]'
    ):
        with_kept_batch(resolve(replace(deeper, pipeline=four), 4))


@pytest.mark.thorough
def test_faults_are_of_the_micro_batches_that_follow(config: Config) -> None:
    """Else one would be accepted that never happens."""
    loop.train(config, ALONE)
    longer = with_train(
        replace(config, pipeline=replace(config.pipeline, num_microbatches=4)), num_steps=8
    )
    with pytest.raises(ConfigError, match="micro-batches of a step are 0 to 1; try micro-batch 1"):
        loop.train(longer, ALONE, ["kill rank 0 at step 8 micro-batch 3"])


def test_a_start_that_has_made_no_step_keeps_no_batch(config: Config) -> None:
    with failing_after(0), pytest.raises(RankError, match="on purpose"):
        loop.train(config, ALONE)
    loop.train(with_train(config, num_steps=1, micro_batch_size=1, eval_interval=0), ALONE)
    assert metrics(config.run.folder)[-1]["consumed_tokens"] == 2 * 1 * 16


def test_automatic_settings_are_measured_again_on_another_grid(config: Config) -> None:
    auto = from_mapping(
        {"pipeline": {"early_switch": "auto"}, "memory": {"offload_activations": "auto"}},
        resolve(config, 1),
    )
    assert measured(auto) == {}
    run_folder = config.run.folder
    run_folder.mkdir(parents=True)
    found = {"pipeline": {"early_switch": 1}, "memory": {"offload_activations": [3]}}
    (run_folder / "config.toml").write_text(to_toml(from_mapping(found, auto)))
    assert measured(auto) == found
    for section, change in (
        ("parallel", {"pp": 2}),
        ("pipeline", {"num_microbatches": 4}),
        ("train", {"micro_batch_size": 1}),
        ("memory", {"folder": "elsewhere"}),
    ):
        assert measured(from_mapping({section: change}, auto)) == {}
    given = from_mapping({"pipeline": {"early_switch": 1}}, auto)
    assert measured(given) == {"memory": found["memory"]}
    assert measured(from_mapping({"pipeline": {"early_switch": 0}}, auto)) == {}


@pytest.mark.thorough
def test_measured_settings_stay(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on has the plan that it began with."""
    pipeline = {"schedule": "gpipe", "num_microbatches": 5}
    auto = with_train(
        from_mapping({"pipeline": pipeline, "memory": {"offload_activations": "auto"}}, config),
        num_steps=3,
        save_interval=0,
        eval_interval=0,
    )
    loop.train(with_train(auto, num_steps=2), ALONE)
    away = load_toml(auto.run.folder / "config.toml").memory.offload_activations
    assert isinstance(away, tuple)
    assert f"memory.offload_activations: {list(away)}" in capsys.readouterr().err
    loop.train(auto, ALONE)
    assert "memory.offload_activations:" not in capsys.readouterr().err
    assert load_toml(auto.run.folder / "config.toml").memory.offload_activations == away
    assert [row[0] for row in steps(metrics(auto.run.folder))] == [1, 2, 3]


@pytest.mark.thorough
def test_another_model_is_refused_and_nothing_overwritten(config: Config) -> None:
    loop.train(config, ALONE)
    before = {p: p.read_bytes() for p in config.run.folder.rglob("*") if p.is_file()}
    other = replace(with_train(config, num_steps=9), model=replace(config.model, num_layers=3))
    with pytest.raises(CheckpointError, match=r"num_layers is 2 there and 3 here"):
        loop.train(other, ALONE)
    corpus = Path(config.data.corpus[0])
    corpus.write_text(corpus.read_text() + "Something else. " * 50)
    with pytest.raises(CheckpointError, match=r"data that does not match data\.corpus"):
        loop.train(with_train(config, num_steps=9), ALONE)
    after = {p: p.read_bytes() for p in config.run.folder.rglob("*") if p.is_file()}
    changed = {p.name for p in before if after.get(p) != before[p]}
    assert changed <= {"rank_00000", ".lock"}, (
        "only the flight record and the lock say that there was another job"
    )


def test_two_jobs_do_not_share_a_folder(config: Config) -> None:
    with in_use(config.run.folder), pytest.raises(ConfigError, match="another job is training"):
        loop.train(config, ALONE)


def test_the_lock_of_a_run_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to("../precious")
    with pytest.raises(ConfigError, match="cannot be written to"), in_use(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("shared", [True, False])
def test_machines_share_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr("hybridpar.train.folder._SEEN_AFTER_S", 0.0)
    folders = [tmp_path / name / "run" for name in ("a", "a" if shared else "b", "a")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)

    def on_own_machine(job: Job) -> None:
        require_shared(folders[job.launch.rank], Job(replace(job.launch, local_rank=0), job.store))

    outcomes = on_ranks(3, on_own_machine)
    if shared:
        assert outcomes == [None] * 3
    else:
        assert {
            re.match(
                r"rank 1: run\.dir = '(\S+)': must be a folder that this machine shares with "
                r"rank 0",
                str(one),
            )[1]
            for one in outcomes
        } == {str(tmp_path / "b")}  # type: ignore[index]
    assert not any(os.listdir(folder) for folder in folders)


def test_bert_trains_too(config: Config) -> None:
    bert = replace(config, model=replace(config.model, kind="bert"))
    assert loop.train(bert, ALONE).step == 6
    rows = metrics(config.run.folder)
    assert rows[1]["losses"].keys() == {"mlm", "sop"}
    assert rows[1]["loss"] == pytest.approx(sum(rows[1]["losses"].values()))
    assert rows[0]["val_losses"].keys() == {"mlm", "sop"}
    assert not (config.run.folder / "sample.txt").exists()


def test_a_lack_of_memory_at_the_end_is_said_in_a_line(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First for the thread that saves, then for the text that is written at last, without which the
    run is whole."""

    def fail(*args: Any) -> None:
        raise RuntimeError(said)

    with monkeypatch.context() as patched:
        said = "can't start new thread"
        patched.setattr(Task, "start", fail)
        with pytest.raises(
            RankError,
            match=r"^rank 0 .*cannot start a thread while saving: it is out of memory, or",
        ):
            loop.train(config, ALONE)
    said = "could not create a primitive"
    monkeypatch.setattr(loop.Generator, "generate", fail)
    assert loop.train(config, ALONE).step == config.train.num_steps
    assert f"no sample.txt: {said}" in capsys.readouterr().err


def test_training_is_a_command_with_json(
    config: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", str(tmp_path / "tiny.toml"), "--train.num_steps", "2", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["ok"], plain["step"], plain["stopped_by"]) == (True, 2, None)
    assert (
        main(["generate", "--checkpoint", str(config.run.folder), "--max_tokens", "5", "--json"])
        == 0
    )
    first = json.loads(capsys.readouterr().out)["text"]
    assert main(["generate", "--checkpoint", str(config.run.folder), "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out == first + "\n"
