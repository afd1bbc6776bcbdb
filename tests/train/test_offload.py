"""Activations that wait in the slow tier: the same bits, in less memory, as predicted; stopped,
saved, refused."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Outcome, gpt, start, train
from ranks import run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from hybridpar import checkpoint
from hybridpar.config import Config, from_mapping
from hybridpar.config.rules import conflicts
from hybridpar.errors import HybridparError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import measure, predict
from hybridpar.runtime import slow_tier
from hybridpar.runtime.activation_offloader import STORAGES, Notes
from hybridpar.runtime.slow_tier import FileTier, HostTier, MoveTimes
from hybridpar.state.host import CopyTime, HostWork
from hybridpar.state.residency.store import DiskStore
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train import engine
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.forecasts.offload_forecast import OffloadSpeeds, forecast_offload

CPU = torch.device("cpu")
M = 6


def make(
    folder: Path,
    away: int | str,
    model: Mapping[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Config:
    """A GPT of odd sizes with dropout, a page and more a tensor."""
    return gpt(
        (3, 72, 6, 22, 131),
        {
            "model": {"dropout": 0.1, "attention_dropout": 0.1},
            "parallel": {"dp": 1},
            "train": {"device": "cpu"},
            "pipeline": {"num_microbatches": M, "schedule": "gpipe"},
            "memory": {"offload_activations": away, "folder": str(folder)},
        },
        {"model": dict(model or {})},
        sections,
    )


def run(config: Config, *stretches: int) -> tuple[Outcome, int]:
    """Results of a rank's training, with the bytes that have left; and the allocator's peak."""
    steps: list[StepResult] = []
    with measure(CPU) as meter:
        engine, loader = start(config)
        for num_batches in stretches:
            engine.train(loader, num_batches, steps.append)
    outcome = train(engine, steps=steps)
    outcome.moved = engine.moves.activations.num_bytes
    return outcome, meter.read().peak


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model", "pipeline", "dtype"),
    [
        ({}, {}, "fp32"),
        ({"kind": "bert"}, {}, "bf16"),
        ({}, {"recompute": "0,2"}, "fp32"),
        ({}, {"recompute": "selective", "split_backward": True}, "fp32"),
        (
            {"norm": "rms_norm", "activation": "swiglu", "position": "rotary", "logits_chunk": 40},
            {},
            "fp32",
        ),
    ],
    ids=str,
)
def test_equal_bits_in_less_memory(
    model: dict[str, Any], pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    whole, some, most = (
        run(make(tmp_path, away, model, pipeline=pipeline, train={"dtype": dtype}), 2)[0]
        for away in (0, 2, 99)
    )
    some.check(whole)
    most.check(whole)
    assert 0 == whole.moved < some.moved < most.moved


def test_returned_tensors_are_held_by_nobody_else(tmp_path: Path) -> None:
    """Nor by the thread that read it: a backward that goes on at once gives it up."""
    tier = FileTier(tmp_path)
    gone = []
    for _ in range(20):
        content = [torch.ones(3 << 20, dtype=torch.uint8)]
        storage = StorageWeakRef(content[0].untyped_storage())
        place, written = tier.write(content)
        written.result()
        read = tier.read(place, content)
        content.clear()
        read.add_done_callback(lambda _, storage=storage: gone.append(storage.expired()))
        read.result()
    tier.close()
    assert gone == 20 * [True]


def test_equal_bits_by_way_of_the_host_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose device here is a CPU."""
    whole, _ = run(make(tmp_path, 0), 2)
    monkeypatch.setattr(engine, "FileTier", lambda folder: HostTier(CPU))
    outcome, _ = run(make(tmp_path, 99), 2)
    outcome.check(whole)
    assert outcome.moved > 0
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "pipeline"),
    [
        ({"pp": 4}, {"schedule": "2bw", "split": (1, 1, 2, 1)}),
        ({"pp": 2, "tp": 2, "sequence": True}, {}),
        ({"pp": 2, "tp": 2}, {"schedule": "interleaved", "split": (1, 1, 1, 2)}),
        ({"pp": 2, "dp": 2, "zero": 1}, {"schedule": "2bw", "warmup": "latency"}),
    ],
    ids=str,
)
def test_grids(parallel: dict[str, Any], pipeline: dict[str, Any], tmp_path: Path) -> None:
    configs = [make(tmp_path, away, parallel=parallel, pipeline=pipeline) for away in (0, 99)]
    wholes, outcomes = (run_ranks(run, config.parallel.num_ranks, config, 2) for config in configs)
    for (whole, _), (outcome, _) in zip(wholes, outcomes, strict=True):
        outcome.check(whole)
    assert any(outcome.moved for outcome, _ in outcomes)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("pp", "model", "pipeline", "dtype"),
    [
        (1, {"kind": "bert"}, {"recompute": "selective"}, "bf16"),
        (3, {}, {"schedule": "2bw", "warmup": "latency"}, "fp32"),
    ],
    ids=str,
)
def test_the_allocator_counts_what_is_predicted(
    pp: int, model: dict[str, Any], pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(
        tmp_path,
        99,
        LARGE | model,
        parallel={"pp": pp},
        pipeline=pipeline,
        train={"dtype": dtype, "micro_batch_size": 4, "num_steps": 4},
    )
    plain = predict(JobPlan(replace(config, memory=replace(config.memory, offload_activations=0))))
    runs = run_ranks(run, pp, config, 2, 2)  # the optimizer's state is there when the second begins
    for (outcome, peak), stage, before in zip(runs, predict(JobPlan(config)), plain, strict=True):
        assert stage.total == pytest.approx(peak, rel=0.02)
        assert (stage.total < before.total) == (outcome.moved > 0)


LARGE = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "seq_length": 128, "vocab_size": 1024}


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"dp": 2, "zero": 3}},
        {"parallel": {"pp": 2}, "compression": {"messages": "int8"}},
        {"memory": {"host_optimizer": True}},
        {"memory": {"budget": 8 << 20}},
    ],
    ids=str,
)
def test_beside_what_else_moves(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Equal bits, and as much less memory as predicted."""
    whole, away = (make(tmp_path, away, LARGE, **sections) for away in (0, 99))
    ranks = whole.parallel.num_ranks
    grid = whole.parallel
    before, after = (run_ranks(run, ranks, config, 1, 2) for config in (whole, away))
    predicted = list(zip(predict(JobPlan(whole)), predict(JobPlan(away)), strict=True))
    for rank, ((outcome, peak), (less, smaller_peak)) in enumerate(zip(before, after, strict=True)):
        less.check(outcome)
        plain, smaller = predicted[rank // (ranks // grid.pp)]
        not_counted = (
            plain.total - peak if whole.memory.budget else 0
        )  # pages of the budget, taken from the system
        assert smaller.total < plain.total
        assert smaller.total - not_counted == pytest.approx(smaller_peak, rel=0.02)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("seconds", "away"), [((0.0, 0.0), (4,)), ((0.0, 1e3), (0,))])
def test_most_micro_batches_that_cost_no_time(
    seconds: tuple[float, float],
    away: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All leave over a tier that takes no time, over one that takes for ever, if only one way,
    none."""
    monkeypatch.setattr(FileTier, "times", lambda self: MoveTimes(*seconds))
    config = make(tmp_path, "auto")
    said = list[str]()
    found = autotune(config, ProcessGrid(), CPU, said.append)
    assert found == replace(config, memory=replace(config.memory, offload_activations=away))
    assert f"memory.offload_activations: {list(away)}" in said[0]


@pytest.mark.thorough
def test_first_measurement_leaves_no_file_and_no_thread(tmp_path: Path) -> None:
    """Else a run with a budget would have two of each; an engine that one rank cannot build, none
    of them has."""
    config = make(
        tmp_path,
        0,
        pipeline={"schedule": "2bw", "early_switch": "auto"},
        memory={"budget": 1 << 21},
    )
    before = set(threading.enumerate())
    built = list[Engine]()

    def build(make_one: Callable[[], Engine]) -> Engine:
        built.append(make_one())
        return built[0]

    autotune(config, ProcessGrid(), CPU, print, build)
    assert isinstance(built[0].state.memory, TieredMemory)
    assert set(threading.enumerate()) <= before
    assert not [
        link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)
    ]


def settled(config: Config) -> object:
    parallel = config.parallel
    grid = ProcessGrid(pp=parallel.pp, dp=parallel.dp)
    return autotune(config, grid, CPU, print).memory.offload_activations


@pytest.mark.thorough
@pytest.mark.ranks
def test_all_ranks_find_the_same(tmp_path: Path) -> None:
    """A pipeline of three stages, the last of which has nothing to send away; the other two may."""
    first, *others = run_ranks(settled, 4, make(tmp_path, "auto", parallel={"pp": 2, "dp": 2}))
    assert len(first) == 2
    assert all(0 <= number <= M - 2 for number in first)
    assert others == [first] * 3


@pytest.mark.thorough
def test_a_forecast(tmp_path: Path) -> None:
    """A fast file costs nothing, a slow one is used by none; what is saved is what the two
    predictions differ by."""
    config, given = (make(tmp_path, away, parallel={"pp": 2}) for away in ("auto", 4))
    fast, slow = (
        forecast_offload(JobPlan(config), OffloadSpeeds(speed, speed, 1e10))
        for speed in (1e15, 1e3)
    )
    asked = forecast_offload(JobPlan(given), OffloadSpeeds(1e3, 1e3, 1e10))
    assert fast is not None and slow is not None and asked is not None  # noqa: PT018
    assert (fast.away, slow.away) == ((4, 4), (0, 0))
    assert fast.exposed_ms < 0.01 * fast.step_ms
    assert min(fast.moved) > 0
    assert slow.saved == (0, 0)
    assert asked.saved == fast.saved
    assert asked.exposed_ms > fast.exposed_ms
    assert forecast_offload(JobPlan(make(tmp_path, 0))) is None


@pytest.mark.thorough
def test_saved_and_stopped(tmp_path: Path) -> None:
    """Gone on with at another setting, after a stop in the middle of a batch that was under way."""
    config = make(
        tmp_path, 0, pipeline={"schedule": "2bw", "num_microbatches": 6}, train={"num_steps": 10}
    )
    ends = []
    for number, away in enumerate(((0, 0), (0, 99), (99, 0))):
        first, second = (
            start(replace(config, memory=replace(config.memory, offload_activations=setting)))
            for setting in away
        )
        first[0].train(
            first[1],
            10,
            lambda result, engine=first[0]: engine.request_stop(),  # type: ignore[misc],
        )
        checkpoint.save(tmp_path / str(number), first[0], "corpus")
        checkpoint.resume(tmp_path / str(number), second[0], "corpus", print)
        assert 2 < second[0].batches_done < 10
        ends.append(train(second[0], 2))
    for end in ends[1:]:
        end.check(ends[0])


def test_a_disk_that_fails_ends_training_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: DiskStore, item: int, into: memoryview) -> None:
        raise self._failure("read a part of the state", OSError(5, "Input/output error"))

    monkeypatch.setattr(DiskStore, "read", read)
    with pytest.raises(HybridparError, match=f"{tmp_path}: cannot read"):
        run(make(tmp_path, 1), 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"memory": {"offload_activations": "auto", "budget": 1 << 30}},
            r"'auto': not supported with memory\.budget = 1073741824, .*; try 0",
        ),
        ({"memory": {"offload_activations": -1}}, r"-1: must not be negative; try 0"),
        (
            {"memory": {"offload_activations": []}},
            r"\[\]: must have 1 numbers, one for each pipeline rank",
        ),
        (
            {"memory": {"offload_activations": [1, 2]}},
            r"\[1, 2\]: must have 1 numbers, one for each pipeline rank",
        ),
    ],
    ids=str,
)
def test_unsupported_combinations(sections: dict[str, Any], message: str) -> None:
    problems = [str(problem) for problem in conflicts(from_mapping(sections))]
    assert any(re.search(r"memory\.offload_activations = " + message, text) for text in problems), (
        problems
    )


# -- what moves


def test_only_what_is_the_forwards_own_moves() -> None:
    """Weights, what others hold, integers and small tensors stay; two views of one block are one;
    the input may go."""
    weight = torch.randn(64, 64, requires_grad=True)
    held = []
    x = torch.randn(64, 64, requires_grad=True)
    notes = Notes()
    with notes.noting(x):
        y = x @ weight  # keeps both
        z = y.view(32, 128).exp()  # itself
        held.append((z * z.t().reshape(32, 128)).sin())  # keeps z, a copy, and what sin is of
        out = (held[0] * held[0].detach().clone()).sum() + (x[:2] * 2).exp().sum()
    moving = {tensor.untyped_storage()._cdata for tensor in notes.alone()}
    assert x.untyped_storage()._cdata in moving
    assert not moving & {tensor.untyped_storage()._cdata for tensor in (weight, z, held[0])}
    del z
    assert len(notes.alone()) == len(moving) + 1
    out.backward()


@pytest.mark.parametrize(
    "make_tier", [FileTier, lambda folder: HostTier(CPU)], ids=["file", "host"]
)
def test_bytes_come_back_as_they_left(
    make_tier: Callable[[Path], FileTier | HostTier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a page, of tensors that do not fill them; a place is used again."""
    for name in ("_PIECE", "_PINNED_PIECE"):
        monkeypatch.setattr(slow_tier, name, 4096)
    tier = make_tier(tmp_path)
    for sizes in ((1, 5000, 4095), (4096, 3, 20_000), (7,)):
        content = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        before = [tensor.clone() for tensor in content]
        place, written = tier.write(content)
        written.result()
        for tensor in content:
            tensor.zero_()
        tier.read(place, content).result()
        assert all(map(torch.equal, content, before))
    assert len(tier._free) == -(-(4096 + 3 + 20_000) // 4096)
    tier.close()


def test_a_place_is_free_once_the_copies_from_it_are_over() -> None:
    """Beside a GPU they go on when they were called: a write to that place would be ahead of
    them."""
    free: list[tuple[str, int]] = []

    class Late(HostWork):
        @contextmanager
        def reach(self, mark: Any, way: str) -> Iterator[CopyTime]:
            yield CopyTime()
            free.append((way, len(tier._free)))

    tier = HostTier(CPU)
    tier._work = Late()
    content = [torch.ones(3, dtype=torch.uint8)]
    place, written = tier.write(content)
    written.result()
    tier.read(place, content).result()
    tier.close()
    assert free == [("out", 0), ("in", 0)]
    assert len(tier._free) == 1


def test_bytes_of_a_tensor_are_on_its_device() -> None:
    content = STORAGES.content(torch.empty(2, 3, device="meta")[1])
    assert (content.device.type, content.shape, content.dtype) == ("meta", (24,), torch.uint8)
