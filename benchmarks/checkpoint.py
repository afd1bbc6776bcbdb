"""Checkpoints of 1 GB: how long saving keeps training waiting, and what loading on another grid
takes.

Saving, on two ranks (two pipeline stages). Each round is a few training steps without a save, and
as many from the moment at which one begins to when it is done, for each way to save; the order
turns round from round to round:

    waits        hybridpar's and torch.distributed.checkpoint's save(): training stands still
    beside       hybridpar's Saver, and async_save(), with memory that is kept from save to save on
                 both sides

    blocked      time in the calls, also in the one that waits for the end if training has had all
                 its steps by then
    extra        how much longer those steps took than the round's steps without a save: blocked,
                 and what else cores and memory were wanted for. In seconds, and as a share of the
                 time from the call to the last sync

Loading, in fresh processes: two tensor parts from what the two stages wrote. DCP reads into tensors
cut in halves along their first dimension. Peak: the most resident memory that was added, from
before there are any tensors, less our own gradient buffers, over the state's bytes on that rank; so
it has hybridpar's initialisation in it. What has been read must be equal. Files were written just
before: both sides read them from the system's cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import common
from benchmarks.common import SHAPES, OurStep, over_ranks, run_ranks, summary
from hybridpar import checkpoint
from hybridpar.config import Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")
# cut along its first dimension, evenly, on both sides
COMPARED = "optimizer/blocks.1.mlp.up.weight.exp_avg"
PLAIN = "no save"


def config_of(shape: str, *, tp: int = 1, pp: int = 1) -> Config:
    base = common.engine_config(SHAPES[shape], tp=tp, pp=pp, num_microbatches=2)
    return from_mapping(
        {"checkpoint": {"keep": 1000}}, base
    )  # what is removed, and when, is no one's time


# -- saving


class Save:
    """One way to save. `begin` returns when training may go on, `end` when the checkpoint is there
    to last.

    `seconds`: from the beginning of the last one to its end, which may lie before `end` is called.
    """

    seconds: float

    def begin(self, folder: Path) -> None: ...
    def end(self) -> None: ...


class Ours(Save):
    def __init__(self, engine: Engine, root: Path, *, beside: bool):
        self._beside = beside
        self._began = 0.0
        self._saver = checkpoint.Saver(root, engine, "corpus", self._note)

    def _note(self, text: str) -> None:
        self.seconds = time.perf_counter() - self._began

    def begin(self, folder: Path) -> None:
        self._began = time.perf_counter()
        self._saver.start(beside=self._beside)
        if not self._beside:
            self._saver.settle()

    def end(self) -> None:
        self._saver.settle()


class Dcp(Save):
    """async_save's collectives, in its thread, have a group of their own."""

    def __init__(self, engine: Engine, *, beside: bool):
        self._engine, self._group, self._future = engine, dist.new_group(), None
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if beside else None
        self._done = threading.Event()

    def begin(self, folder: Path) -> None:
        began = time.perf_counter()
        tensors = self._engine.state.tensors()
        if self._stager is None:
            dcp.save(tensors, checkpoint_id=folder, process_group=self._group)
            self.seconds = time.perf_counter() - began
            return
        self._done.clear()
        self._future = dcp.async_save(
            tensors, checkpoint_id=folder, process_group=self._group, async_stager=self._stager
        )

        def note(_: object) -> None:
            self.seconds = time.perf_counter() - began
            self._done.set()

        self._future.add_done_callback(note)

    def end(self) -> None:
        if self._future is not None:
            self._future.result()
            self._done.wait()


def saving(shape: str, folder: Path, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round by way of saving: total, blocked, write; and bytes. Leaves the last
    ones in `folder`."""
    grid = ProcessGrid(pp=2)
    step = OurStep(config_of(shape, pp=2), SHAPES[shape], grid)
    engine = step.engine
    root = folder / "hybridpar"
    ways: dict[str, Save | None] = {
        PLAIN: None,
        "hybridpar waits": Ours(engine, root, beside=False),
        "hybridpar beside": Ours(engine, root, beside=True),
        "dcp waits": Dcp(engine, beside=False),
        "dcp beside": Dcp(engine, beside=True),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {"total": [], "blocked": [], "write": []} for name in ways
    }
    for _ in range(2):
        step()
    for i in range(-1, rounds):  # the first one is not counted: memory is taken then
        for name in list(ways) if i % 2 == 0 else list(ways)[::-1]:
            if grid.rank == 0:
                _clear(folder)
                os.sync()
            dist.barrier()
            times = _stretch(ways[name], step, folder / "dcp", steps)
            for key, value in times.items() if i >= 0 else ():
                found[name][key].append(value)
    for name in found:
        found[name] = {key: over_ranks(values, "max") for key, values in found[name].items()}
    _leave_both(ways, folder, grid)
    size = sum(t.nbytes for t in engine.state.tensors().values())
    return found | {"": {"bytes": over_ranks([float(size)], "sum")}}


def _stretch(way: Save | None, step: OurStep, folder: Path, steps: int) -> dict[str, float]:
    start = time.perf_counter()
    if way is not None:
        way.begin(folder)
    blocked = time.perf_counter() - start
    for _ in range(steps):
        step()
    at_last = time.perf_counter()
    if way is not None:
        way.end()
    end = time.perf_counter()
    seconds = getattr(way, "seconds", 0.0)
    return {"total": end - start, "blocked": blocked + end - at_last, "write": seconds}


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path)


def _leave_both(ways: Mapping[str, Save | None], folder: Path, grid: ProcessGrid) -> None:
    """Checkpoints of one state, for loading."""
    dist.barrier()
    if grid.rank == 0:
        _clear(folder)
    dist.barrier()
    for name in ("hybridpar waits", "dcp waits"):
        way = ways[name]
        assert way is not None
        way.begin(folder / "dcp")
        way.end()


def save_cases(
    shape: str, measured: dict[str, dict[str, list[float]]], steps: int
) -> Iterator[dict[str, Any]]:
    """Entries of the result file."""
    (size,) = measured.pop("")["bytes"]
    plain = measured[PLAIN]["total"]
    for name, times in measured.items():
        if name == PLAIN:
            continue
        extra = [total - without for total, without in zip(times["total"], plain, strict=True)]
        yield {
            "case": f"save, {name}",
            "settings": {"shape": shape, "pp": 2, "steps": steps},
            "bytes": size,
            "blocked_share": summary(
                [a / b for a, b in zip(times["blocked"], times["write"], strict=True)]
            ),
            "extra_share": summary([a / b for a, b in zip(extra, times["write"], strict=True)]),
            "write_s": times["write"],
            "blocked_s": times["blocked"],
            "extra_s": extra,
            "without_s": plain,
        }


# -- loading


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process in memory: now, or (VmHWM) the most since `forget_peak`."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _timed(load: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    load()
    dist.barrier()
    return time.perf_counter() - start


def load_ours(shape: str, folder: Path) -> dict[str, Any]:
    grid = ProcessGrid(tp=2)
    Engine(JobPlan(config_of("tiny", tp=2)), grid, CPU)  # code that is loaded on first use
    forget_peak()
    before = resident()
    engine = Engine(JobPlan(config_of(shape, tp=2)), grid, CPU)
    flat = [tensor for buffer in engine.state.gradients.buffers for tensor in buffer.tensors]
    for tensor in flat:
        tensor.fill_(0)  # else not resident yet
    seconds = _timed(lambda: checkpoint.resume(folder / "hybridpar", engine, "corpus", print))
    peak = resident("VmHWM") - before - sum(tensor.nbytes for tensor in flat)
    tensors = engine.state.tensors()
    return _loaded(seconds, peak, tensors, tensors[COMPARED])


def load_dcp(shape: str, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    saved = dcp.FileSystemReader(folder / "dcp").read_metadata().state_dict_metadata
    forget_peak()
    before = resident()
    state: dict[str, DTensor] = {}
    for name, entry in saved.items():
        like = torch.empty(entry.size, device="meta")
        parts = like.chunk(2)
        rows = parts[rank].shape[0] if rank < len(parts) else 0
        local = torch.full((rows, *like.shape[1:]), 1.0)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], shape=like.shape, stride=like.stride()
        )
    seconds = _timed(lambda: dcp.load(state, checkpoint_id=folder / "dcp"))
    peak = resident("VmHWM") - before
    tensors = {name: t.to_local() for name, t in state.items()}
    return _loaded(seconds, peak, tensors, tensors[COMPARED])


def _loaded(
    seconds: float, peak: int, tensors: Mapping[str, Tensor], compared: Tensor
) -> dict[str, Any]:
    state = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "seconds": seconds,
        "peak": over_ranks([peak / state], "max")[0],
        "state": over_ranks([state], "max")[0],
        "compared": over_ranks([float(compared.double().square().sum())], "sum")[0],
    }


def load_cases(shape: str, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Entries of the result file."""
    sides: dict[str, Callable[..., dict[str, Any]]] = {"hybridpar": load_ours, "dcp": load_dcp}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            results[name].append(run_ranks(sides[name], 2, shape, folder))
    values = {result["compared"] for side in results.values() for result in side}
    assert len(values) == 1, f"what was loaded differs: {values}"
    for name, side in results.items():
        yield {
            "case": f"load, {name}",
            "settings": {"shape": shape, "tp": 2},
            "state_bytes": side[0]["state"],
            "load_s": [result["seconds"] for result in side],
            "peak": [round(result["peak"], 4) for result in side],
        }


def show(entry: dict[str, Any]) -> None:
    name = f"{entry['case']:<24}"
    middle = statistics.median
    if "load_s" in entry:
        print(
            f"{name} {middle(entry['load_s']):5.2f} s   peak {max(entry['peak']):.3f} of a rank's "
            "own "
            f"{entry['state_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
        return
    parts = (
        f"{part} {middle(entry[f'{part}_s']):5.2f} s ({entry[f'{part}_share']['median']:.1%})"
        for part in ("blocked", "extra")
    )
    print(
        f"{name} {entry['bytes'] / 1e9:.2f} GB in {middle(entry['write_s']):5.2f} s",
        *parts,
        sep="   ",
        flush=True,
    )


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = run_ranks(saving, 2, shape, Path(folder), args.rounds, args.steps)
            yield from save_cases(shape, found, args.steps)
            yield from load_cases(shape, Path(folder), args.load_rounds)


def main() -> None:
    parser = common.arguments(__doc__, rounds=5, shapes=["85M"])
    parser.add_argument("--steps", type=int, default=4, help="training steps beside a save")
    parser.add_argument("--load-rounds", type=int, default=3)
    parser.add_argument(
        "--folder",
        default=None,
        help="where checkpoints are written; the system's temporary folder",
    )
    args = common.parse(parser)
    common.report(
        "checkpoint",
        cases(args),
        args,
        show=show,
        meaning=(
            "blocked_share, extra_share: seconds over those from a save's beginning to its last "
            "sync, median and "
            "quartiles over the rounds; peak: of resident memory while loading, over the rank's "
            "own state"
        ),
    )


if __name__ == "__main__":
    main()
