"""Whole jobs under torchrun: what they leave, Ctrl-C, a rank that is killed, and one message for
what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from train.forked import torchrun
from train.runs import LONG_S, metrics, run_job, steps, write_config

from hybridpar import flight
from hybridpar.train import stop
from hybridpar.train.folder import flight_path
from hybridpar.train.reporting.costs_file import read_costs

pytestmark = pytest.mark.ranks
LONG = (
    "--train.num_steps",
    "1000000",
    "--train.save_interval",
    "20",
    "--train.eval_interval",
    "0",
    "--train.timeout_s",
    "600",
)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.thorough
def test_an_interrupted_and_then_killed_job_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stop, "SAME_REQUEST_S", LONG_S
    )  # a busy launcher may take seconds to interrupt its ranks
    config = write_config(tmp_path)
    run = tmp_path / "runs" / "run"
    stopped = interrupt(config, run)
    last = kill_rank_1(config, run, stopped)
    end = last + 12
    flags = (
        "--train.num_steps",
        str(end),
        "--train.save_interval",
        "0",
        "--train.eval_interval",
        "0",
        "--verbose",
    )
    out = run_job(2, "train", config, "--parallel.pp", "2", *flags)
    assert f"resuming after step {last}" in out
    assert out.count(f"step {end}/{end}  loss") == 1
    assert [step for step, _, _ in steps(metrics(run))] == list(range(1, end + 1))
    check_trace(run)
    assert (
        len(re.findall(r"step time: .* ms measured .* ms simulated from the measured costs", out))
        == 1
    )
    costs = read_costs(run / "costs.json")
    assert (costs.shape.num_ranks, costs.schedule_options.schedule) == (2, "2bw")
    assert costs.measured.num_batches >= 3
    assert sorted(p.name for p in (run / "checkpoints" / f"step_{end:08d}").iterdir()) == [
        "manifest.json",
        "pp0-tp0.safetensors",
        "pp1-tp0.safetensors",
    ]
    assert (run / "sample.txt").exists()
    assert (run / "executed.svg").read_text().count("stage") >= 2


def test_a_job_of_two_ranks_goes_on_as_one(tmp_path: Path) -> None:
    """Batches are kept by accumulation; the losses are those of a job that had two to the end, but
    for rounding."""
    config = write_config(tmp_path)
    two = ("--parallel.dp", "2", "--parallel.zero", "1")
    for name, end in (("run", "3"), ("whole", "6")):
        run_job(
            2,
            "train",
            config,
            *two,
            "--train.num_steps",
            end,
            "--run.name",
            name,
            "--optim.decay",
            "constant",
        )
    out = run_job(
        1, "train", config, "--pipeline.num_microbatches", "4", "--optim.decay", "constant"
    )
    assert "since the last time: parallel.dp: 2 -> 1" in out
    assert "resuming after step 3" in out
    moved, whole = (steps(metrics(tmp_path / "runs" / name)) for name in ("run", "whole"))
    assert [step for step, _, _ in moved] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(moved, whole, strict=True):
        assert a == pytest.approx(b, rel=1e-4)  # fp32


def interrupt(config: Path, run: Path) -> int:
    """Starts the job, interrupts its launcher and its ranks, and returns the step it stopped after.

    So do batch systems, and the launcher then interrupts the ranks once more.
    """
    job = torchrun(2, "train", config, "--parallel.pp", "2", *LONG)
    job.wait_for(run / "checkpoints" / "step_00000020" / "manifest.json")
    for pid in (*children(job.pid), job.pid):
        os.kill(pid, signal.SIGINT)
    _, out = job.end()
    stopped = int(re.findall(r"stopped after step (\d+)", out)[0])
    assert (run / "checkpoints" / f"step_{stopped:08d}" / "manifest.json").exists()
    assert steps(metrics(run))[-1][0] == stopped
    return stopped


def kill_rank_1(config: Path, run: Path, stopped: int) -> int:
    """Starts it again, kills one of its ranks, and returns the step of the newest checkpoint."""
    job = torchrun(2, "train", config, "--parallel.pp", "2", *LONG)
    job.wait_for(run / "checkpoints" / f"step_{stopped // 20 * 20 + 40:08d}" / "manifest.json")
    second = flight.read(flight_path(run, 1))
    assert second is not None
    os.kill(second.who["pid"], signal.SIGKILL)
    code, out = job.end()  # long before the collectives' time is over
    assert code != 0
    assert f"resuming after step {stopped}" in out
    # another rank: while all gather, as in a save
    assert re.search(
        r"rank 0 \(stage 0, replica 0, tensor part 0\) lost contact with (rank 1|another rank)", out
    ), out
    root_cause = out[out.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert "Signal 9 (SIGKILL)" in root_cause
    return max(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*"))


def check_trace(run: Path) -> None:
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}
    assert any(e["cat"] == "idle" for e in events if e["ph"] == "X")
    beside = {e["name"].rstrip("0123456789@") for e in events if e["ph"] == "X" and e["tid"]}
    assert beside & {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}, (
        "which of them took time depends on who came first"
    )
    assert any(e["name"].startswith("F") and e["dur"] > 0 for e in events if e["ph"] == "X")
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    # an activation cannot be used before it was sent; the clocks of one machine agree to far less
    # than 20 ms
    assert all(ends[i] - starts[i] > -20e3 for i in starts)


def test_bad_data_are_reported_once_and_the_job_ends(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        run_job(
            2, "train", write_config(tmp_path), "--parallel.tp", "2", "--data.corpus", "nowhere"
        )
    assert str(failed.value).count("hybridpar: nowhere: does not exist") == 1
    assert not (tmp_path / "runs" / "run" / "config.toml").exists()
