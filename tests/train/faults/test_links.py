"""Links to other hosts: silence is said while a rank waits, bytes are added up over a host's
ranks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connections import HERE, THERE, Pair, connected
from train.runs import metrics, run_job, write_config

from hybridpar import sockets
from hybridpar.flight import Flight, Waiting
from hybridpar.train.faults import links
from hybridpar.train.faults.errors import describe_failure
from hybridpar.train.faults.links import Hosts, LinkWatch, Traffic, a_day

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells these numbers")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected() as both:
        yield both


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENT_S", sockets.ASK_EVERY_S + 0.5)
    monkeypatch.setattr(links, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(links, "_SAY_EVERY_S", 0.5)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.thorough
@linux
def test_an_outage_is_said_while_a_rank_waits_and_when_it_is_over(
    tmp_path: Path, pair: Pair, impatient: None
) -> None:
    flight = Flight(tmp_path / "rank")
    said = []
    hosts = Hosts(HERE, {THERE: f"shed ({THERE})", HERE: f"attic ({HERE})"}, (0,))
    watch = LinkWatch(flight, 60.0, hosts, [tmp_path / "rank"], said.append)
    try:
        with sockets.deaf():
            time.sleep(sockets.ASK_EVERY_S + 2)
            assert watch.silence is None, "nobody waits"
            with Waiting(flight, "recv", "pp", 1):
                until(lambda: len(said) > 1)
                silence = watch.silence
                failure = describe_failure(
                    RuntimeError("Timed out waiting 60000ms"), "rank 0", flight.read(), str(silence)
                )
        assert silence is not None
        assert re.fullmatch(
            r"rank 0 lost contact with rank 1 while starting, waiting for recv over pp with rank "
            r"1; "
            r"the link to (shed|attic) \(127.0.0.[23]\) has been silent for \d+ s, since [\d:]{8}",
            str(failure),
        )
        assert all(
            re.fullmatch(r"waiting for the link to (shed|attic) \(127.0.0.[23]\), \d+ s", line)
            for line in said
        )
        until(lambda: "is back after" in said[-1])
        assert watch.silence is None
    finally:
        watch.close()


@linux
def test_bytes_of_all_ranks_of_a_host_are_added_up(
    tmp_path: Path, pair: Pair, impatient: None
) -> None:
    here, there = pair
    neighbour = Flight(tmp_path / "neighbour")
    neighbour.traffic(1000, 200)
    watch = LinkWatch(
        Flight(tmp_path / "rank"),
        60.0,
        Hosts(HERE, {}, (0, 1)),
        [tmp_path / "rank", tmp_path / "neighbour", tmp_path / "none yet"],
    )
    try:
        before = watch.traffic()
        assert before.sent >= 1000
        here.sendall(bytes(50_000))
        until(lambda: (watch.traffic() - before).sent >= 50_000)
        here.close()
        there.close()
        time.sleep(0.3)
        assert (watch.traffic() - before).sent >= 50_000, "what was sent stays sent"
    finally:
        watch.close()


def test_reports_of_all_tell_the_ranks_of_a_host() -> None:
    said = [
        ["a", ["10.0.0.1"]],
        ["a", ["10.0.0.1", "10.1.0.1"]],
        ["b", ["10.0.0.2"]],
        ["a", ["10.0.0.3"]],
    ]
    assert Hosts.of(said, 0).ranks == (0, 1)
    assert Hosts.of(said, 3).ranks == (3,), "another host of that name"
    assert (Hosts.of(said, 2).own, Hosts.of(said, 2).names["10.0.0.1"]) == (
        "b (10.0.0.2)",
        "a (10.0.0.1)",
    )
    assert Hosts.of([["a", []], ["b", []]], 1).ranks == (1,)


@pytest.mark.parametrize(
    ("sent", "received", "text"),
    [
        (4.1e9, 4.05e9, "4.1 GB a day each way"),
        (4.1e9, 0.3e9, "4.1 GB a day out, 300 MB in"),
        (2e12, 1.9e12, "2 TB a day each way"),
        (0, 0, "0 kB a day each way"),
        (900, 5e3, "0.9 kB a day out, 5 kB in"),
    ],
)
def test_bytes_a_day_in_words(sent: float, received: float, text: str) -> None:
    assert a_day(sent, received) == text


def test_a_difference_of_traffic_is_a_rate() -> None:
    half_a_day = Traffic(3e9, 2e9, 50_000.0) - Traffic(1e9, 1e9, 6_800.0)
    assert half_a_day.a_day == (4e9, 2e9)
    assert (
        str(half_a_day)
        == "sent 2 GB to other hosts and received 1 GB, that is 4 GB a day out, 2 GB in"
    )


@linux
@pytest.mark.ranks
def test_a_run_says_what_its_hosts_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one host, whose connections count as leading to another: each sends what the
    other receives. When their threads look does not count."""
    traffic = LinkWatch.traffic
    monkeypatch.setattr(LinkWatch, "traffic", lambda self: (self._look(), traffic(self))[1])
    monkeypatch.setattr(sockets, "_are_apart", lambda own, host: True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a run of several hosts names its interface
    out = run_job(
        2, "train", write_config(tmp_path), "--parallel.pp", "2", "--train.num_steps", "20"
    )
    rows = [row for row in metrics(tmp_path / "runs" / "run") if "loss" in row]
    assert rows[-1]["sent_gb_a_day"] > 0
    assert rows[-1]["received_gb_a_day"] > 0
    assert (
        len(re.findall(r"\(127.0.0.1\) sent [\d.]+ [kM]B to other hosts and received", out)) == 1
    ), out
    assert "a day" in next(
        line for line in out.splitlines() if line.startswith("step 20/20  loss")
    ), out
