"""HiGHS in a process of its own: what it answers, and that time limits hold whatever it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from hybridpar.placement import Options, make_workload, place, problems
from hybridpar.placement.solvers import highs, program
from hybridpar.placement.solvers.highs import OUT_OF_TIME, Highs, Program

from .graphs import document, layered_training

CHANGED = """
import os, sys
from multiprocessing.connection import Connection
sys.path.insert(0, {folder!r})
import process
def answer(program):
    while True:
        {instead}
process.answer = answer
process.serve(Connection(int(sys.argv[1])))
"""
LONG = 200.0
"""Seconds: what is stuck would take as long at least."""


def knapsack(capacity: float = 5.0) -> Program:
    """Most of 3 x + 4 y + 2 z with 2 x + 3 y + z <= capacity, all 0 or 1. At least one of x and
    y."""
    matrix = csr_array(np.array([[2.0, 3.0, 1.0], [-1.0, -1.0, 0.0]]))
    return Program(
        -np.array([3.0, 4.0, 2.0]),
        matrix,
        np.array([capacity, -1.0]),
        np.zeros(3),
        np.ones(3),
        np.ones(3),
    )


def soon() -> float:
    return time.monotonic() + LONG


@pytest.fixture
def instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has HiGHS do something else, without end."""

    def change(what: str) -> None:
        folder = str(Path(highs.__file__).parent)
        (script := tmp_path / "changed.py").write_text(CHANGED.format(folder=folder, instead=what))
        monkeypatch.setattr(highs, "_SCRIPT", script)

    return change


def test_programs_are_solved_one_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    with Highs() as process:
        best = process.solve(knapsack(), soon())
        assert (best.values.round().tolist(), best.proven, best.note) == ([1, 1, 0], True, "")
        assert best.bound == pytest.approx(-7)
        none = process.solve(knapsack(1.0), soon())
        assert (len(none.values), none.proven, none.infeasible) == (0, False, True)
        assert process.solve(knapsack(2.0), soon()).values.round().tolist() == [1, 0, 0]
    assert capfd.readouterr() == ("", "")
    assert process._process.returncode is not None


def test_a_solver_that_ignores_its_clock_is_ended(instead: Callable[[str], None]) -> None:
    instead("pass")
    with Highs() as process:
        start = time.monotonic()
        for _ in range(2):  # and started again
            answer = process.solve(knapsack(), time.monotonic() + 0.2)
            assert (len(answer.values), answer.bound, answer.note) == (0, -np.inf, OUT_OF_TIME)
        assert process.solve(knapsack(), time.monotonic()).note == OUT_OF_TIME
        assert time.monotonic() - start < LONG


def test_a_process_that_does_not_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may take seconds to start one, which is no reason to miss a time limit."""
    (script := tmp_path / "late.py").write_text(f"import time; time.sleep({LONG})")
    monkeypatch.setattr(highs, "_SCRIPT", script)
    with Highs() as process:
        assert process.solve(knapsack(), time.monotonic() + 0.2).note == OUT_OF_TIME
        assert process._process.poll() is None


@pytest.mark.thorough
@pytest.mark.parametrize("solver", ["milp", "milp-contiguous", "latency-milp"])
def test_a_stuck_program_leaves_what_was_found_before(
    solver: str, instead: Callable[[str], None], only_highs_takes_time: None
) -> None:
    instead("pass")
    training = layered_training(3, 3, 3, k=3)
    chain = make_workload(
        document(
            40,
            [(v, v + i) for v in range(36) for i in (1, 3)],
            cost=[0.3] * 40,
            k=3,
            memory=9.0,
            num_cpus=8,
        )
    )
    w = chain if solver == "latency-milp" else training
    placement = place(w, solver, Options(time_limit=1.0))
    assert not problems(w, placement.devices)
    assert placement.note == OUT_OF_TIME
    assert 0 < placement.bound < placement.objective
    assert 0 < placement.gap < 1
    if solver != "latency-milp":
        assert placement.objective <= place(w, "dpl").objective


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("death", "note"),
    [
        ("os.kill(os.getpid(), 9)", "perhaps as there was not memory enough"),
        ("os._exit(3)", "with status 3"),
    ],
)
def test_a_process_that_dies_is_said(death: str, note: str, instead: Callable[[str], None]) -> None:
    instead(death)
    with Highs() as process:
        answer = process.solve(knapsack(), soon())
    assert note in answer.note
    assert not answer.proven
    assert not answer.infeasible


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("started", [False, True])
def test_it_ends_with_its_parent(started: bool, capfd: pytest.CaptureFixture[str]) -> None:
    process = Highs()
    if started:
        assert process._connection.poll(LONG)
    process._connection.close()
    assert process._process.wait(LONG) == 0
    assert capfd.readouterr() == ("", "")


def test_programs_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_NUMBERS", 500)
    w = layered_training(3, 3, 3, k=3)
    placement = place(w, "milp", Options(time_limit=1.0))
    assert placement.note == "the graph is too large for integer programming on so many devices"
    assert placement.bound < placement.objective <= place(w, "dpl").objective
