"""memory.offload_activations = "auto" beside a GPU, without one: a modelled link and modelled times
of actions."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Outcome, start, train
from ranks import run_ranks
from streams import Machine
from train.test_offload import CPU, M, make

from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
from hybridpar.runtime import slow_tier
from hybridpar.runtime.slow_tier import HostTier, MoveTimes
from hybridpar.schedules.action import parse_actions
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.state.host import StreamWork
from hybridpar.train import engine
from hybridpar.train.autotuning import auto_offload, trial
from hybridpar.train.autotuning.auto_offload import find_numbers_for
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.autotuning.trial import Trial
from hybridpar.train.engine import Engine
from hybridpar.train.faults.errors import SetupError
from hybridpar.train.forecasts import offload_room
from hybridpar.train.forecasts.offload_room import (
    OffloadRoom,
    most_places,
    reserved_bytes,
    with_away,
)

MIB = 1 << 20
CUDA = torch.device("cuda")


def as_a_gpu(monkeypatch: pytest.MonkeyPatch, bandwidth: float, *, shared: bool = False) -> Machine:
    """Have activations leave for the host's memory, over a link with a modelled clock. The rest is
    on the CPU."""
    machine = Machine(bandwidth, shared)
    machine.stand_in(monkeypatch)
    monkeypatch.setattr(slow_tier, "host_work", StreamWork)
    for module in (engine, auto_offload):
        monkeypatch.setattr(module, "in_host_memory", lambda device: True)
    return machine


def with_costs(monkeypatch: pytest.MonkeyPatch, costs_of: Callable[[Config], Costs]) -> None:
    """Have the actions of a trial take given times."""
    measured = trial.run_costs

    def modelled(job: JobPlan, ranks: Sequence[Any]) -> Any:
        run = measured(job, ranks)
        assert run is not None
        return replace(run, measured=replace(run.measured, costs=costs_of(job.config)))

    monkeypatch.setattr(trial, "run_costs", modelled)


def moved_bytes(config: Config) -> int:
    """Bytes of a micro-batch that leave, as predicted."""
    return predict(JobPlan(with_away(config, 99)), device=CUDA)[0].moved


@pytest.mark.thorough
def test_equal_bits_with_the_latest_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of the host's memory for them is taken before training."""

    def outcome(away: int) -> tuple[Outcome, list[int]]:
        made: list[int] = []
        store = slow_tier.HostStore
        with pytest.MonkeyPatch.context() as patch:
            as_a_gpu(patch, 1e9)
            patch.setattr(
                slow_tier,
                "HostStore",
                lambda sizes, device: made.append(sum(sizes)) or store(sizes, device),
            )
            one, loader = start(make(tmp_path, away))
            assert len(made) == (away > 0)
            one.train(loader, 2, lambda result: None)
            assert len(made) == (away > 0)
            return train(one), made

    whole = outcome(0)
    away = outcome(99)
    away[0].check(whole[0])
    assert away[1] == [reserved_bytes(JobPlan(make(tmp_path, 99)), 0)]


@pytest.mark.thorough
@pytest.mark.parametrize(("share", "slower"), [(0.01, 1.0), (0.7, 1.0), (0.01, 1.1)])
def test_most_micro_batches_that_a_modelled_link_takes(
    share: float, slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """share: of a forward that a copy takes. slower: by what factor actions take longer where any
    leave.

    The oracle simulates each number.
    """
    config = make(tmp_path, "auto")
    forward = 0.01
    seconds = share * forward
    machine = as_a_gpu(monkeypatch, moved_bytes(config) / seconds)

    def costs_of(trial_config: Config) -> Costs:
        factor = slower if trial_config.memory.num_away not in (0, (0,)) else 1.0
        return Costs(factor * forward, factor * 2 * forward)

    with_costs(monkeypatch, costs_of)
    seen: list[Costs] = []
    choose = auto_offload.free_to_leave
    monkeypatch.setattr(
        auto_offload,
        "free_to_leave",
        lambda costs, *args, **more: seen.append(costs) or choose(costs, *args, **more),
    )
    said = list[str]()
    alive = list[weakref.ref[Engine]]()
    warm = list[int]()
    restart = HostTier.restart
    monkeypatch.setattr(
        HostTier, "restart", lambda tier: warm.append(tier._totals["in"][0]) or restart(tier)
    )

    def build(make_one: Callable[[], Engine]) -> Engine:
        one = make_one()
        alive.append(weakref.ref(one))
        return one

    found = autotune(config, ProcessGrid(), CPU, said.append, build)
    assert machine.num_copies > 0
    assert len(alive) == 2
    assert warm == [2 * M], "the first two batches do not count"
    assert not any(one() for one in alive), "what a trial took is there for the run"
    for measured in (seen[0].offload, seen[0].reload):
        assert measured == pytest.approx([seconds], rel=0.02)

    def step(away: int) -> float:
        factor = slower if away else 1.0
        costs = Costs(factor * forward, factor * 2 * forward, offload=seconds, reload=seconds)
        return simulate(
            make_plan(ScheduleOptions("gpipe", offload=away), PipelineShape(1, M), 0, 12), costs
        ).step_time(M)

    expected = max(number for number in range(M - 1) if step(number) <= 1.02 * step(0))
    assert found == with_away(config, (expected,))
    assert f"memory.offload_activations: [{expected}]" in said[0]
    assert f"{1e3 * step(expected):.0f} ms a step" in said[0]
    assert expected == {(0.01, 1.0): M - 2, (0.7, 1.0): 0, (0.01, 1.1): 0}[share, slower]


def found_with(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    slower: float = 1.0,
    takes: float = 1e-4,
    replays: bool = True,
    fits: bool = True,
) -> tuple[tuple[int, ...], str, list[Any]]:
    """The numbers, the line, and what was tried, of trials that are made up."""
    monkeypatch.setattr(auto_offload, "in_host_memory", lambda device: True)
    monkeypatch.setattr(auto_offload, "limit_here", lambda *_: 1e15 if fits else 1.0)
    tried: list[Any] = []

    def try_out(one: Config, warmup: int) -> Trial:
        away = one.memory.num_away
        tried.append(away)
        factor = slower if away != 0 else 1.0
        return Trial(
            Costs(0.01 * factor, 0.02 * factor),
            ScheduleOptions.of(one),
            MoveTimes(takes, takes),
            replays and not away,
        )

    return (*find_numbers_for(JobPlan(config), ProcessGrid(), CPU, try_out), tried)


def test_output_for_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared numbers, and what to set for whoever needs the memory more than the time."""
    config = make(tmp_path, "auto")
    away, line, tried = found_with(config, monkeypatch)
    assert (away, tried) == ((M - 2,), [(M - 2,), 0])
    assert "ranks of which any leave run without CUDA graphs" in line
    away, line, _ = found_with(config, monkeypatch, slower=1.3)
    assert away == (0,)
    assert re.search(
        rf"180 ms a step.*with \[{M - 2}\] it would be 23\d ms.*train\.cuda_graphs = false "
        rf"\[{M - 2}\] would cost nothing",
        line,
    )
    away, line, _ = found_with(config, monkeypatch, slower=1.3, replays=False)
    assert away == (0,)
    assert "CUDA graphs" not in line
    away, line, tried = found_with(config, monkeypatch, slower=1.3, fits=False)
    assert (away, tried) == ((M - 2,), [(M - 2,)])
    assert "with none away this run is not predicted to fit its GPUs" in line
    alone = replace(config, pipeline=replace(config.pipeline, schedule="1f1b"))
    assert found_with(alone, monkeypatch)[::2] == ((0,), [])


# -- the host's memory


def test_places_at_once() -> None:
    """A place is taken when what it is for starts to leave, and free once that is back."""
    text = (
        "F0 OFFLOAD0 F1 EVICT0 OFFLOAD1 F2 EVICT1 RELOAD1 B2 B1 RELOAD0 B0 F3 OFFLOAD3 F4 EVICT3 "
        "RELOAD3 B3 B4"
    )
    actions = list(
        parse_actions(
            " ".join(f"{one}@0v0" if one[0] in "FB" else f"{one}@0" for one in text.split())
        )
    )
    assert most_places(actions) == 2
    for away in range(7):
        plan = make_plan(ScheduleOptions("gpipe", offload=away), PipelineShape(1, 8), 0, 2)[0]
        assert away <= most_places(plan) <= away + 2
        assert (most_places(plan) == 0) == (away == 0)


@contextmanager
def hosts(monkeypatch: pytest.MonkeyPatch, config: Config, *rooms: int) -> Iterator[OffloadRoom]:
    """The first two ranks of a pipeline of three are on the first host, and the last on another."""
    own = offload_room._RankNeeds(0, "", 40 * MIB, 10 * MIB, 0)
    ranks = [
        replace(own, rank=rank, host=host, room=rooms[host != "a"])
        for rank, host in enumerate("aab")
    ]
    monkeypatch.setattr(offload_room, "gather_objects", lambda mine, axis: ranks)
    yield OffloadRoom(JobPlan(config), ProcessGrid())


@pytest.mark.parametrize(
    ("rooms", "most"),
    [
        ((10_000, 10_000), (6, 6, 6)),
        ((10_000, 0), (0, 0, 0)),
        ((0, 10_000), (0, 0, 0)),
        ((10_000, 10 + 3 * 48), (2, 2, 2)),
        ((20 + 2 * 4 * 48, 10_000), (3, 3, 3)),
        ((19 + 2 * 4 * 48, 10_000), (2, 2, 2)),
    ],
)
def test_room_of_the_fullest_host(
    rooms: tuple[int, int], most: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch of 40 MiB takes 48, as does the one that leaves beside those away, and
    checkpoints of a rank take
    10. Ranks of a host share it."""
    config = make(
        tmp_path, "auto", {"num_layers": 3}, parallel={"pp": 3}, pipeline={"num_microbatches": 8}
    )
    with hosts(monkeypatch, config, *(room * MIB for room in rooms)) as room:
        assert room.most() == most
        assert room.holds(most) or not any(most)
        if any(most):
            room.require(most)
        if most != (6, 6, 6):
            with pytest.raises(
                SetupError,
                match=r"offload_activations = 9: .* too little memory.* pinned memory",
            ):
                room.require(9)


@pytest.mark.thorough
def test_a_trial_takes_no_more_than_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a run whose number is given."""
    config = make(tmp_path, "auto")
    need = (
        offload_room.host_bytes(JobPlan(with_away(config, 2)), 0, moved_bytes(config))
        + predict(JobPlan(config), device=CUDA)[0].host
    )
    monkeypatch.setattr(offload_room, "host_room", lambda: need)
    away, line, tried = found_with(config, monkeypatch)
    assert (away, tried) == ((2,), [(2,), 0])
    assert f"the hosts of this run have memory for [2], and [{M - 2}] could be away" in line
    with pytest.raises(SetupError, match=r"memory\.offload_activations = 3: .*; try \[2\]"):
        autotune(with_away(config, 3), ProcessGrid(), CPU, print)
    assert autotune(with_away(config, 2), ProcessGrid(), CPU, print) == with_away(config, 2)
    monkeypatch.setattr(offload_room, "host_room", lambda: 0)
    away, line, tried = found_with(config, monkeypatch)
    assert (away, tried) == ((0,), [])
    assert "the hosts of this run have no memory for more" in line


def settled(config: Config) -> object:
    with pytest.MonkeyPatch.context() as patch:
        as_a_gpu(patch, 1e8, shared=True)
        with_costs(patch, lambda one: Costs(0.01, 0.02))
        found = autotune(
            config, ProcessGrid(pp=config.parallel.pp, dp=config.parallel.dp), CPU, print
        )
        gc.collect()
        return found.memory.offload_activations


@pytest.mark.thorough
@pytest.mark.ranks
def test_all_ranks_find_the_same(tmp_path: Path) -> None:
    config = make(
        tmp_path, "auto", {"num_layers": 3}, parallel={"pp": 3}, pipeline={"schedule": "1f1b"}
    )
    first, *others = run_ranks(settled, 3, config)
    assert first == (1, 0, 0), "three, two and one are in flight"
    assert others == [first] * 2
