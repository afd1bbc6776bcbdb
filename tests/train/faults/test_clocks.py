"""Times of several processes on one clock: nothing is received before it was sent."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from train.runs import run_job, write_config

from hybridpar.grid import ProcessGrid
from hybridpar.runtime.recording import Event, Usage
from hybridpar.schedules.action import Action, Kind
from hybridpar.train.faults import clocks
from hybridpar.train.faults.clocks import Shift, best
from hybridpar.train.reporting import trace

DELAYS = st.floats(1e-6, 0.1)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=20))
def test_a_skewed_clock_is_corrected_to_within_half_the_least_round_trip(
    skew: float, delays: list[tuple[float, float, float]]
) -> None:
    """Delays: until the next exchange, on the way there, and on the way back."""
    now = 0.0
    exchanges = []
    for pause, there, back in delays:
        now += pause
        exchanges.append((now + skew, now + there, now + there + back + skew))
        now += there + back
    shift = best(exchanges)
    rounding = 1e-9  # of times up to 1e6 s
    assert abs(shift.seconds + skew) <= shift.error + rounding
    assert shift.error <= min(there + back for _, there, back in delays) / 2 + rounding


SKEWS = 0.0, 5000.0, 5000.0, -3000.0


@pytest.mark.ranks
def test_hosts_clocks_are_compared_and_ranks_of_a_host_agree() -> None:
    """Three hosts, as far as clocks go: rank 0, ranks 1 and 2, rank 3."""
    shifts: list[Shift] = run_ranks(_skewed, 4)
    assert shifts[0] == Shift()
    assert shifts[1] == shifts[2]
    for shift, skew in zip(shifts, SKEWS, strict=True):
        assert abs(shift.seconds + skew) <= shift.error + 1e-9
        assert 0 <= shift.error < 1000.0, "less than what the clocks differ by"


def _skewed() -> Shift:
    grid = ProcessGrid(dp=4)
    clock = time.perf_counter
    skew = SKEWS[grid.rank]
    clocks._host = lambda: str(skew)
    clocks.time = type("Skewed", (), {"perf_counter": staticmethod(lambda: clock() + skew)})  # type: ignore[assignment]
    return clocks.shift_to_first(grid)


@pytest.mark.ranks
def test_times_of_one_host_are_left_as_they_are() -> None:
    """Whenever ranks come out of a collective."""
    began, *others = run_ranks(_gathered, 3)[0]
    assert others == [began] * 2


def _gathered() -> list[float]:
    grid, recorder = ProcessGrid(pp=3), type("Recorder", (), {})()
    time.sleep(random.Random(grid.rank).random() / 20)
    first, second = (Event(Action(Kind.F, grid.rank, 0), at, at + 1) for at in (100.0, 200.0))
    recorder.events, recorder.usage = (first, second), Usage()
    return [rank.events[1].start for rank in trace.gather(recorder, grid)]


@pytest.mark.thorough
@pytest.mark.ranks
def test_no_arrow_of_a_run_leads_back_in_time(tmp_path: Path) -> None:
    run_job(
        4,
        "train",
        write_config(tmp_path),
        "--parallel.pp",
        "4",
        "--pipeline.num_microbatches",
        "8",
        "--train.num_steps",
        "12",
        "--train.eval_interval",
        "0",
        "--train.save_interval",
        "0",
    )
    entries: list[dict[str, Any]] = json.loads(
        (tmp_path / "runs" / "run" / "trace.json").read_text()
    )["traceEvents"]
    sent, received = ({e["id"]: e["ts"] for e in entries if e["ph"] == phase} for phase in "sf")
    assert len(sent) > 10
    assert [number for number in sent if received[number] < sent[number]] == []


def test_a_trace_says_how_well_clocks_agree(tmp_path: Path) -> None:
    event = Event(Action(Kind.F, 0, 0), 0.0, 1.0)
    ranks = [
        trace.RankEvents(r, f"rank {r}", (r, 0), 0, (event,), clock_error=r * 12e-6)
        for r in range(2)
    ]
    trace.write_trace(ranks, tmp_path / "trace.json")
    labels = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["name"] == "process_labels"
    ]
    assert [(e["pid"], e["args"]["labels"]) for e in labels] == [
        (1, "clock within 12 us of rank 0's")
    ]
