"""The flight recorder: what was noted is there while a rank waits, and after kill -9."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from hybridpar.comm import all_reduce
from hybridpar.flight import HAS_MEMORY, LOST, NO_FLIGHT, Flight, Observer, Waiting, read
from hybridpar.grid import ProcessGrid, lines_of

WHO = {"rank": 1, "stage": 1, "num_microbatches": 4, "axes": {"pp": [0, 1], "world": [0, 1, 2]}}


def test_notes_can_be_read(tmp_path: Path) -> None:
    flight = Flight(tmp_path / "rank", WHO)
    flight.phase("training", 60.0)
    flight.action("B", 1, 9, 1)
    flight.wait("recv", "pp", 0)
    found = read(tmp_path / "rank")
    assert found is not None
    assert found == flight.read()
    assert (found.phase, found.limit_s, found.who) == ("training", 60.0, WHO)
    assert (found.action, found.microbatch, found.step) == ("B9@1v1", 9, 3)
    assert (found.operation, found.axis, found.peers) == ("recv", "pp", (0,))
    assert found.situation() == " during B9@1v1, waiting for recv over pp with rank 0"
    flight.go_on()
    after = read(tmp_path / "rank")
    assert after is not None
    assert (after.waits, after.peers, after.action) == (False, (), "B9@1v1")
    assert after.count > found.count
    flight.action("UPDATE", 1, 2, 3)
    flight.wait("all_reduce", "world")
    last = read(tmp_path / "rank")
    assert last is not None
    assert (last.step, last.peers) == (3, (0, 2))


def test_bytes_are_noted_and_are_no_progress(tmp_path: Path) -> None:
    flight = Flight(tmp_path / "rank", WHO)
    before = flight.read()
    flight.traffic(2**40 + 1, 7)
    found = read(tmp_path / "rank")
    assert found is not None
    assert before is not None
    assert (found.sent, found.received, found.count, found.who) == (2**40 + 1, 7, before.count, WHO)


def test_a_phase_begins_anew_and_an_end_keeps_what_was_done(tmp_path: Path) -> None:
    flight = Flight(tmp_path / "rank", WHO)
    flight.action("F", 1, 0, 0)
    with pytest.raises(RuntimeError), Waiting(flight, "recv", "pp", 0):
        raise RuntimeError("connection closed")
    flight.end(LOST, "é" * 1000)
    found = read(tmp_path / "rank")
    assert found is not None
    assert (found.phase, found.action, found.peers, found.error) == (
        LOST,
        "F0@1v0",
        (0,),
        "é" * 256,
    )
    with Waiting(flight, "recv", "pp", 0):
        pass
    flight.phase("saving")
    found = read(tmp_path / "rank")
    assert found is not None
    assert (found.kind, found.waits, found.limit_s, found.situation()) == (
        "",
        False,
        0.0,
        " while saving",
    )
    flight.end(LOST, "connection closed")
    assert (ended := flight.read()) is not None
    assert ended.situation() == "", "an end is no phase to be in"
    flight.phase("saving")
    flight.action("F", 1, 0, 0)
    flight.limit(7.5)
    found = read(tmp_path / "rank")
    assert found is not None
    assert (found.phase, found.limit_s, found.action) == ("saving", 7.5, "F0@1v0")
    flight.tick()
    later = read(tmp_path / "rank")
    assert later is not None
    assert later.count > found.count


def test_it_outlives_a_killed_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        flight = Flight(tmp_path / "rank", WHO)
        flight.action("F", 0, 7, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    found = read(tmp_path / "rank")
    assert found is not None
    assert found.action == "F7@0v0"


def test_without_a_file_nothing_is_noted(tmp_path: Path) -> None:
    NO_FLIGHT.action("F", 0, 0, 0)
    NO_FLIGHT.phase("saving")
    NO_FLIGHT.end(LOST, "")
    assert NO_FLIGHT.read() is None
    assert read(tmp_path / "nothing") is None
    (tmp_path / "half").write_bytes(b"12345")
    assert read(tmp_path / "half") is None


def watch_the_other(folder: Path) -> None:
    """Rank 0 waits in an all-reduce until rank 1 has seen that it does."""
    rank = torch.distributed.get_rank()
    axes = {"dp": lines_of({"pp": 1, "dp": 2, "tp": 1})["dp"][0]}
    flight = Flight(folder / f"{rank}", {"rank": rank, "axes": axes})
    grid = ProcessGrid(dp=2, flight=flight)
    while rank == 1:
        other = read(folder / "0")
        if other is not None and other.waits:
            assert (other.operation, other.axis, other.peers) == ("all_reduce", "dp", (1,))
            break
        time.sleep(0.01)
    assert float(all_reduce(torch.ones(()), grid.dp)) == 2
    mine = flight.read()
    assert mine is not None
    assert not mine.waits


@pytest.mark.ranks
def test_communication_says_whom_it_waits_for(tmp_path: Path) -> None:
    run_ranks(watch_the_other, 2, tmp_path)


def test_a_record_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "rank_00000").symlink_to("precious")
    Flight(tmp_path / "rank_00000", {"pid": os.getpid()})
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "rank_00000").is_symlink()


@pytest.mark.skipif(not HAS_MEMORY, reason="finds records in /proc")
def test_a_second_record_of_one_name_is_found(tmp_path: Path) -> None:
    """A program trains twice, in two run folders or in one."""
    observer = Observer(os.getpid(), "rank_98765")
    records = []
    for folder in ("first", "second", "second"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for flight in records:
            flight.leave()
        records.append(
            Flight(tmp_path / folder / "rank_98765", {"pid": os.getpid(), "folder": folder})
        )
        records[-1].phase(f"training {len(records)}")
        observer._search_at = 0.0
        record, _ = observer.look()
        assert record is not None
        assert record.phase == f"training {len(records)}"
