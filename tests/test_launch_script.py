"""scripts/launch.sh: what its variables may be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout")


def launch(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `echo` instead of Python, which shows the command that would run."""
    script = f"PYTHON=echo; source '{SCRIPT}'; launch some.toml --optim.lr 1 {' '.join(flags)}"
    return subprocess.run(
        ["bash", "-euc", script],
        text=True,
        timeout=200,
        capture_output=True,
        env={"PATH": os.environ["PATH"], **variables},
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TP", "x"),
        ("TP", "0"),
        ("PP", "-1"),
        ("DP", "1.5"),
        ("PP", "08"),
        ("NNODES", "x"),
        ("BATCH", "0"),
        ("MASTER_PORT", "0"),
        ("NODE_RANK", "-1"),
        ("RESTARTS", "no"),
    ],
)
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    run = launch(**{"TP": "1", "PP": "1", "DP": "1", name: value})
    assert run.returncode == 2
    assert not run.stdout
    least = 0 if name in ("NODE_RANK", "RESTARTS") else 1
    assert run.stderr == (
        f"hybridpar: {name} = '{value}': must be a whole number, at least {least}; "
        f"try {name}={least}, or leave it out\n"
    )


def test_a_whole_grid_is_taken_as_it_is() -> None:
    run = launch(TP="2", PP="1", DP="3")
    assert run.stdout == (
        "-m hybridpar train some.toml --ranks 6 --parallel.tp 2 --parallel.pp 1 --parallel.dp 3 "
        "--optim.lr 1\n"
    )


def test_the_number_of_processes_is_named_ranks() -> None:
    for flags in (("--ranks", "4"), ("--ranks=4",)):
        run = launch(*flags, TP="2", PP="1", DP="2")
        assert run.stdout == (
            "-m hybridpar train some.toml --ranks 4 --parallel.tp 2 --parallel.pp 1 --parallel.dp "
            "2 --optim.lr 1\n"
        )
    for wrong in (("--ranks", "two"), ("--ranks", "0"), ("--ranks",)):
        run = launch(*wrong, TP="2", PP="1", DP="2")
        assert (run.returncode, run.stdout) == (2, "")
        assert "must be a whole number, at least 1; try --ranks 1" in run.stderr
    run = launch(TP="2", PP="1", DP="2", NPROC="4")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "hybridpar: NPROC = '4': is named --ranks; leave the variable out, and add --ranks 4\n"
    )


def test_the_first_of_several_hosts_has_number_zero() -> None:
    run = launch("--ranks", "1", NNODES="2", NODE_RANK="0", MASTER_ADDR="host0", TP="2")
    assert run.stdout == (
        "-m hybridpar.train.launching.hosts --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 "
        "--max-restarts 0 "
        "--nproc-per-node 1 some.toml --parallel.tp 2 --optim.lr 1\n"
    )
    assert not run.stderr
    run = launch("--ranks", "1", NNODES="2", NODE_RANK="2", MASTER_ADDR="host0", TP="2")
    assert (run.returncode, run.stdout) == (2, "")
    assert "NODE_RANK = '2': must be below NNODES = 2" in run.stderr


@pytest.mark.parametrize("hosts", ["1", "2"])
def test_the_launcher_takes_the_place_of_the_shell(tmp_path: Path, hosts: str) -> None:
    """So that a signal to the script is one to the launcher."""
    shows_its_number = tmp_path / "python"
    shows_its_number.write_text("#!/bin/sh\necho $$\n")
    shows_its_number.chmod(0o755)
    variables = {
        "TP": "1",
        "PP": "2",
        "DP": "1",
        "NNODES": hosts,
        "NODE_RANK": "0",
        "MASTER_ADDR": "a",
    }
    script = (
        f"PYTHON='{shows_its_number}'; source '{SCRIPT}'; launch some.toml --ranks 2; echo not "
        "reached"
    )
    with subprocess.Popen(
        ["bash", "-euc", script],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], **variables},
    ) as process:
        out, _ = process.communicate(timeout=200)
    assert out == f"{process.pid}\n"
