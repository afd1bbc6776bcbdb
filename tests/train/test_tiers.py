"""State in two tiers: the same bits at any budget, which is kept; saved, gone on with and stopped
as without one."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PIPELINES, Outcome, gpt, samples, train
from ranks import run_ranks
from train.runs import must_be_killed

from hybridpar import checkpoint
from hybridpar.config import Config, MemoryConfig
from hybridpar.errors import ConfigError, HybridparError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.state import StatePolicy
from hybridpar.state.residency import device_tier
from hybridpar.state.residency.device_tier import DeviceTieredMemory
from hybridpar.state.residency.pages import Region
from hybridpar.state.residency.store import PAGE, DiskStore
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine, Residency
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.costs_file import describe, run_costs

CPU = torch.device("cpu")
PLENTY = 1 << 30


def make(model: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes with dropout; three layers, one part each."""
    return gpt(
        (3, 48, 6, 14, 131),
        {"model": {"dropout": 0.1}, "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 4}},
        {"model": dict(model or {})},
        sections,
    )


def build(config: Config, folder: Path, share: float | None, *, on_host: bool = False) -> Engine:
    """An engine whose budget is the least that works and a share of what is beyond; None: it has no
    budget.

    on_host: its tiers are as those of a GPU.
    """
    grid = ProcessGrid(sizes_of(config.parallel))
    if share is None:
        return Engine(
            JobPlan(replace(config, memory=MemoryConfig(parts=config.model.num_blocks))), grid, CPU
        )
    probe = Engine(
        JobPlan(replace(config, memory=MemoryConfig(budget=PLENTY, folder=str(folder)))), grid, CPU
    )
    least = probe.moves.accesses.least_budget()
    most = probe.moves.accesses.most_bytes
    probe.state.memory.close()
    budget = int(least + share * (most - least))
    sharded = StatePolicy(config, 1, 1).moved_kinds
    return Engine(
        JobPlan(replace(config, memory=MemoryConfig(budget=budget, folder=str(folder)))),
        grid,
        CPU,
        residency=Residency(DeviceTieredMemory(budget, CPU, sharded) if on_host else None),
    )


def run(
    config: Config,
    folder: Path,
    share: float | None,
    stretches: tuple[int, ...] = (2, 1),
    *,
    on_host: bool = False,
) -> Outcome:
    """Trains such an engine, within its budget."""
    engine = build(config, folder, share, on_host=on_host)
    outcome = train(engine, *stretches)
    if share is not None:
        outcome.moved = close(engine)
    return outcome


def close(engine: Engine) -> int:
    """Ends what its tiers do; bytes that they have moved."""
    assert isinstance(engine.state.memory, TieredMemory)
    tiers = engine.state.memory.tiers
    assert tiers.traffic.peak <= tiers.budget <= engine.state.memory.budget
    engine.state.memory.close()
    return tiers.traffic.read + tiers.traffic.written


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_any_budget_gives_the_same_bits(
    pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(pipeline=pipeline, train={"dtype": dtype})
    whole, tight, roomy = (run(config, tmp_path, share) for share in (None, 0.0, 0.2))
    tight.check(whole)
    roomy.check(whole)
    assert tight.moved > roomy.moved > 0


@pytest.mark.parametrize(
    ("pipeline", "dtype"),
    [({"schedule": "2bw"}, "bf16"), ({"schedule": "1f1b"}, "fp32")],
    ids=["2bw", "1f1b"],
)
def test_storages_that_are_empty_while_items_are_on_the_host(
    pipeline: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of GPUs, of which the device here is a CPU; its stream is so late that nothing may
    leave at once."""
    marks: list[Late] = []

    class Late:
        def __init__(self, device: torch.device):
            self.since = time.perf_counter()
            marks.append(self)

        def is_done(self) -> bool:
            return time.perf_counter() > self.since + 1e-3

    monkeypatch.setattr(device_tier, "_Passed", Late)
    monkeypatch.setattr(device_tier, "_is_late", lambda device: True)
    assert on_host(make(pipeline=pipeline, train={"dtype": dtype}), tmp_path) > 0
    assert marks


def on_host(config: Config, folder: Path) -> int:
    outcome = run(config, folder, 0.1, on_host=True)
    outcome.check(run(config, folder, None))
    return int(outcome.moved)


@pytest.mark.thorough
@pytest.mark.ranks
def test_shares_on_the_host(tmp_path: Path) -> None:
    """Like the test above, with chunks that replicas share."""
    config = make({"num_layers": 2}, parallel={"dp": 2, "zero": 3}, pipeline={"schedule": "2bw"})
    assert min(run_ranks(on_host, 2, config, tmp_path)) > 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("parts", "dtype"), [(1, "fp32"), (5, "fp32"), (5, "bf16")])
def test_parts_change_nothing(parts: int, dtype: str) -> None:
    """A tied weight's gradients are added in one order: of a head, then of an embedding, in one
    backward or in two."""
    config = make(
        pipeline={"schedule": "2bw", "num_microbatches": 16},
        train={"dtype": dtype, "micro_batch_size": 1},
    )
    one, other = (
        train(Engine(JobPlan(replace(config, memory=MemoryConfig(parts=n))), ProcessGrid(), CPU), 2)
        for n in (0, parts)
    )
    one.check(other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optim", "model"),
    [
        ({"name": "sgd"}, {}),
        ({"name": "lamb"}, {}),
        ({"name": "muon"}, {}),
        ({"clip_grad": 0.0}, {}),
        ({"staleness": "nesterov"}, {}),
        ({}, {"kind": "bert"}),
        ({}, {"tie_embeddings": False}),
    ],
    ids=str,
)
def test_optimizers_and_models(
    optim: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    """LAMB and Muon update all at once, so their least budget has room for everything but
    activations."""
    config = make(model, optim=optim)
    run(config, tmp_path, 0.0).check(run(config, tmp_path, None))


@pytest.mark.thorough
def test_a_part_at_a_time_moves_weights_once_a_sweep(tmp_path: Path) -> None:
    """gpipe on one stage, without a weight that the first and the last part have in common."""
    untied = {"tie_embeddings": False}
    by_part, by_microbatch = (
        run(make(untied, pipeline={"schedule": schedule}), tmp_path, 0.0)
        for schedule in ("gpipe", "1f1b")
    )
    assert by_part.moved < by_microbatch.moved / 1.5
    assert run(make(untied), tmp_path, 1.0).moved == 0


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "pipeline", "dtype"),
    [
        ({"tp": 2, "sequence": True}, {}, "fp32"),
        ({"dp": 2}, {}, "bf16"),
        ({"pp": 2, "dp": 2, "zero": 1}, {"schedule": "2bw"}, "bf16"),
        ({"pp": 2, "dp": 2, "zero": 3}, {"schedule": "interleaved"}, "fp32"),
    ],
    ids=str,
)
def test_grids(
    parallel: dict[str, Any], pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(parallel=parallel, pipeline=pipeline, train={"dtype": dtype})
    ranks = config.parallel.num_ranks
    outcomes, wholes = (run_ranks(run, ranks, config, tmp_path, share) for share in (0.0, None))
    for outcome, whole in zip(outcomes, wholes, strict=True):
        outcome.check(whole)
    assert any(outcome.moved for outcome in outcomes)


def resumed(config: Config, folder: Path) -> int:
    """Saved with the least budget and gone on with more, then asked to stop, in the middle of other
    batches: it is a run without a budget. Bytes moved."""
    plain, first, second = (build(config, folder, share) for share in (None, 0.0, 0.2))
    train(plain, 3)
    for engine, num_batches in ((first, 2), (second, 1)):
        checkpoint.resume(folder / "saved", engine, "corpus", print)
        train(engine, num_batches)
        checkpoint.save(folder / "saved", engine, "corpus")
    for engine in (plain, second):
        engine.train(
            samples(engine),
            50,
            lambda result, engine=engine: engine.request_stop(),  # type: ignore[misc],
        )
        engine.request_stop(False)
        assert 4 < engine.batches_done < 20
    train(second, 1).check(train(plain, 1))
    return close(first) + close(second)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_items_and_shares_of_replicas_are_saved_and_stopped(
    pipeline: dict[str, Any], dtype: str, zero: int, tmp_path: Path
) -> None:
    ranks = 1 + (zero > 0)
    config = make(
        {"num_layers": 2},
        parallel={"dp": ranks, "zero": zero},
        pipeline=pipeline,
        train={"dtype": dtype, "num_steps": 60},
    )
    assert min(run_ranks(resumed, ranks, config, tmp_path)) > 0


def test_a_stop_keeps_the_weights_that_the_next_batch_reads(tmp_path: Path) -> None:
    """2bw trains a batch on the version before the newest one. A batch that is cut off has read it
    last, and its update would have overwritten it."""
    config = make(
        {"num_layers": 2}, pipeline={"schedule": "2bw"}, train={"dtype": "bf16", "num_steps": 60}
    )
    plain, tight = (build(config, tmp_path, share) for share in (None, 0.0))
    for engine in (plain, tight):
        stop = engine.request_stop
        engine.train(samples(engine), 50, lambda result, stop=stop: stop())  # type: ignore[misc]
        engine.request_stop(False)
        assert 1 < engine.batches_done < 20
    train(tight, 2).check(train(plain, 2))
    assert close(tight) > 0


@pytest.mark.thorough
@pytest.mark.ranks
def test_shares_that_are_updated_at_once(tmp_path: Path) -> None:
    """Muon's least budget has room for all shares."""
    config = make(
        {"num_layers": 2},
        parallel={"dp": 2, "zero": 3},
        optim={"name": "muon"},
        train={"num_steps": 60},
    )
    assert run_ranks(resumed, 2, config, tmp_path) == [0, 0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("before", "after", "dtype"), [(0.0, None, "bf16"), (None, 0.1, "fp32")])
def test_saved_with_a_budget_and_gone_on_with_without_one_and_back(
    before: float | None, after: float | None, dtype: str, tmp_path: Path
) -> None:
    config = make(pipeline={"schedule": "2bw"}, train={"dtype": dtype, "num_steps": 10})
    train(engine := build(config, tmp_path, before), 2)
    checkpoint.save(tmp_path, engine, "corpus")
    gone_on(config, tmp_path, after)


def gone_on(config: Config, folder: Path, share: float | None) -> None:
    """A run resumed after two batches ends like a whole run without a budget."""
    whole = run(config, folder, None, (2, 3))
    engine = build(config, folder, share)
    checkpoint.resume(folder, engine, "corpus", print)
    train(engine, 3, steps=whole.steps[:2]).check(whole)


def killed(config: Config, folder: Path) -> None:
    """Saves after two batches, and ends in the next one, when half of an item is written."""
    engine = build(config, folder, 0.0)
    real = DiskStore.write
    train(engine, 2)
    checkpoint.save(folder, engine, "corpus")
    calls = iter(range(100))

    def write(self: DiskStore, item: int, content: memoryview) -> None:
        if next(calls) == 5:
            os.pwrite(self._file, content[:PAGE], self._offsets[item])
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, item, content)

    DiskStore.write = write  # type: ignore[method-assign]  # of a process that is about to end
    train(engine, 3)


@pytest.mark.ranks
def test_a_kill_in_the_middle_of_a_move_is_gone_on_from_to_the_bit(tmp_path: Path) -> None:
    config = make(pipeline={"schedule": "2bw"}, train={"num_steps": 10})
    must_be_killed(partial(killed, config, tmp_path))
    gone_on(config, tmp_path, 0.0)


def test_a_budget_that_is_too_small_names_the_least(tmp_path: Path) -> None:
    config = replace(make(), memory=MemoryConfig(budget=1000, folder=str(tmp_path)))
    with pytest.raises(
        ConfigError,
        match=r"memory\.budget = 1000: too small: one segment .* needs \d+ bytes " r"at a time",
    ):
        Engine(JobPlan(config), ProcessGrid(), CPU)


def test_a_disk_that_fails_ends_training_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(make(), tmp_path, 0.0)
    calls = iter(range(1000))

    def write(self: DiskStore, item: int, content: memoryview) -> None:
        if next(calls) > 20:
            raise self._failure("write a part of the state", OSError(5, "Input/output error"))
        real(self, item, content)

    real = DiskStore.write
    monkeypatch.setattr(DiskStore, "write", write)
    with pytest.raises(
        HybridparError, match=rf"{tmp_path}: cannot write a part of the state: .*Input/output error"
    ):
        train(engine, 20)


def test_a_slow_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as waiting for other stages, of which there are none."""
    real = DiskStore.read

    def read(self: DiskStore, item: int, into: memoryview) -> None:
        time.sleep(0.005)
        real(self, item, into)

    monkeypatch.setattr(DiskStore, "read", read)
    engine, grid = build(config := make(), tmp_path, 0.0), ProcessGrid()
    recorder = trace.Recorder(engine.executor, 0, 6)
    engine.train(samples(engine), 6, lambda result: recorder.after_step(result.step))
    recorder.close()
    costs = run_costs(JobPlan(config), trace.gather(recorder, grid))
    assert costs is not None
    (parts,) = costs.measured.parts
    assert parts.state > 0.005 > parts.waiting
    assert f"waiting for state to come and go ({tmp_path}) " in describe(costs, tmp_path)[-1]
    assert "waiting for other" not in describe(costs)[-1]


def test_memory_is_really_given_back(tmp_path: Path) -> None:
    """Bytes of the state by the system's count, after every step."""
    config = make({"hidden_size": 192, "vocab_size": 1001})
    engine = build(config, tmp_path, 0.1)
    memory = engine.state.memory
    assert isinstance(memory, TieredMemory)
    seen: list[int] = []
    engine.train(
        samples(engine),
        4,
        lambda result: seen.append(sum(resident_bytes(item.region) for item in memory.tiers.items)),
    )
    assert max(seen) <= memory.budget < sum(item.num_bytes for item in memory.items) / 2
    assert max(seen) > memory.budget / 2


def resident_bytes(region: Region) -> int:
    """Bytes of physical memory behind a region, as the kernel says."""
    found = (ctypes.c_ubyte * (len(region.view) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(region.tensor.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(region.view)), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE
