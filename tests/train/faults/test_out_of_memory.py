"""A rank that the kernel's OOM killer ended is told from one that somebody has killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from train.forked import Job
from train.runs import write_config

from hybridpar import flight
from hybridpar.config import load_toml
from hybridpar.train.faults import out_of_memory, supervisor
from hybridpar.train.faults.out_of_memory import OomKiller
from hybridpar.train.folder import flight_path
from hybridpar.validate import resolve


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    path.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 4\noom_group_kill 0\n")
    return path


def killed() -> int:
    """The pid of a process that SIGKILL has ended."""
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return process.pid


def test_the_counter_of_the_control_group_tells(tmp_path: Path, counter: Path) -> None:
    killer = OomKiller((counter, tmp_path / "none"), log=tmp_path / "none")
    killer.begin()
    assert killer.evidence(killed()) == "", "somebody else has killed it"
    counter.write_text(counter.read_text().replace("oom_kill 4", "oom_kill 5"))
    assert killer.evidence(killed()) == (
        "out of memory: the kernel's OOM killer ended it (oom_kill of its control group went to 5)"
    )


def test_the_kernels_log_tells(tmp_path: Path) -> None:
    """Only what it says later: numbers of processes come back."""
    log = tmp_path / "kmsg"
    pid = killed()
    line = f"6,1,9,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:100kB\n"
    log.write_text(line)
    killer = OomKiller((), log)
    killer.begin()
    assert killer.evidence(pid) == ""
    with log.open("a") as file:
        file.write(line)
    assert (
        killer.evidence(pid)
        == "out of memory: the kernel's OOM killer ended it, as the kernel's log says"
    )
    killer.close()


def test_free_memory_is_named_if_the_kernel_says_nothing(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    killer = OomKiller((), tmp_path / "none", meminfo)
    killer.begin()
    for free in (2_000_000, 30_000, 4_000_000):
        meminfo.write_text(f"MemTotal:       4000000 kB\nMemAvailable:   {free} kB\n")
        killer.look()
    said = killer.evidence(killed())
    assert said.startswith(
        "perhaps out of memory: the kernel's OOM killer sends this signal, and neither its counter"
    )
    assert "at least 0.0307 GB were free before" in said


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/user.slice/job\n", "user.slice/job/memory.events"),
        ("0::/elsewhere\n", "memory.events"),
        ("5:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control"),
    ],
)
def test_the_counters_of_both_versions_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, file: str
) -> None:
    root = tmp_path / "cgroup"
    own = tmp_path / "self"
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("oom_kill 7\n")
    own.write_text(membership)
    monkeypatch.setattr(out_of_memory, "_CGROUPS", root)
    counters = tuple(out_of_memory._counters(own))
    assert root / file in counters
    assert OomKiller(counters)._count() == 7


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 40 MB, where this machine lets us make one."""
    own = [
        path.parent for path in out_of_memory._counters(Path("/proc/self/cgroup")) if path.exists()
    ]
    if not own:
        pytest.skip("this machine has no control groups of memory")
    group = own[0] / f"hybridpar_test_{os.getpid()}"
    limit = group / (
        "memory.max" if (own[0] / "memory.events").exists() else "memory.limit_in_bytes"
    )
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this user may make no control group")
    try:
        if not limit.exists():
            pytest.skip("this control group has no control of memory")
        limit.write_text("40000000")
        yield group
    finally:
        end = time.monotonic() + 30
        while group.exists() and time.monotonic() < end:  # until the last process of it is gone
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)


def test_a_real_oom_killer_is_recognized(small_group: Path) -> None:
    names = [small_group / name for name in ("memory.events", "memory.oom_control")]
    killer = OomKiller(tuple(path for path in names if path.exists()))
    killer.begin()
    join = (
        f"echo $$ > {small_group / 'cgroup.procs'} && exec {sys.executable} -c 'x = "
        "bytearray(10**9)'"
    )
    process = subprocess.Popen(["sh", "-c", join])
    assert process.wait(60) == -signal.SIGKILL
    assert killer.evidence(process.pid).startswith(
        "out of memory: the kernel's OOM killer ended it"
    )
    assert killer.evidence(1) == killer.evidence(process.pid) or "log" in killer.evidence(
        process.pid
    )
    killer.close()


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_job_names_the_oom_killer_and_what_needs_less(
    tmp_path: Path, counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        supervisor, "OomKiller", partial(OomKiller, (counter,), log=tmp_path / "none")
    )
    advise: Callable[..., str] = lambda config: f"advice for {config.parallel.num_ranks} ranks"  # noqa: E731
    monkeypatch.setattr("hybridpar.cli.fitting.saves_most", advise)
    job = Job(
        "hybridpar",
        "train",
        write_config(tmp_path),
        "--ranks",
        "2",
        "--parallel.dp",
        "2",
        "--inject",
        "hang rank 1 at step 4",
    )
    run = tmp_path / "runs" / "run"
    job.wait_for(run / "injected" / "hang-rank-1-at-step-4")
    record = flight.read(flight_path(run, 1))
    assert record is not None
    counter.write_text("oom_kill 5\n")
    os.kill(record.who["pid"], signal.SIGKILL)
    code, out = job.end()
    assert code == 0, out
    assert re.search(
        r"hybridpar: rank 1 \(.*\) was ended by SIGKILL .*; out of memory: the kernel's OOM "
        r"killer ended it \(oom_kill of its control group went to 5\); starting again",
        out,
    ), out
    assert out.count("hybridpar: advice for 2 ranks\n") == 1


def test_the_setting_that_saves_most_is_named(tmp_path: Path) -> None:
    from hybridpar.cli.fitting import saves_most

    config = resolve(load_toml(write_config(tmp_path)), 1)
    assert re.fullmatch(
        r"a rank is predicted to need \S+ GB; \S.* saves most: \S+ GB", saves_most(config)
    )
