"""Watchdogs of ranks: real processes that hang, are stopped, and lose their launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train.forked import torchrun
from train.runs import LONG_S, metrics, steps, write_config

from hybridpar.config import FaultsConfig
from hybridpar.train.faults import watchdog

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="Linux has descriptors of processes"
)
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from hybridpar.config import Launch
from hybridpar.train.faults import watchdog
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert "torch" not in sys.modules
supervised, folder, what = int(sys.argv[1]), Path(sys.argv[2], str(os.getpid())), sys.argv[3]
folder.mkdir()
flight = watchdog.begin(Launch(1, 1, 2, 2, True, elastic=True, supervisor=os.getppid() * supervised))
who = {"rank": 1, "pid": os.getpid(), "name": "rank 1 (stage 1)", "axes": {"pp": [0, 1]}, "timeout_s": 1.0}
flight.move(folder / "rank_00001", who)
(folder / "rank_00001").unlink()
flight.phase("training", float(os.environ.get("LIMIT_S", "1")))
flight.action("F", 1, 6, 0)
os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, as ranks share a pipe
if "waits" in what:
    flight.wait("recv", "pp", 0)
if "stopped" in what:
    os.kill(os.getpid(), signal.SIGSTOP)
ctypes.PyDLL(None).sleep(int(sys.argv[4]))  # with Python's lock
"""
LAUNCHER = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:4], what, "600"]) for what in sys.argv[4:]]
time.sleep(600)
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("what", "found"),
    [("hangs", "hangs"), ("stopped waits", "is stopped, and hangs"), ("waits", "")],
)
def test_a_rank_that_hangs_is_ended_unless_it_waits(tmp_path: Path, what: str, found: str) -> None:
    """Also while it keeps Python's lock, and where its record's file is gone."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, "0", tmp_path, what, "6" if what == "waits" else "600"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == (-signal.SIGKILL if found else 0)
    wanted = (
        rf"hybridpar: rank 1 \(stage 1\) {found}: nothing for \d\.\d s in step 7 during F6@1v0"
        r".* \(micro-batch 6\); ended, for the launcher to start again\n"
    )
    assert re.fullmatch(wanted if found else "", done.stderr), done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("supervised", ["0", "1"])
def test_nobody_is_left_where_the_launcher_was_killed(tmp_path: Path, supervised: str) -> None:
    """The output ends, so neither ranks nor their watchdogs have it open any more."""
    command = [sys.executable, "-c", LAUNCHER, RANK, supervised, str(tmp_path), "waits", "stopped"]
    env = os.environ | {"LIMIT_S": "100"}  # else a rank may be ended before the other one has begun
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.kill()
        said = launcher.stdout.read()
    assert said.count("ended, as its launcher has ended") == 2, said
    assert "rank 1 (stage 1) is stopped, and hangs: nothing for" in said
    end = time.monotonic() + LONG_S
    while any(is_there(pid) for pid in pids):  # a process that ends closes its output first
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_torchrun_starts_again_where_a_rank_hangs(tmp_path: Path) -> None:
    code, out = torchrun(
        2,
        "train",
        write_config(tmp_path),
        "--parallel.pp",
        "2",
        "--faults.timeout_s",
        "6",
        "--inject",
        "hang rank 1 at step 5",
        max_restarts=1,
    ).end()
    assert code == 0, out
    assert re.search(
        r"hybridpar: rank 1 \(stage 1, replica 0, tensor part 0\) hangs: nothing for .* s in step "
        r"5 "
        r"during .*; ended, for the launcher to start again$",
        out,
        re.MULTILINE,
    ), out
    assert "resuming after step 4" in out
    assert [step for step, _, _ in steps(metrics(tmp_path / "runs" / "run"))] == list(range(1, 7))


def test_defaults_are_those_of_the_configuration() -> None:
    assert (FaultsConfig().timeout_s, FaultsConfig().start_timeout_s) == (
        watchdog.STILL_S,
        watchdog.START_S,
    )


def is_there(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has asked for its exit code has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


AFTER_FIT = """
import hybridpar
from hybridpar.errors import HybridparError
from hybridpar.train.faults import watchdog
try:
    hybridpar.Trainer(train={"device": "cuda"}).fit()
except HybridparError:
    print(watchdog.current().read().limit_s)
"""


@pytest.mark.thorough
def test_a_program_may_take_its_time_after_fit(tmp_path: Path) -> None:
    """Also where it catches an error of fit."""
    torchrun_says = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "job",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", AFTER_FIT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | torchrun_says,
    )
    assert done.stdout == "0.0\n", done.stderr
