"""Whole jobs: ranks that fail are named, all start again from the last good checkpoint, and nothing
of it is in the numbers. All faults, and many of them: benchmarks/recovery.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from train import forked
from train.forked import Job, supervised, torchrun
from train.runs import LONG_S, metrics, run_job, steps, write_config

from hybridpar.checkpoint import saved_steps
from hybridpar.checkpoint.save import Saver
from hybridpar.cli import main
from hybridpar.config import JOB, Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.flight import Flight, read
from hybridpar.train import job as loop
from hybridpar.train.faults import agent, supervisor
from hybridpar.train.faults.diagnose import Seen
from hybridpar.train.faults.supervisor import Loopback, Supervisor, Watch, supervise
from hybridpar.train.faults.watchdog import is_stopped
from hybridpar.train.folder import flight_path, in_use
from hybridpar.train.stop import SAME_REQUEST_S

pytestmark = pytest.mark.ranks
FASTER = 30
STEPS = ("--train.num_steps", "20", "--train.save_interval", "5", "--train.eval_interval", "10")


def train(ranks: int, config: Path, *flags: str) -> tuple[int, str]:
    """Exit code and output of a supervised job."""
    return supervised("train", config, "--ranks", str(ranks), *flags)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages that nothing happens to."""
    folder = tmp_path_factory.mktemp("calm")
    run_job(2, "train", write_config(folder), "--parallel.pp", "2", *STEPS)
    return folder / "runs" / "run"


def same_checkpoint(run: Path, calm: Path) -> bool:
    """Whether the last checkpoints of two runs are equal to the bit."""
    files = list((calm / "checkpoints" / "step_00000020").glob("*.safetensors"))
    return bool(files) and all(
        path.read_bytes() == (run / "checkpoints" / path.parent.name / path.name).read_bytes()
        for path in files
    )


def failures(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]


def hurry(monkeypatch: pytest.MonkeyPatch, run: Path, after: str = "") -> None:
    """Whom supervisors to come see stand still on purpose seems to do so for FASTER times as long:
    the limits can be so long that no busy machine keeps a rank from what it does. after: once that
    is in the run's folder."""
    look = Watch.look

    def see(self: Watch, processes: Any) -> list[Seen]:
        seen = look(self, processes)
        marks = [
            json.loads(path.read_text() or "{}") for path in sorted((run / "injected").glob("*"))
        ]
        hanging = [mark["rank"] for mark in marks if mark.get("kind", "").startswith("hang")]
        over = failures(run) if (run / "failures.jsonl").exists() else []
        hangs = (run / after).exists() and len(hanging) > len(over)
        outage = any(mark.get("kind") == "outage" for mark in marks) and not over

        def longer(one: Seen, is_meant: bool) -> Seen:
            return replace(one, idle_s=FASTER * one.idle_s) if is_meant else one

        return [
            replace(
                longer(one, (hangs and one.rank in hanging) or (outage and one.waits)),
                saving=one.saving and longer(one.saving, hangs and one.rank in hanging),
            )
            for one in seen
        ]

    monkeypatch.setattr(Watch, "look", see)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="an outage is made with a filter of Linux")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("patience_s", [600.0, 0.0])
def test_an_outage_within_the_patience_changes_no_bit_and_starts_nothing_again(
    tmp_path: Path, calm: Path, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both time-outs are shorter than the outage. Without patience the link counts as lost, and the
    job recovers."""
    outage = 4.0
    limits = ("--faults.timeout_s", str(2 * FASTER), "--train.timeout_s", "3")
    hurry(monkeypatch, tmp_path / "runs" / "run")
    code, out = train(
        2,
        write_config(tmp_path),
        "--parallel.pp",
        "2",
        *STEPS,
        *limits,
        "--faults.patience_s",
        str(patience_s),
        "--inject",
        f"outage rank 1 at step 12 micro-batch 1 for {outage} s",
    )
    assert code == 0, out
    run = metrics(tmp_path / "runs" / "run")
    assert steps(run) == steps(metrics(calm))
    assert ("starting again" in out) == (not patience_s), out
    if patience_s:
        assert not (tmp_path / "runs" / "run" / "failures.jsonl").exists()
        assert max(row["step_ms"] for row in run if "step_ms" in row) > 1e3 * (outage - 1), (
            "it waited"
        )
    else:
        assert (
            "the link between rank" in out
            or "in a circle" in out
            or "hangs" in out
            or "lost contact" in out
        ), out


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_four_ranks_recover_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what each replica has not sent of its gradients: one is ended while it writes that
    down."""
    monkeypatch.setattr(supervisor, "_LAST_SAVE_S", 0.5)  # the last one hangs
    config = write_config(tmp_path)
    grid = (
        "--parallel.pp",
        "2",
        "--parallel.dp",
        "2",
        "--compression.gradients",
        "dct",
        "--compression.gradients_smallest",
        "64",
        "--compression.gradients_kept",
        "0.1",
    )
    run_job(4, "train", config, *grid, *STEPS, "--run.name", "calm")
    hurry(monkeypatch, tmp_path / "runs" / "run", "checkpoints/step_00000010")
    limit = str(2 * FASTER)
    code, out = train(
        4,
        config,
        *grid,
        *STEPS,
        "--faults.timeout_s",
        limit,
        "--faults.save_timeout_s",
        limit,
        "--inject",
        "slow link 0-1 at step 9 for 0.2 s",
        "corrupt shard stage 1 at step 10",
        "hang rank 1 at step 14 micro-batch 1",
        "hang save rank 3 at step 15",
    )
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    calm = tmp_path / "runs" / "calm"
    hung, saving = failures(run)
    assert (saving["kind"], saving["rank"], saving["phase"], saving["saved"]) == (
        "hangs",
        3,
        "writing the checkpoint of step 15",
        10,
    )
    assert (hung["kind"], hung["rank"], hung["step"], hung["microbatch"], hung["saved"]) == (
        "hangs",
        1,
        14,
        27,
        10,
    )
    assert hung["action"].endswith("27@0v12") or hung["action"].endswith("27@0"), (
        "that of micro-batch 1 of step 14"
    )
    waits = [text for text in hung["victims"] if "with rank 1" in text]
    assert waits, "somebody waits for the rank that hangs"
    assert "step_00000010/pp1-tp0.safetensors: is damaged" in out
    assert re.search(
        r"rank 3 \(.*\) hangs: nothing for .* s while writing the checkpoint of step 15; starting "
        r"again "
        "after step 10",
        out,
    )
    assert re.findall(r"resuming after step (\d+)", out) == ["5", "10"]
    assert len(list((run / "injected").iterdir())) == 4
    assert steps(metrics(run)) == steps(metrics(calm))
    assert [row["val_loss"] for row in metrics(run) if "val_loss" in row] == [
        row["val_loss"] for row in metrics(calm) if "val_loss" in row
    ]
    assert same_checkpoint(run, calm)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_kill_while_state_moves_leaves_no_trace(tmp_path: Path) -> None:
    """The file of the state goes with its process; the next one starts from the checkpoint."""
    config = write_config(tmp_path)
    grid = ("--parallel.dp", "2", "--parallel.zero", "3")
    run_job(2, "train", config, *grid, *STEPS, "--run.name", "calm")
    calm = tmp_path / "runs" / "calm"
    code, out = train(
        2,
        config,
        *grid,
        *STEPS,
        "--memory.budget",
        "180000",
        "--inject",
        "kill rank 1 at step 13 micro-batch 1",
    )
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"], one["step"]) for one in failures(run)] == [("died", 1, 13)]
    assert steps(metrics(run)) == steps(metrics(calm))
    assert list((run / "state").iterdir()) == []
    assert same_checkpoint(run, calm)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "grid",
    [
        ("--parallel.pp", "2", "--train.dtype", "bf16"),
        ("--parallel.tp", "2"),
        *(("--parallel.dp", "2", "--parallel.zero", str(zero)) for zero in (1, 2, 3)),
    ],
    ids=" ".join,
)
def test_a_kill_leaves_no_trace_in_adapters(tmp_path: Path, grid: tuple[str, ...]) -> None:
    """LoRA with 2bw, on each kind of grid."""
    config = write_config(tmp_path)
    lora = ("--model.lora_rank", "2", "--optim.lr", "1e-2")
    run_job(2, "train", config, *grid, *lora, *STEPS, "--run.name", "calm")
    calm = tmp_path / "runs" / "calm"
    code, out = train(2, config, *grid, *lora, *STEPS, "--inject", "kill rank 1 at step 13")
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"], one["step"]) for one in failures(run)] == [("died", 1, 13)]
    assert steps(metrics(run)) == steps(metrics(calm))
    assert same_checkpoint(run, calm)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "grid",
    [
        ("--parallel.dp", "2", "--pipeline.schedule", "2bw"),
        ("--parallel.cp", "2", "--parallel.zero", "1", "--memory.expert_load", "1.0"),
    ],
    ids=" ".join,
)
def test_a_kill_leaves_no_trace_in_shared_experts(tmp_path: Path, grid: tuple[str, ...]) -> None:
    """Weights and biases of experts that ranks of dp, or of cp, share."""
    config = write_config(tmp_path, "1f1b")
    experts = ("--model.num_experts", "3", "--model.router_bias_rate", "0.01", "--parallel.ep", "2")
    run_job(2, "train", config, *grid, *experts, *STEPS, "--run.name", "calm")
    calm = tmp_path / "runs" / "calm"
    code, out = train(2, config, *grid, *experts, *STEPS, "--inject", "kill rank 1 at step 13")
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"], one["step"]) for one in failures(run)] == [("died", 1, 13)]
    assert steps(metrics(run)) == steps(metrics(calm))
    assert same_checkpoint(run, calm)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_hang_is_found_before_and_in_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before Gloo's own time-out. In later steps and in a save: above."""
    limits = (
        "--train.timeout_s",
        "1e5",
        "--faults.timeout_s",
        "1e5",
        "--faults.start_timeout_s",
        str(3 * FASTER),
    )
    hurry(monkeypatch, tmp_path / "runs" / "run")
    code, out = train(
        2,
        write_config(tmp_path, "1f1b"),
        "--parallel.pp",
        "2",
        *limits,
        "--inject",
        "hang rank 1 at step 0",
        "hang rank 0 at step 1",
    )
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"], one["phase"], one["saved"]) for one in failures(run)] == [
        ("hangs", 1, "setting up", 0),
        ("hangs", 0, "training", 0),
    ]
    assert re.search(
        r"rank 1 \(stage 1, .*\) hangs: nothing for .* s while setting up; starting again", out
    )
    assert re.search(r"rank 0 \(.*\) hangs: nothing for .* s in step 1 during F0@0", out)
    assert re.search(
        r"meanwhile rank 1 \(.*\) in step 1 during F0@1v0, waiting for recv over pp with rank 0",
        out,
    )
    assert [step for step, _, _ in steps(metrics(run))] == list(range(1, 7))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_job_goes_on_without_a_rank_that_does_not_come_back(tmp_path: Path) -> None:
    """A disk that is full at a save ends nothing; the batch is kept by accumulation."""
    config = write_config(tmp_path, "1f1b")
    code, out = train(
        2,
        config,
        "--parallel.dp",
        "2",
        *STEPS,
        "--checkpoint.asynchronous",
        "false",
        "--faults.min_ranks",
        "1",
        "--inject",
        "disk full at step 5",
        "lose rank 1 at step 12",
    )
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"], one["saved"]) for one in failures(run)] == [
        ("died", 1, 10),
        ("died", 1, 10),
    ]
    assert (
        "rank 1 (stage 0, replica 1, tensor part 0) was ended by SIGKILL in step 12 during F22@0v11"
        in out
    )
    assert (
        out.count(
            "rank 0 (stage 0, replica 0, tensor part 0) cannot write the checkpoint: [Errno 28]"
        )
        == 1
    )
    assert (
        out.count("training continues, and the next save tries again (1 of 3 failures in a row")
        == 1
    )
    assert "on 1 ranks, parallel.dp = 1, pipeline.num_microbatches = 4" in out
    assert "since the last time: parallel.dp: 2 -> 1" in out
    assert [step for step, _, _ in steps(metrics(run))] == list(range(1, 21))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_site_leaves_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one goes on from its own state with the whole batch; the one that returns begins
    with what that has trained, and both meet again."""
    monkeypatch.setattr(supervisor, "_LAST_SAVE_S", 0.5)  # of one that has begun without the site
    config = write_config(tmp_path)
    sites = (
        "--parallel.sites",
        "2",
        "--parallel.dp",
        "1",
        "--outer.every",
        "4",
        "--outer.fragments",
        "2",
        "--outer.delay",
        "1",
        "--faults.min_ranks",
        "1",
    )
    code, out = train(
        2, config, *sites, "--train.num_steps", "18", "--inject", "lose rank 1 at step 11"
    )
    assert code == 0, out
    run = tmp_path / "runs" / "run"
    assert [(one["kind"], one["rank"]) for one in failures(run)] == [("died", 1), ("died", 1)]
    assert "on 1 ranks, parallel.dp = 1, parallel.sites = 1, pipeline.num_microbatches = 4" in out
    assert "since the last time: parallel.sites: 2 -> 1" in out
    code, out = train(2, config, *sites, "--train.num_steps", "26")
    assert code == 0, out
    assert "resuming after step 18" in out
    assert [step for step, _, _ in steps(metrics(run))] == list(range(1, 27))
    assert any("sites_loss" in row for row in metrics(run) if row.get("step", 0) > 18)


def test_a_checkpoint_that_an_earlier_process_left_half_written_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Supervisor(from_mapping({"run": {"dir": str(tmp_path)}}, Config()), ["train"], [])
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda self, group: {})
    old, new = (tmp_path / "run" / "checkpoints" / f".step_{step:08d}.part" for step in (5, 10))
    looks: list[int] = []

    def sleep(seconds: float) -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            new.rename(new.with_name("step_00000010"))

    monkeypatch.setattr(time, "sleep", sleep)
    old.mkdir(parents=True)
    agent._start_workers(agent.get_worker_group())
    agent._await_save()
    assert not looks
    new.mkdir()
    agent._await_save()
    assert len(looks) == 3
    agent.close()


@pytest.mark.thorough
def test_hopeless_jobs_are_not_tried_again(tmp_path: Path) -> None:
    code, out = train(2, write_config(tmp_path), "--parallel.pp", "2", "--data.corpus", "nowhere")
    assert code == 1
    assert out.count("hybridpar: nowhere: does not exist") == 1
    assert "before it had begun" not in out
    with in_use(tmp_path / "runs" / "run"):
        code, out = train(2, write_config(tmp_path), "--parallel.pp", "2")
    assert code == 1
    assert out.count("another job is training in") == 1
    wanted = (
        rf"right now: process {os.getpid()} on .*, since \d{{4}}-.*, `.*`; try another name, or "
        r"wait until it "
        rf"has ended, or end it: kill {os.getpid()}$"
    )
    assert re.search(wanted, out, re.MULTILINE), out
    assert "before it had begun" not in out
    assert not (tmp_path / "runs" / "run" / "failures.jsonl").exists(), (
        "nothing is written into another job's folder"
    )
    code, out = train(2, write_config(tmp_path), "--parallel.pp", "2", "--memory.budget", "150000")
    assert code == 1
    assert re.findall(
        r"memory\.budget = 150000: too small: .* needs (\d+) bytes at a time", out
    ) == ["204800"]
    assert "starting again" not in out
    code, out = train(2, write_config(tmp_path), "--parallel.pp", "2", "--memory.limit", "150000")
    assert code == 1
    assert len(re.findall(r"memory\.limit = 150000: too small: .*; try \d+", out)) == 1
    assert "starting again" not in out
    config = from_mapping({"parallel": {"pp": 2}}, Config())
    with pytest.raises(ConfigError, match="must divide the number of processes, 3"):
        supervise(config, 3, ["train"])
    with pytest.raises(ConfigError, match="the job has 2 ranks"):
        supervise(config, 2, ["train"], ["kill rank 2 at step 3"])


@pytest.mark.timeout(300)
def test_a_job_stopped_by_an_anomaly_does_not_restart(tmp_path: Path) -> None:
    code, out = train(
        2,
        write_config(tmp_path),
        "--parallel.pp",
        "2",
        *STEPS,
        "--anomalies.on_non_finite",
        "stop",
        "--inject",
        "nan gradient rank 0 at step 7",
    )
    assert code == 1, out
    assert re.findall(r"resuming after step|starting again", out) == []
    assert "step 7: the gradient norm is nan; stopped, the newest checkpoint is of step 5" in out
    (stopped,) = failures(tmp_path / "runs" / "run")
    assert (stopped["kind"], stopped["saved"]) == ("refused", 5)
    assert stopped["text"].startswith("all ranks stopped: step 7: the gradient norm is nan")
    assert "before it had begun" not in out


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_torchrun_starts_the_same_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends rank 0 as soon as rank 1 is dead, while rank 0 still gives the save of step 10 time
    to end."""
    monkeypatch.setattr(sys.modules[Saver.__module__], "_GRACE_S", 1.0)
    code, out = torchrun(
        2,
        "train",
        write_config(tmp_path),
        "--parallel.pp",
        "2",
        *STEPS,
        "--inject",
        "kill rank 1 at step 11",
        max_restarts=1,
    ).end()
    assert code == 0, out
    assert "rank 0 (stage 0, replica 0, tensor part 0) lost contact with rank 1 during" in out, out
    assert re.search("resuming after step (5|10)$", out, re.MULTILINE), out
    assert len(steps(metrics(tmp_path / "runs" / "run"))) == 20


def test_how_long_a_rank_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it is another process, nor where nobody looked meanwhile."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    (tmp_path / "flight").mkdir()
    flight = Flight(flight_path(tmp_path, 0), {"pid": os.getpid(), "place": {}})
    watch = Watch(tmp_path)
    running: Any = {0: SimpleNamespace(pid=os.getpid(), poll=lambda: None)}

    def look() -> tuple[float, bool]:
        (seen,) = watch.look(running)
        return seen.idle_s, seen.record is not None

    assert look() == (0.0, True)
    now += 1
    assert look() == (1.0, True)
    now += 1
    assert look() == (2.0, True)
    flight.tick()
    now += 1
    assert look() == (0.0, True)
    now += 1
    assert look() == (1.0, True)
    now += 60
    assert look() == (0.0, True)
    running[0].pid = os.getppid()
    now += 1
    assert look() == (0.0, False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["before its record", "while it imports"])
def test_a_rank_that_hangs_before_it_has_begun_is_found(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before it has any record; or hangs where the other one waits for it already."""
    hung = tmp_path / "hung"
    over = tmp_path / "over"
    look = Watch.look

    def hang() -> None:
        if os.environ.get("RANK") == "1" and not hung.exists():
            hung.touch()
            os.kill(os.getpid(), signal.SIGSTOP) if "before" in where else time.sleep(LONG_S)

    def begin(args: Any) -> int:
        hang()
        return main(args)

    def begin_training(*args: Any, **options: Any) -> Any:
        hang()
        return train_here(*args, **options)

    def see(self: Watch, processes: Any) -> list[Seen]:
        seen = [
            replace(one, idle_s=FASTER * one.idle_s) if hung.exists() and not over.exists() else one
            for one in look(self, processes)
        ]
        if any(one.hangs for one in seen):
            over.touch()
        return seen

    train_here = loop.train
    if "before" in where:
        monkeypatch.setitem(forked.MAINS, "hybridpar", begin)
    else:
        monkeypatch.setattr(loop, "train", begin_training)
    monkeypatch.setattr(Watch, "look", see)
    code, out = train(
        2, write_config(tmp_path), "--parallel.pp", "2", "--faults.start_timeout_s", str(3 * FASTER)
    )
    assert code == 0, out
    hangs = "is stopped, and hangs" if "before" in where else "hangs"
    assert re.findall(r"hybridpar: (rank.*): nothing for .* s(.*; starting again.*)", out) == [
        (f"rank 1 {hangs}", " before it had begun; starting again after step 0")
    ], out
    written = (tmp_path / "runs" / "run" / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["rank"] for line in written] == [1]  # though there was no folder then


ENDLESS = (
    "--parallel.pp",
    "2",
    "--train.num_steps",
    "100000",
    "--optim.decay",
    "constant",
    "--train.eval_interval",
    "0",
    "--train.save_interval",
    "5",
)


def begin_endless(config: Path, *flags: str) -> tuple[Job, list[int]]:
    """A job that trains until it is ended, and the processes of its ranks."""
    job = Job("hybridpar", "train", config, "--ranks", "2", *ENDLESS, *flags)
    while int(job.wait_for(r"^step (\d+)/")) < 5:
        pass
    records = [read(flight_path(config.parent / "runs" / "run", rank)) for rank in range(2)]
    return job, [record.who["pid"] for record in records if record is not None]


def is_there(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has asked for its exit code has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="finds records in /proc")
@pytest.mark.timeout(300)
def test_a_hang_is_found_where_the_records_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal then ends also a rank that is stopped."""
    look = Watch.look
    much_faster = 100  # the rank may be stopped in a phase that may take 600 s
    monkeypatch.setattr(
        Watch,
        "look",
        lambda self, processes: [
            replace(one, idle_s=much_faster * one.idle_s) if one.stopped and one.record else one
            for one in look(self, processes)
        ],
    )
    monkeypatch.setattr(agent, "QUIT_S", 1)
    job, pids = begin_endless(write_config(tmp_path))
    shutil.rmtree(tmp_path / "runs" / "run" / "flight")
    os.kill(pids[1], signal.SIGSTOP)
    said = job.wait_for("^hybridpar: (rank 1 .*)$")
    assert re.search(
        r"is stopped, and hangs: nothing for \d+.\d s (in step \d+|while \w+)", said
    ), said
    saved = int(job.wait_for(r"resuming after step (\d+)$"))
    while int(job.wait_for(r"^step (\d+)/")) < saved + 5:
        pass
    record = read(flight_path(tmp_path / "runs" / "run", 1))
    assert record is not None
    monkeypatch.undo()
    os.kill(record.who["pid"], signal.SIGSTOP)
    os.kill(job.pid, signal.SIGTERM)
    job.wait_for("SIGTERM: finishing")
    time.sleep(SAME_REQUEST_S + 0.2)
    os.kill(job.pid, signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM
    assert not is_there(record.who["pid"])


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.timeout(300)
def test_ranks_that_are_left_end_and_the_next_job_waits_for_them(tmp_path: Path) -> None:
    """One is stopped, so the other one waits for it."""
    config = write_config(tmp_path)
    job, pids = begin_endless(config, "--faults.timeout_s", "8")
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(job.pid, signal.SIGKILL)
    assert job.end()[0] == -signal.SIGKILL
    following = Job("hybridpar", "train", config, "--ranks", "2", *ENDLESS)
    assert re.search(
        rf"process {pids[0]} on .*, since .*, `hybridpar train {config} --ranks 2 .*`, whose "
        r"launcher has "
        "ended: it saves, and ends within 300 s",
        following.wait_for("^hybridpar: waiting for (.*)$"),
    )
    following.wait_for(r"resuming after step (\d+)$")
    end = time.monotonic() + LONG_S  # a process gives its locks back a moment before it is gone
    while any(map(is_there, pids)):
        assert time.monotonic() < end, job.output
        time.sleep(0.02)
    os.kill(following.pid, signal.SIGTERM)
    assert following.end()[0] == 128 + signal.SIGTERM


def listening(port: int) -> list[str]:
    """The addresses on which this machine listens at a port, as Linux writes them."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_the_rendezvous_listens_on_loopback_alone() -> None:
    handler = Loopback()
    assert handler.get_run_id() == f"{JOB}{os.getpid()}"  # by which ranks know whom to end with
    found = handler.next_rendezvous()
    port = found.bootstrap_store_info.master_port
    assert listening(port) == [f"0100007F:{port:04X}"]
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    client.set("a", "b")
    assert found.store.get("a") == b"b"
    assert handler.next_rendezvous().bootstrap_store_info.master_port != port


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_closed_terminal_is_survived_under_nohup_and_another_signal_saves(tmp_path: Path) -> None:
    """Both reach the supervisor alone, which hands them on."""
    config = write_config(tmp_path)
    flags = (
        "--parallel.pp",
        "2",
        "--train.num_steps",
        "100000",
        "--optim.decay",
        "constant",
        "--train.eval_interval",
        "5",
        "--train.save_interval",
        "0",
        "--train.stop_signals",
        "TERM",
        "HUP",
        "USR1",
    )

    def begin(at_hangup: signal.Handlers) -> Job:
        before = signal.signal(signal.SIGHUP, at_hangup)
        try:
            return Job("hybridpar", "train", config, "--ranks", "2", *flags)
        finally:
            signal.signal(signal.SIGHUP, before)

    def until(job: Job, step: int) -> None:
        while int(job.wait_for(r"^step (\d+)/")) < step:
            pass

    job = begin(signal.SIG_IGN)
    until(job, 5)
    os.kill(job.pid, signal.SIGHUP)
    until(job, 10)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.end()[0] == 128 + signal.SIGUSR1
    root = tmp_path / "runs" / "run"
    (saved,) = saved_steps(root / "checkpoints")
    assert saved >= 10
    job = begin(signal.SIG_DFL)
    until(job, saved + 5)
    os.kill(job.pid, signal.SIGHUP)
    assert job.end()[0] == 128 + signal.SIGHUP
    assert saved_steps(root / "checkpoints")[0] > saved
    assert not (root / "failures.jsonl").exists()
    run_job(2, "train", config, *flags, "--train.num_steps", str(saved + 5), "--run.name", "calm")
    calm = steps(metrics(tmp_path / "runs" / "calm"))
    assert steps(metrics(root))[: len(calm)] == calm
