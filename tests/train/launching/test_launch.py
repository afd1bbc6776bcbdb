"""Ranks agree before there is a process group: here they are threads around one store."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train.runs import on_ranks, reserved_port

from hybridpar import sockets
from hybridpar.comm import all_reduce
from hybridpar.config import Launch, TrainConfig
from hybridpar.errors import ConfigError, DataError, HybridparError, config_error
from hybridpar.grid import ProcessGrid
from hybridpar.train.faults.errors import LostContactError, RankError
from hybridpar.train.launching.launch import (
    Job,
    _loopback_store,
    choose_backend,
    choose_device,
    leave_word,
    meet,
    set_precision,
    set_threads,
    stop_agent,
)


def test_alone_everything_happens_at_once() -> None:
    job = Job(Launch(0, 0, 1, 1))
    assert job.together(lambda: 5) == 5
    assert job.together(lambda: 5, here=False) is None
    assert job.decide(lambda: [1]) == [1]
    with pytest.raises(ConfigError):
        job.together(lambda: (_ for _ in ()).throw(config_error("a", 1, "is wrong")))


def test_rank_0_decides_for_all() -> None:
    assert (
        on_ranks(3, lambda job: job.decide(lambda: {"step": 7 + job.launch.rank}))
        == [{"step": 7}] * 3
    )


def test_each_rank_keeps_its_own_result() -> None:
    def both(job: Job) -> tuple[Any, Any]:
        return job.together(lambda: job.launch.rank), job.together(
            lambda: "first", here=job.launch.rank == 0
        )

    assert on_ranks(3, both) == [(0, "first"), (1, None), (2, None)]


def fail_on(*ranks: int, same: bool = True) -> Callable[[Job], None]:
    def action(job: Job) -> None:
        def raise_there() -> None:
            if job.launch.rank in ranks:
                raise DataError("bad file" if same else f"bad file {job.launch.rank}")

        job.together(raise_there)

    return action


def test_a_failure_of_one_rank_fails_on_all_and_names_it() -> None:
    assert [str(e) for e in on_ranks(3, fail_on(1))] == ["rank 1: bad file"] * 3
    assert [str(e) for e in on_ranks(3, fail_on(1, 2))] == ["rank 1, 2: bad file"] * 3
    assert {str(e) for e in on_ranks(2, fail_on(0, 1, same=False))} == {
        "rank 0: bad file 0\nrank 1: bad file 1"
    }


def test_messages_of_rank_0_for_all_name_no_rank() -> None:
    first, *others = on_ranks(3, fail_on(0, 1, 2))
    assert isinstance(first, DataError)
    assert {str(e) for e in (first, *others)} == {"bad file"}


def test_a_start_has_a_name_of_its_own_whatever_earlier_ones_have_left() -> None:
    store = dist.HashStore()
    store.set("hello/1", json.dumps("of a process that is no more"))
    starts = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            starts.append(
                list(pool.map(lambda rank: meet(store, Launch(rank, rank, 3, 3)), range(3)))
            )
    assert [len(set(names)) for names in starts] == [1, 1, 1]
    assert len({names[0] for names in starts}) == 3


@pytest.mark.parametrize(
    "value", [b"{", b"\xff\x00", b"[" * 100_000], ids=["cut off", "not UTF-8", "deep"]
)
def test_foreign_data_in_the_store_are_refused(value: bytes) -> None:
    store = dist.HashStore()
    store.set("0/1", value)
    job = Job(replace(Launch.from_environment(), rank=0, world_size=2), store)
    with pytest.raises(
        HybridparError, match="has no valid JSON under 0/1: another program has written into it"
    ):
        job.gather("mine")


def test_threads_share_the_cores() -> None:
    try:
        assert set_threads(3, Launch(0, 0, 1, 1)) == 3 == torch.get_num_threads()
        assert set_threads(0, Launch(0, 0, 1000, 1000)) == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_gpus_auto_is_the_cpu_and_cuda_is_refused() -> None:
    launch = Launch(0, 0, 2, 2)
    for share in (False, True):
        assert choose_device(
            TrainConfig(share_gpus=share), launch, lambda mine: [mine] * 2
        ) == torch.device("cpu")
        with pytest.raises(ConfigError, match="GPUs on this machine: 0, processes: 2"):
            choose_device(
                TrainConfig(device="cuda", share_gpus=share), launch, lambda mine: [mine] * 2
            )


@pytest.mark.parametrize(
    ("gpus", "share", "expected"),
    [
        pytest.param([["a", "b"]] * 2, False, [0, 1], id="each its own"),
        pytest.param(
            [["a"], ["b"], ["c"], ["d"]], False, [0, 0, 0, 0], id="each is shown its own alone"
        ),
        pytest.param([["a", "b"]] * 2 + [["c", "d"]] * 2, False, [0, 1, 0, 1], id="two machines"),
        pytest.param([["a", "b"]] * 4, True, [0, 1, 0, 1], id="shared"),
        pytest.param(
            [["a", "b"]] * 4,
            False,
            "machine: 2, processes: 4; try cpu, or train.share_gpus = true",
            id="too few",
        ),
        pytest.param(
            [["a"]] * 2, False, "machine: 1, processes: 2; try cpu", id="all are shown the same one"
        ),
        pytest.param(
            [["a", "b"]] * 2 + [[]] * 2,
            True,
            "processes: 2; try cpu",
            id="a machine without",
        ),
    ],
)
def test_a_gpu_for_each_process(
    gpus: list[list[str]], share: bool, expected: list[int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpus: what each process sees; so many are on a machine as see the same, or all where each
    sees another."""
    here = 2 if gpus.count(gpus[0]) == 2 else len(gpus)
    named = [seen[r % here % len(seen)] if seen else "" for r, seen in enumerate(gpus)]
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for rank, seen in enumerate(gpus):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))  # noqa: B023
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))  # noqa: B023
        devices = [SimpleNamespace(uuid=gpu) for gpu in seen]
        monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
        launch = Launch(rank, rank % here, len(gpus), here)

        def gather(mine: str) -> list[str]:
            assert mine == named[rank]  # noqa: B023
            return named

        found = choose_device(TrainConfig(share_gpus=share), launch, gather)
        if isinstance(expected, str):
            assert found == torch.device("cpu")
            with pytest.raises(ConfigError, match=re.escape(expected) if seen else "machine: 0"):
                choose_device(TrainConfig(device="cuda", share_gpus=share), launch, gather)
        else:
            assert found == torch.device("cuda", expected[rank]) == chosen[-1]
            assert choose_backend(TrainConfig(share_gpus=share), found) == (
                "gloo" if share else "nccl"
            )
    assert choose_backend(TrainConfig(share_gpus=share), torch.device("cpu")) == "gloo"


def test_matrices_of_fp32_on_a_gpu_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    for device in ("cpu", "cuda"):
        for tf32 in (False, True):
            set_precision(TrainConfig(tf32=tf32), torch.device(device))
    assert said == ["highest", "high"]


def test_ranks_that_compile_first_are_waited_for_longer(tmp_path: Path) -> None:
    """Later communication gives up after the time that was set then, not after the time of the
    start, on each group."""
    errors, _ = run_ranks(_waits, 2, tmp_path / "over")
    assert len(errors) == 2
    assert all("imed out" in error for error in errors), errors


def _waits(over: Path) -> list[str]:
    grid = ProcessGrid(pp=2)
    errors = []
    axes = grid.pp, grid.again("pp")
    grid.wait_at_most(0.3)
    while grid.rank:
        if over.exists():
            return []
        time.sleep(0.01)
    for axis in axes:
        with pytest.raises(RuntimeError) as caught:
            all_reduce(torch.ones(3), axis)
        errors.append(str(caught.value))
    over.touch()
    return errors


KEEPS = """
import resource
import torch
from hybridpar.train.launching.launch import keep_freed_memory
kept = keep_freed_memory()
faults = []
for _ in range(9):
    torch.ones(2**24)  # 64 MiB: 16384 pages
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(kept, round((faults[-1] - faults[0]) / 16384))
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are settings of glibc")
def test_freed_memory_is_kept() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KEEPS],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_"))},
    )
    worked, faults = run.stdout.split()
    assert worked == "True"
    assert int(faults) <= 4  # until the heap has a hole of that size; 8 where it is given back


def test_the_store_of_one_machine_listens_on_the_loopback_interface_alone() -> None:
    with reserved_port() as port:
        store = _loopback_store(Launch(0, 0, 1, 1, own_store_port=port))
    store.set("a", "b")
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]


def test_a_port_in_use_and_an_address_that_is_missing_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RankError, match=f"Address already in use.*{port}.*a free port on it"):
            Job.connect(Launch(0, 0, 2, 2, True, own_store_port=port))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"rank 0 cannot reach the other ranks: .*MASTER_ADDR"):
        Job.connect(Launch(0, 0, 2, 1, True))
    with pytest.raises(
        ConfigError,
        match="RANK = '': this environment variable must be set with WORLD_SIZE = 2; try 0",
    ):
        Job.connect(Launch(0, 0, 2, 1))


@pytest.mark.parametrize(
    ("interface", "alone", "error"),
    [
        pytest.param(
            "", False, r"GLOO_\w+ = '': must name .* to 127.0.0.1, .*; try eth0", id="Debian"
        ),
        pytest.param("", True, None, id="one host"),
        pytest.param("eth0:1", False, None, id="named"),
        pytest.param(
            "eth0,lan7",
            True,
            r"'eth0,lan7': unknown network interface; .* has eth0;",
            id="no such",
        ),
    ],
)
def test_addresses_that_others_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, interface: str, alone: bool, error: str | None
) -> None:
    """alone: all processes have one network."""
    names = iter(range(9))
    if not alone:
        monkeypatch.setattr(sockets, "network", lambda: next(names))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))],
    )

    def check(job: Job) -> None:
        Job(replace(job.launch, interface=interface), job.store).require_addresses("gloo")

    for outcome in on_ranks(2, check):
        assert (outcome is None) if error is None else re.search(error, str(outcome)), outcome
    assert on_ranks(2, lambda job: job.require_addresses("nccl")) == [None, None]


def test_a_rank_that_waits_for_others_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody_comes(*_: object) -> None:
        text = ""
        while text.count("has waited") < 2:
            text += capsys.readouterr().err
            time.sleep(0.01)
        raise ValueError(text)

    monkeypatch.setattr("hybridpar.train.launching.launch._SAY_EVERY_S", 0.01)
    monkeypatch.setattr(dist, "rendezvous", nobody_comes)
    with pytest.raises(RankError, match="rank 0 has waited 0 s for the other 2 at host7:29500 "):
        Job.connect(Launch(0, 0, 3, 1, True, store="host7:29500"))
    while any(
        thread.name == "waiting" for thread in threading.enumerate()
    ):  # it ends with the wait
        time.sleep(0.01)


def test_rank_0_knows_whom_it_misses() -> None:
    store = dist.HashStore()
    missing = set[int]()
    with ThreadPoolExecutor(3) as pool:
        names = [
            pool.submit(meet, store, Launch(0, 0, 3, 3), missing),
            pool.submit(meet, store, Launch(2, 2, 3, 3)),
        ]
        while missing != {1}:
            time.sleep(0.01)
        names.append(pool.submit(meet, store, Launch(1, 1, 3, 3)))
        assert len({name.result() for name in names}) == 1
    assert not missing


def test_word_that_the_job_is_over_reaches_those_who_wait_or_come_later() -> None:
    """The first word counts; and it reaches nobody at an address where nobody listens."""
    with reserved_port() as port:
        leave_word(f"127.0.0.1:{port}", "nobody hears this")
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store = dist.PrefixStore("hybridpar", server)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(meet, store, Launch(1, 1, 2, 2))
            for text in ("rank 0 has refused", "rank 1 has, too"):
                leave_word(f"127.0.0.1:{port}", text)
            with pytest.raises(HybridparError, match="this job is over: rank 0 has refused"):
                waiting.result()
        with pytest.raises(HybridparError, match="this job is over: rank 0 has refused"):
            meet(store, Launch(0, 0, 2, 2))


def test_who_waits_for_ranks_that_have_been_started_again_starts_again_too() -> None:
    """One is killed while the ranks of another host wait for its message, before there is a
    group."""
    lobby = dist.HashStore()

    def connect(rank: int) -> Job:
        launch = Launch(rank, rank, 2, 1, True)
        return Job(launch, dist.PrefixStore(meet(lobby, launch), lobby), lobby)

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(connect, range(2))
        waiting = pool.submit(first.gather, "of a start that is over")
        again = pool.submit(connect, 1)
        with pytest.raises(
            LostContactError,
            match="rank 0 lost contact with the other ranks, which have been restarted",
        ):
            waiting.result()
        jobs = connect(0), again.result()
        assert list(pool.map(lambda job: job.gather(job.launch.rank), jobs)) == [[0, 1]] * 2


def test_only_torchruns_agent_is_ever_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a user's program that starts ranks by torch's functions, which has the same
    environment."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launch = Launch.from_environment()
    assert launch.agent == 0
    kills: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: kills.append(pid))
    stop_agent(launch)
    stop_agent(replace(launch, agent=1))
    assert not kills
