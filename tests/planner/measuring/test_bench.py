"""Measurements are of what a run has; and a machine on which other programs run is noticed."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from planner import made

from hybridpar.config import Launch, from_mapping
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.optim import Optimizer
from hybridpar.planner.measuring import local_profile
from hybridpar.planner.measuring.bench import Bench, Effort, _attention, _timed
from hybridpar.planner.measuring.profile import Profile
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")


def parts_of(optimizer: Optimizer) -> list[tuple[str, str, int]]:
    """Its kind, backend and number of parameters, and those of the optimizers in it."""
    own = (type(optimizer).__name__, optimizer.backend, len(optimizer.slots))
    return [own, *(part for inner in optimizer.inner for part in parts_of(inner))]


@pytest.mark.parametrize("staleness", ["none", "extrapolation"])
def test_the_optimizer_is_that_of_a_run(staleness: str) -> None:
    config = from_mapping(
        {
            "optim": {"name": "muon", "staleness": staleness},
            "kernels": {"optimizer": "torch"},
            "pipeline": {"schedule": "2bw"},
            "model": {"num_layers": 1},
            "train": {"micro_batch_size": 2},
        },
        made.config(dp=1),
    )
    bench = Bench(config, 2, Axis("tp"), CPU)
    run = parts_of(Engine(JobPlan(config), ProcessGrid(), CPU).state.optimizer.groups[0])
    measured = [parts_of(unit.state.optimizer.groups[0]) for unit in bench.units]
    for kind, parts in enumerate(zip(*measured, strict=True)):
        assert {part[:2] for part in parts} == {run[kind][:2]}
        # the head's copy of the tied embedding is one parameter of a run
        assert sum(number for *_, number in parts) - run[kind][2] in (0, 1)


def test_messages_are_those_that_the_blocks_send() -> None:
    """In terms of all-reduces, a layer's gathers and reductions to owners are ten halves, before
    there were four all-reduces."""
    config = from_mapping({"parallel": {"tp": 2}}, made.config())
    u = 2 * config.model.seq_length * config.model.hidden_size * 4
    totals = {}
    for sequence in (False, True):
        at = from_mapping({"parallel": {"sequence": sequence}}, config)
        bench = Bench(at, 2, silent_axis("tp", 2), CPU)
        totals[sequence] = {
            (what, kind): sum(sizes) for what, kind, sizes in bench.messages() if kind == "layer"
        }
    assert totals[False] == {("forward", "layer"): 2 * u, ("backward", "layer"): 2 * u}
    assert totals[True] == {("forward", "layer"): 2 * u, ("backward", "layer"): 3 * u}


class FakeClock:
    """Times of a rank that has a core for a share of the time."""

    def __init__(self, share: float):
        self.share = share
        self.ticks = 0

    def now(self) -> int:
        self.ticks += 1
        return self.ticks

    def read(self, stamp: int) -> tuple[float, float]:
        return float(stamp), self.share * stamp


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_rank_that_waits_for_cores_says_so(share: float) -> None:
    bench = Bench(made.config(), 2, Axis("tp"), CPU)
    bench.clock = FakeClock(share)
    times = _timed(bench, Axis("world"), Effort(0.0, 1, parts=False), own=True)
    assert bench.had_core == pytest.approx(share)
    assert all(time == pytest.approx(share) for time in times.values()), (
        "own time stands still without a core"
    )


class CountingClock:
    """Times that grow with the pairs of a query and a visible key of the micro-batch."""

    def __init__(self, bench: Bench):
        self.pairs = 0.0
        self.bench = bench
        for unit in bench.units:
            unit.stage.register_forward_pre_hook(self._forward)

    def _forward(self, stage: torch.nn.Module, args: tuple[Any, ...]) -> None:
        starts = args[1]["document_start"]
        seen = torch.arange(starts.shape[1]) - starts + 1
        self.pairs += float(seen.sum()) / len(starts)

    def now(self) -> float:
        self.pairs += 100.0  # everything else
        return self.pairs

    def read(self, stamp: float) -> tuple[float, float]:
        return stamp, stamp


def test_the_time_of_attention_is_what_short_documents_save() -> None:
    """Rows of 32 tokens with one document have 528 pairs, with eight of 4 tokens 80."""
    config = from_mapping({"data": {"packing": "stream"}}, made.config())
    bench = Bench(config, 2, Axis("tp"), CPU)
    bench.clock = CountingClock(bench)
    own = _timed(bench, Axis("world"), Effort(0.0, 1, parts=False), own=True)
    assert own["forward", "layer"] == 100 + 528
    assert own["forward_documents", "layer"] == 100 + 80
    left = bench.document_shares()
    assert left == {"embedding": 1.0, "layer": pytest.approx(80 / 528), "head": 1.0}
    assert _attention(own, "forward", "layer", left["layer"]) == pytest.approx(528)
    assert _attention(own, "backward", "layer", left["layer"]) == 0
    plain = Bench(made.config(), 2, Axis("tp"), CPU)
    assert plain.documents is None
    assert _attention({}, "forward", "layer", plain.document_shares()["layer"]) == 0


def profile(efficiency: float) -> Profile:
    made_up = made.profile(made.config(), cores=2)
    return replace(made_up, hardware=replace(made_up.hardware, efficiency=efficiency))


def test_times_of_a_busy_machine_are_neither_kept_nor_taken_from_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [profile(0.6), profile(0.97), profile(0.5)]
    monkeypatch.setattr(local_profile, "measure_machine", lambda *args, **options: found.pop(0))
    config = from_mapping({"data": {"cache": str(tmp_path)}})

    def cached() -> float:
        return local_profile.cached_profile(config, Launch(0, 0, 1, 1)).hardware.efficiency

    assert cached() == 0.6
    assert not list(tmp_path.rglob("*.json"))
    assert cached() == cached() == 0.97
    (path,) = tmp_path.rglob("*.json")
    write_profile(profile(0.85), path)  # as an earlier version kept it
    assert cached() == 0.5
    assert read_profile(path).hardware.efficiency == 0.85


HOGS = 2


def hog(core: int, ready: Connection) -> None:
    os.sched_setaffinity(0, {core})
    ready.send(None)
    while True:
        pass


def measured(core: int, found: Connection) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    bench = Bench(made.config(), 1, Axis("tp"), CPU)
    while bench.had_core >= 0.7:  # as when this process, or the others, stood still
        _timed(bench, Axis("world"), Effort(0.2, 20, parts=False), own=True)
    found.send(bench.had_core)


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the system does not say who waits"
)
def test_programs_that_share_the_only_core_are_noticed() -> None:
    """Forks, which import nothing again."""
    core = min(os.sched_getaffinity(0))
    fork = multiprocessing.get_context("fork")
    ends = [fork.Pipe(duplex=False) for _ in range(HOGS + 1)]
    targets = [hog] * HOGS + [measured]
    processes = [
        fork.Process(target=target, args=(core, end), daemon=True)  # type: ignore[attr-defined]
        for target, (_, end) in zip(targets, ends, strict=True)
    ]
    try:
        for process, (reader, _) in zip(processes, ends, strict=True):
            process.start()
            assert reader.poll(200.0), (
                f"{HOGS} others want the same core all the time, which is not noticed"
            )
        assert ends[-1][0].recv() < 0.7
    finally:
        for process in processes:
            process.kill()
            process.join()
