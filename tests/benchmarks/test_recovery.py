"""The faults that benchmarks.recovery draws, how a disturbed job finds its processes, and what
counts as a recovery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disturbed_job import INJECTED, MARK, STARTS, DisturbedJob, _suspects
from benchmarks.recovery import KINDS, MODES, config_of, draw_faults, is_well, steps_of, summary
from hybridpar.config import Config
from hybridpar.train.faults.inject import parse_faults
from hybridpar.validate import resolve


@pytest.mark.parametrize("mode", MODES)
def test_every_job_has_a_fault_of_each_kind_in_an_order_that_the_seed_decides(mode: str) -> None:
    drawn = [draw_faults(0, mode, number, len(KINDS)) for number in range(2)]
    assert drawn[0] == draw_faults(0, mode, 0, len(KINDS))
    assert drawn[0] != draw_faults(1, mode, 0, len(KINDS))
    for number, faults in enumerate(drawn):
        names = {choices[number % len(choices)].name for choices in KINDS}
        assert {fault.kind.name for fault in faults} == names
        assert len(faults) == len(KINDS)


@pytest.mark.parametrize("mode", MODES)
def test_injected_faults_are_valid_in_every_mode_and_steps_increase(mode: str) -> None:
    faults = draw_faults(0, mode, 0, len(KINDS))
    config = resolve(config_of(mode, steps_of(faults)), 4)
    assert parse_faults([fault.text for fault in faults if fault.kind.target == INJECTED], config)
    later = [fault.step for fault in faults if fault.kind.moment not in STARTS]
    assert later == sorted(set(later))


def test_a_fault_of_a_start_comes_first_or_after_a_fault_that_ends_all_ranks() -> None:
    for number in range(20):
        before = None
        for fault in draw_faults(number, "plain", number, len(KINDS)):
            if fault.kind.moment in STARTS and before is not None:
                assert before.kind.ends_ranks
                assert before.kind.moment not in STARTS
            before = fault


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_processes_of_a_job_are_found_whoever_their_parent_is_and_are_ended(tmp_path: Path) -> None:
    job = DisturbedJob(tmp_path / "job", tmp_path / "config.toml", Config(), [])
    program = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "print(flush=True)"
    )
    environment = os.environ | {MARK: job._token}
    job._process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    with job._process:
        assert job._process.stdout is not None
        job._process.stdout.readline()
        job._process.wait()
        (orphan,) = job._processes()
        os.kill(orphan, signal.SIGSTOP)
        job._kill_all()
        assert job._processes() == []


def test_a_fault_counts_as_a_recovery_if_nothing_about_it_or_its_job_is_wrong() -> None:
    fault = {"kind": KINDS[0][0].name, "wrong": [], "noticed_s": 0.1}
    unnoticed = fault | {"wrong": ["was not noticed within 6 s"]}
    job: dict[str, Any] = {
        "mode": "plain",
        "job": 0,
        "num_faults": 2,
        "left_over": 0,
        "checkpoints_looked_at": 3,
        "wrong": [],
        "faults": [fault, unnoticed],
    }
    other = job | {"job": 1, "faults": [fault, fault]}
    assert (is_well(job), is_well(other)) == (False, True)
    assert summary([job, other])["recoveries"] == 3
    assert summary([job, other | {"wrong": ["step 4 differs"]}])["recoveries"] == 1
    assert json.dumps(summary([job]))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("the link between rank 0 and rank 2 is lost: rank 0 (stage 0) ..", {"0", "2"}),
        ("ranks 3, 1 wait for each other in a circle: rank 3 (stage 1) ..", {"1", "3"}),
        ("rank 1 (stage 0) hangs: nothing for 3.0 s in step 7", set()),
    ],
)
def test_both_ends_of_a_lost_link_are_suspects(text: str, ranks: set[str]) -> None:
    assert _suspects(text) == ranks
