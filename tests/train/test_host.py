"""The optimizer on the host: the same bits, saved and gone on with as without it, whatever fails or
takes long."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Outcome, gpt, start, train
from ranks import run_ranks
from torch import Tensor
from train.runs import must_be_killed, poison_gradients

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.models.cost import training_flops_per_token
from hybridpar.prediction import predict
from hybridpar.runtime.recording import HostClock, Recording
from hybridpar.schedules.action import Kind
from hybridpar.state.host import HostUpdates, HostWork
from hybridpar.state.residency.chunks import Chunk, HostMemory, Memory
from hybridpar.train.engine import Engine, Residency
from hybridpar.train.forecasts.host_forecast import Speeds, forecast_host
from hybridpar.validate import resolve


def make(**sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes with dropout, two layers."""
    return gpt(
        (2, 48, 6, 14, 131),
        {"model": {"dropout": 0.1}, "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 4}},
        sections,
    )


def hosted(config: Config, host: bool = True) -> Config:
    return replace(config, memory=replace(config.memory, host_optimizer=host))


def build(config: Config, work: HostWork | None = None) -> Engine:
    return start(config, residency=Residency(host_work=work))[0]


def run(config: Config, work: HostWork | None = None) -> Outcome:
    """Trains, and keeps gradients. moved: bytes to the host and from it."""
    outcome = train(engine := build(config, work), 3, 1, gradients=True)
    outcome.moved = tuple(engine.state.host.num_bytes.values())
    return outcome


def num_updated(engine: Engine) -> int:
    """Number of parameters that the rank updates."""
    return sum(owned.stop - owned.start for owned in engine.state.partition.owned)


PIPELINES = (
    {"schedule": "2bw"},
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "2bw", "early_switch": 1},
    {"schedule": "2bw", "num_microbatches": 1},
    {"schedule": "2bw", "split_backward": True, "sync_steps": 1},
)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_equal_bits_and_the_bytes_of_the_formula(pipeline: dict[str, Any], dtype: str) -> None:
    config = make(
        pipeline={"num_microbatches": 4} | pipeline, train={"micro_batch_size": 2, "dtype": dtype}
    )
    outcome = run(hosted(config))
    numel = num_updated(build(config))
    outcome.check(run(config))
    # fp32 gradients go, weights of the run's type come; 1 %: padding between parameters
    assert outcome.moved == pytest.approx(
        (4 * 4 * numel, 4 * (2 if dtype == "bf16" else 4) * numel), rel=0.01
    )


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "sections",
    [
        {"optim": {"staleness": "nesterov"}},
        {"optim": {"name": "sgd"}},
        {"optim": {"staleness": "prediction"}},
        {"optim": {"staleness": "prediction"}, "train": {"dtype": "bf16"}},
        {"optim": {"staleness": "extrapolation"}},
        {"optim": {"name": "muon"}},
        {"optim": {"name": "muon", "staleness": "extrapolation"}, "train": {"dtype": "bf16"}},
        {"model": {"kind": "bert"}},
        {"model": {"tie_embeddings": False}, "memory": {"parts": 1}},
        {"train": {"dtype": "fp16"}},
        {"kernels": {"optimizer": "torch"}, "train": {"dtype": "bf16"}},
    ],
    ids=str,
)
def test_optimizers_models_and_skipped_steps(
    sections: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_gradients(monkeypatch, {1} if "train" in sections else set())
    config = make(**{"pipeline": {"schedule": "2bw"}} | sections)
    outcome = run(hosted(config))
    outcome.check(run(config))
    assert [step.step for step in outcome.steps if step.skipped] == [2] * ("train" in sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "schedule", "optimizer", "dtype"),
    [
        ({"tp": 2, "dp": 2, "zero": 1}, "2bw", "muon", "bf16"),
        ({"pp": 2, "dp": 2, "zero": 1}, "1f1b", "adamw", "fp32"),
        ({"pp": 2}, "interleaved", "adamw", "bf16"),
        ({"dp": 2, "zero": 2}, "2bw", "adamw", "bf16"),
        ({"dp": 2, "zero": 3}, "1f1b", "adamw", "fp32"),
        ({"tp": 2, "dp": 2, "zero": 3}, "2bw", "muon", "bf16"),
    ],
    ids=str,
)
def test_grids(parallel: dict[str, Any], schedule: str, optimizer: str, dtype: str) -> None:
    """Stages are in equal parts: gradients that are reduced together have another order of addition
    otherwise."""
    config = make(
        parallel=parallel,
        pipeline={"schedule": schedule},
        optim={"name": optimizer},
        train={"dtype": dtype},
        memory={"parts": 4},
    )
    ranks = config.parallel.num_ranks
    for outcome, without in zip(
        *(run_ranks(run, ranks, hosted(config, host)) for host in (True, False)), strict=True
    ):
        outcome.check(without)
        assert outcome.moved[0] > 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_with_it_and_gone_on_with_without_it_and_back(dtype: str, tmp_path: Path) -> None:
    config = make(pipeline={"schedule": "2bw"}, train={"dtype": dtype, "num_steps": 10})
    whole = train(build(config), 2, 3)
    for before, after in ((True, False), (False, True), (True, True)):
        first = build(hosted(config, before))
        second = build(hosted(config, after))
        begun = train(first, 2)
        checkpoint.save(tmp_path, first, "corpus")
        checkpoint.resume(tmp_path, second, "corpus", print)
        train(second, 3, steps=begun.steps).check(whole)


class SlowHost(HostWork):
    """Takes so many seconds for a group from when that is waited for; fails in a step."""

    def __init__(self, seconds: float = 0.0, fails_in: int | None = None):
        self._seconds = seconds
        self._fails_in = fails_in
        self.num_steps = 0
        self.threads, self._awaited = set[int](), threading.Semaphore(0)

    def watch(self, host: HostUpdates) -> None:
        wait = host.wait
        host.wait = lambda group: (self._awaited.release(), wait(group))[1]  # type: ignore[method-assign]

    def step(self, step: Callable[[], None], numel: int) -> None:
        if self.num_steps == self._fails_in:
            raise RuntimeError("the host has lost its memory")
        self.num_steps += 1
        self.threads.add(threading.get_ident())
        if self._seconds:
            assert self._awaited.acquire(timeout=200)
            time.sleep(self._seconds)
        step()


def test_a_slow_host_is_waited_for_and_changes_nothing() -> None:
    config = hosted(make(pipeline={"schedule": "2bw"}))
    plain, slow = build(config), build(config, work := SlowHost(0.01))
    work.watch(slow.state.host)
    slow.executor.recording = Recording(HostClock())
    train(slow, 3, 1).check(train(plain, 3, 1))
    assert len(work.threads - {threading.get_ident()}) == 1, "beside the launch thread"
    events = slow.executor.recording.events()
    waited = sum(event.waited for event in events if event.action.kind is Kind.UPDATE)
    assert waited > 0.01 * work.num_steps > 0
    assert any(event.over for event in events if event.action.kind is Kind.HOST)


class LateCopies(HostWork):
    """Streams: what is copied is there when one is waited for, and not before. `marks`: those not
    yet reached."""

    def __init__(self) -> None:
        self.launches = threading.get_ident()
        self.marks = list[object]()
        self._asked: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by thread
        self.ways: dict[int, set[str]] = {}

    def mark(self) -> object:
        assert threading.get_ident() == self.launches
        self.marks.append(mark := object())
        return mark

    @contextmanager
    def reach(self, mark: object, way: str) -> Iterator[None]:
        assert mark in self.marks
        thread = threading.get_ident()
        self.ways.setdefault(thread, set()).add(way)
        yield
        time.sleep(1e-3)
        super().copy(self._asked.pop(thread))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._asked[threading.get_ident()] = list(pairs)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("schedule", "dtype"), [("2bw", "bf16"), ("1f1b", "fp32")])
def test_copies_on_streams_of_their_own_are_waited_for(schedule: str, dtype: str) -> None:
    config = make(pipeline={"schedule": schedule}, train={"dtype": dtype})
    run(hosted(config), work := LateCopies()).check(run(config))
    assert sorted(map(sorted, work.ways.values())) == [["from host"], ["to host"]]
    assert work.launches not in work.ways
    assert len(work.marks) == 2 * 4, "each way of each batch is behind what was launched before it"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_on_the_host_of_a_gpu(optimizer: str) -> None:
    """Master copy, moments, and room for gradients and weights; nothing of Muon's matrices."""
    config = resolve(make(train={"dtype": "bf16"}, optim={"name": optimizer}), 1)
    without, there = (
        predict(JobPlan(hosted(config, host)), device=torch.device("cuda"))[0]
        for host in (False, True)
    )
    engine = build(hosted(config))
    engine.state.allocate()
    columns = engine.state.num_bytes()
    matrices = matrices_of(engine) if optimizer == "muon" else {}
    stays = 4 * sum(matrices.values())
    assert there.host - without.host >= columns["master"] + columns["optimizer"] - 2 * stays
    assert (there.master, there.optimizer) == (stays, stays)
    assert there.weights == without.weights == columns["weights"]
    assert there.total < without.total


def matrices_of(engine: Engine) -> dict[str, int]:
    """Numbers of elements of the matrices that Muon orthogonalises, by name."""
    return {
        slot.name: math.prod(slot.shape) for slot in engine.state.slots if slot.placement.matrices
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_muons_matrices_stay_on_the_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[int, str] = {}  # of the host's memory

    def zeros(self: HostMemory, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        tensor = Memory.zeros(self, kind, chunk, dtype)
        taken[tensor.untyped_storage().data_ptr()] = kind
        return tensor

    monkeypatch.setattr(HostMemory, "zeros", zeros)
    config = hosted(
        make(
            pipeline={"schedule": "2bw"},
            optim={"name": "muon"},
            train={"dtype": dtype},
            memory={"parts": 4},
        )
    )
    engine = build(config)
    state = engine.state
    matrices = matrices_of(engine)
    assert state.weights.master is not None
    masters = state.weights.master.views()
    kinds = {name: taken.get(view.untyped_storage().data_ptr()) for name, view in masters.items()}
    assert {name for name, kind in kinds.items() if kind is None} == matrices.keys()
    assert set(kinds.values()) == {None, "master"}
    numel = sum(state.host.sizes)
    assert numel == sum(view.numel() for view in masters.values()) - sum(matrices.values())
    for room in filter(None, (state.host.staging, state.weights.made)):
        assert numel == pytest.approx(sum(tensor.numel() for tensor in room.tensors), rel=0.05)
    train(engine, 3, 1).check(train(build(hosted(config, False)), 3, 1))


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_failures_on_the_host_end_training(schedule: str) -> None:
    config = hosted(make(pipeline={"schedule": schedule}))
    with pytest.raises(RuntimeError, match="lost its memory"):
        run(config, SlowHost(fails_in=4))


class DeadlyHost(HostWork):
    """Ends the process in the middle of a batch: one group is made, the next ones are not."""

    num_steps = 0

    def step(self, step: Callable[[], None], numel: int) -> None:
        self.num_steps += 1
        if self.num_steps == 4 * 3 + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step()


def killed(config: Config, folder: Path) -> None:
    engine = build(config, DeadlyHost())
    train(engine, 2)
    checkpoint.save(folder, engine, "corpus")
    train(engine, 3)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_kill_in_the_middle_of_an_update_is_gone_on_from_to_the_bit(tmp_path: Path) -> None:
    config = hosted(make(pipeline={"schedule": "2bw"}, train={"num_steps": 10}))
    must_be_killed(partial(killed, config, tmp_path))
    engine = build(config)
    whole = train(build(config), 2, 3)
    checkpoint.resume(tmp_path, engine, "corpus", print)
    train(engine, 3, steps=whole.steps[:2]).check(whole)


def test_forecast_before_a_run() -> None:
    """Computed by hand: 1f1b waits for the first gradients and all of the host; 2bw for what a
    batch leaves over."""
    config = resolve(
        hosted(make(pipeline={"num_microbatches": 4, "schedule": "2bw"}, parallel={"pp": 2})), 2
    )
    assert forecast_host(JobPlan(hosted(config, False))) is None
    flops = training_flops_per_token(config.model)
    speeds = Speeds(
        parameters=1e6, num_bytes=1e12, flops=flops * 112 / 2
    )  # a batch of 112 tokens takes a second
    hidden = forecast_host(JobPlan(config), speeds)
    assert hidden is not None
    assert (hidden.tokens, hidden.step_ms, hidden.exposed_ms) == (112, pytest.approx(1000), 0)
    assert hidden.update_ms == pytest.approx(hidden.parameters / 1e3)
    seconds = 0.3
    hidden = forecast_host(
        JobPlan(config), speeds := replace(speeds, parameters=hidden.parameters / seconds)
    )
    assert hidden is not None
    assert hidden.exposed_ms == 0
    assert hidden.needed_tokens == round(seconds * 112 * 4 / 3), "copies take no time"
    assert f"from about {hidden.needed_tokens:,} tokens" in str(hidden)
    short = forecast_host(JobPlan(config), replace(speeds, parameters=hidden.parameters / 2.0))
    assert short is not None
    # two seconds a batch, of which three of four pairs hide 0.75, less half of one: NORM and HOST
    # are an action apart
    assert short.exposed_ms == pytest.approx(2000 - 750, abs=125)
    synchronous = forecast_host(
        JobPlan(replace(config, pipeline=replace(config.pipeline, schedule="1f1b"))), speeds
    )
    assert synchronous is not None
    assert 0.5 * seconds < 1e-3 * synchronous.exposed_ms < 1.01 * seconds
    assert "no slack" in str(synchronous)
    alone = resolve(hosted(make(train={"dtype": "bf16"})), 1)
    (engine := build(alone)).state.allocate()
    assert predict(JobPlan(alone))[0].state == sum(engine.state.num_bytes().values()), (
        "with the room on the host"
    )
    measured = forecast_host(JobPlan(config))
    assert measured is not None
    assert measured.update_ms > 0


@pytest.mark.parametrize("zero", [2, 3])
def test_forecasts_with_shards_that_are_updated_at_once(zero: int) -> None:
    """A plan has several segments, and one update: a step that nothing hides is longer by it."""
    sections = {"parallel": {"dp": 2, "zero": zero}, "train": {"micro_batch_size": 1}}
    config = resolve(hosted(make(pipeline={"num_microbatches": 4}, **sections)), 2)
    speeds = Speeds(parameters=1e4, num_bytes=1e12, flops=1e15)
    forecast = forecast_host(JobPlan(config), speeds)
    assert forecast is not None
    assert forecast.exposed_ms == pytest.approx(forecast.parameters / 1e4 * 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"optim": {"name": "lamb"}},
            r"optim\.name = 'lamb'.*norms of full parameters.*try adamw",
        ),
        (
            {"optim": {"clip_grad": 0.0}, "pipeline": {"schedule": "pipedream"}},
            r"optim\.clip_grad.*try 1\.0",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_unsupported_combinations(sections: dict[str, dict[str, Any]], message: str) -> None:
    config = make(**sections | {"memory": {"host_optimizer": True} | sections.get("memory", {})})
    assert re.search(message, str(ConfigError(*conflicts(config))))
