"""Claim: a CPU trains a model whose state is far larger than its memory, at the speed of its cores
or of its disk.

    sudo env "PATH=$PATH" python -m benchmarks.budget        half an hour; the memory limit needs root (cgroups)

large   a GPT of 20 GB of state in a process that may take 8 GB, which the kernel enforces.
        `memory.budget` of them are the state's. The same without a budget is killed.
curve   a smaller one at budgets from the least that works to all of its state. Its losses must be
        those without a budget, to the bit.
host    the same under 2bw with the optimizer on the host, which takes turns with the budget alone.
        Both have equal losses, and equal budgets. `ratio` here: its time over the time with the budget
        alone, measured, and simulated from the speeds of computing, disk and update.

`ratio`: time of a step over max(compute, bytes read / bandwidth, bytes written / bandwidth).
Bandwidth is that of the state's file, in items as large as a layer's weights. Compute is the time
of a step without a budget; for `large`, which has no room for that, of models of `--layers` layers,
in a straight line.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.common import FixedLoader, Shape, arguments, engine_config, parse, write_results
from benchmarks.files import write_svg
from hybridpar.config import Config, MemoryConfig, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.simulate.copy_engines import MIB
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.state.residency.store import DiskStore
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.forecasts.ghost_rank import GhostRank
from hybridpar.train.forecasts.host_forecast import host_speeds
from hybridpar.train.forecasts.tier_forecast import TierForecast, forecast
from hybridpar.train.launching.launch import keep_freed_memory

MICROBATCHES = 4
STEPS = 10
WARMUP = 2  # steps: the first one reads nothing of the optimizer's state
BOUND = 1.15
SHAPES = {
    "large": Shape(24, 2048, 16, 512, 8192, 1),
    "curve": Shape(8, 1024, 16, 128, 4096, 1),
    "host": Shape(8, 768, 12, 64, 4096, 1),
}
CGROUPS = (
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ("/sys/fs/cgroup", "memory.max"),
)  # version 1, 2
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
MEANING = (
    "ratio: time of a step over the largest of bounds_s (compute, read / bandwidth, written / "
    "bandwidth); "
    "wall_s, cpu_s: of each step, on the wall and of all threads; read, written: bytes of a step; "
    "bandwidth: "
    "bytes a second, before and after"
)


def config_of(
    shape: Shape, schedule: str, budget: int, folder: str, *, host: bool = False
) -> Config:
    """Layers are computed again in the backward pass, as where memory is short."""
    base = engine_config(shape, schedule=schedule, num_microbatches=MICROBATCHES)
    return replace(
        from_mapping({"pipeline": {"recompute": "all"}}, base),
        memory=MemoryConfig(budget=budget, folder=folder, host_optimizer=host),
    )


# -- processes of their own


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A group of processes that may take that many bytes together. Raises: SystemExit where none
    can be made."""
    for root, name in CGROUPS:
        group = Path(root, f"hybridpar-{os.getpid()}")
        try:
            group.mkdir()
            (group / name).write_text(str(limit))
        except OSError:
            continue
        try:
            yield group
        finally:
            while _in_use(group):  # until the last process has left
                time.sleep(0.1)
        return
    raise SystemExit(
        "the kernel lets nobody limit memory here: run it as root, or with --shapes curve"
    )


def _in_use(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return True
    return False


def start(group: Path | None, threads: int) -> None:
    """Sets up a process, as training does."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(threads)
    keep_freed_memory()


@dataclass(frozen=True)
class Run:
    """Steps of one training behind WARMUP of them. wall, cpu: seconds; losses: of all; read,
    written: bytes, all steps together; peak: the most state in memory, bytes."""

    wall: list[float]
    cpu: list[float]
    losses: list[float]
    read: int
    written: int
    peak: int


def train(shape: Shape, config: Config, steps: int) -> Run:
    """One training, as a run is: nothing drains between the steps, of which the last one counts for
    nothing."""
    engine = Engine(JobPlan(config), ProcessGrid(), torch.device("cpu"))
    memory = engine.state.memory
    traffic = memory.tiers.traffic
    losses: list[float] = []
    seen: list[tuple[float, float, int, int]] = []

    def note(result: StepResult) -> None:
        losses.append(result.loss)
        seen.append((time.perf_counter(), time.process_time(), traffic.read, traffic.written))

    engine.train(FixedLoader(shape, MICROBATCHES), WARMUP + steps + 1, note)
    memory.close()
    times, used, reads, writes = zip(*seen[WARMUP - 1 : -1], strict=True)
    wall, cpu = ([b - a for a, b in pairwise(clock)] for clock in (times, used))
    return Run(wall, cpu, losses, reads[-1] - reads[0], writes[-1] - writes[0], traffic.peak)


def bandwidth(folder: str, num_bytes: int, count: int) -> dict[str, float]:
    """Bytes a second of the state's file: read, written."""
    store = DiskStore(Path(folder), [num_bytes] * count)
    memory = mmap.mmap(-1, num_bytes)
    memory.write(os.urandom(1 << 20) * (num_bytes >> 20))
    found = {}
    for name, move in (("written", store.write), ("read", store.read)):
        began = time.perf_counter()
        for item in range(count):
            move(item, memoryview(memory))
        found[name] = num_bytes * count / (time.perf_counter() - began)
    store.close()
    return found


def apart(group: Path | None, threads: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls it in a fresh process. Raises: BrokenProcessPool where that is killed."""
    with ProcessPoolExecutor(1, get_context("spawn"), start, (group, threads)) as pool:
        return pool.submit(fn, *args).result()


# -- cases


@dataclass(frozen=True)
class Bench:
    """Cases of one set of flags, each with its trainings and disk measured in processes of their
    own."""

    args: argparse.Namespace

    def bandwidth(self, shape: Shape) -> dict[str, float]:
        """Bytes a second of the state's file, in items as large as a layer's weights, of which 2 GB
        or more move."""
        layer = 4 * 12 * shape.hidden**2
        return apart(
            None, self.args.threads, bandwidth, self.args.folder, layer, -(-2 * 10**9 // layer)
        )

    def run(self, shape: Shape, config: Config, group: Path | None = None) -> Run:
        return apart(group, self.args.threads, train, shape, config, self.args.rounds)

    def case(
        self, name: str, shape: Shape, config: Config, compute: float, group: Path | None = None
    ) -> dict[str, Any]:
        """One entry of the result file, with the disk measured before and after."""
        said: TierForecast = apart(None, 1, forecast, JobPlan(config))
        disk = [self.bandwidth(shape)]
        run = self.run(shape, config, group)
        disk.append(self.bandwidth(shape))
        rates = {key: statistics.mean(one[key] for one in disk) for key in disk[0]}
        steps = len(run.wall)
        read = run.read / steps
        written = run.written / steps
        bounds = {
            "compute": compute,
            "read": read / rates["read"],
            "written": written / rates["written"],
        }
        wall = statistics.median(run.wall)
        bound = max(bounds, key=bounds.__getitem__)
        entry = {
            "case": name,
            "ratio": round(wall / bounds[bound], 4),
            "bound_by": bound,
            "budget": config.memory.budget,
            "state": said.state,
            "least": said.least,
            "peak_of_state": run.peak,
            "wall_s": [round(t, 3) for t in run.wall],
            "cpu_s": [round(t, 3) for t in run.cpu],
            "bounds_s": {k: round(t, 3) for k, t in bounds.items()},
            "read": read,
            "written": written,
            "forecast": {"read": said.read, "written": said.written},
            "bandwidth": {k: round(rate) for k, rate in rates.items()},
            "losses": run.losses,
        }
        print(
            f"{name:<28} {wall:7.2f} s a step, {entry['ratio']:.2f} of what {entry['bound_by']} "
            "takes; "
            f"{read / 1e9:.2f} GB read, {written / 1e9:.2f} written, "
            f"{statistics.median(run.cpu):.2f} s of the cores",
            flush=True,
        )
        return entry


def large(bench: Bench) -> Iterator[dict[str, Any]]:
    """The model that has no room, and what becomes of it without a budget."""
    args = bench.args
    shape = SHAPES["large"]
    config = config_of(shape, "gpipe", args.budget, args.folder)
    settings = {"shape": "large", "schedule": "gpipe", "limit": args.limit}
    few = {
        n: statistics.median(
            bench.run(
                replace(shape, num_layers=n),
                config_of(replace(shape, num_layers=n), "gpipe", 0, ""),
            ).wall
        )
        for n in args.layers
    }
    (a, first), (b, second) = few.items()
    compute = first + (second - first) / (b - a) * (shape.num_layers - a)
    print(f"compute: {compute:.2f} s, from {few}", flush=True)
    with memory_group(args.limit) as group:
        entry = bench.case(f"large, {args.budget / 1e9:.1f} GB", shape, config, compute, group)
        peak = max(int((group / name).read_text()) for name in PEAKS if (group / name).exists())
        yield entry | {"settings": settings, "compute_of_layers": few, "peak_of_process": peak}
        try:
            bench.run(shape, config_of(shape, "gpipe", 0, ""), group)
            killed = False
        except BrokenProcessPool:
            killed = True
    print(f"large, without a budget: {'killed' if killed else 'not killed'}", flush=True)
    yield {"case": "large, without a budget", "settings": settings, "killed": killed}


def curve(bench: Bench) -> Iterator[dict[str, Any]]:
    """Step time over budget."""
    args = bench.args
    shape = SHAPES["curve"]
    for schedule in args.schedules:
        plain = bench.run(shape, config_of(shape, schedule, 0, ""))
        compute = statistics.median(plain.wall)
        all_of_it: TierForecast = forecast(
            JobPlan(config_of(shape, schedule, 1 << 50, args.folder))
        )
        for share in args.shares:
            budget = round(all_of_it.least + share * (all_of_it.state - all_of_it.least))
            config = config_of(shape, schedule, budget, args.folder)
            entry = bench.case(
                f"curve {schedule}, {100 * budget / all_of_it.state:.0f} % of state",
                shape,
                config,
                compute,
            )
            assert entry["losses"] == plain.losses, "another training than without a budget"
            yield entry | {
                "settings": {"shape": "curve", "schedule": schedule},
                "share": share,
                "without": [round(t, 3) for t in plain.wall],
                "cpu_without": [round(t, 3) for t in plain.cpu],
            }


def host(bench: Bench) -> Iterator[dict[str, Any]]:
    """The optimizer on the host within a budget, beside the budget alone."""
    args = bench.args
    shape = SHAPES["host"]
    plenty = JobPlan(config_of(shape, "2bw", 1 << 50, args.folder, host=True))
    said: TierForecast = forecast(plenty)
    compute = statistics.median(bench.run(shape, config_of(shape, "2bw", 0, "")).wall)
    rates = bench.bandwidth(shape)
    updated, _ = host_speeds(plenty.config)
    for share in args.shares:
        budget = round(said.least + share * (said.state - said.least))
        sides = [config_of(shape, "2bw", budget, args.folder, host=on) for on in (False, True)]
        alone, hosted = ([] for _ in sides)
        for turn in range(args.turns):
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                (alone, hosted)[number].append(bench.run(shape, sides[number]))
        assert all(run.losses == alone[0].losses for run in (*alone, *hosted))
        walls = [[statistics.median(run.wall) for run in runs] for runs in (alone, hosted)]
        each = [b / a for a, b in zip(*walls, strict=True)]
        steps = len(alone[0].wall)
        predicted = [simulated(config, compute, rates, updated) for config in sides]
        entry = {
            "case": f"host 2bw, {100 * budget / said.state:.0f} % of state",
            "settings": {"shape": "host", "schedule": "2bw"},
            "ratio": round(statistics.median(each), 4),
            "ratios": [round(one, 4) for one in each],
            "simulated": round(predicted[1] / predicted[0], 4),
            "simulated_s": [round(one, 3) for one in predicted],
            "budget": budget,
            "alone_s": [round(one, 3) for one in walls[0]],
            "hosted_s": [round(one, 3) for one in walls[1]],
            "moved": [(runs[0].read + runs[0].written) / steps for runs in (alone, hosted)],
        }
        print(entry["case"], entry["ratio"], entry["simulated"], flush=True)
        yield entry


def simulated(config: Config, compute: float, rates: Mapping[str, float], updated: float) -> float:
    """Return the simulated time of a step: the rank updates alone, or waits for its host.

    compute: time of a step without moves; rates: bytes a second; updated: parameters a second.
    """
    job = JobPlan(config)
    rank = GhostRank.of(job, 0)
    pair = compute / MICROBATCHES
    parameters = sum(slot.numel for slot in rank.state.slots)
    update = parameters / updated
    costs = Costs(
        pair / 4,
        pair * 3 / 4,
        0.0 if rank.hosted else update,
        fetch=MIB / rates["read"],
        release=MIB / rates["written"],
        host=update,
        host_shares=[rank.hosted] if rank.hosted else (),
    )
    plan = {0: tuple(rank.moved(job.options, job.shape, STEPS))}
    starts = simulate(plan, costs, {0: rank.pools(job.shape)}).batch_starts(MICROBATCHES)
    return (starts[-2] - starts[2]) / (len(starts) - 4)


# -- the curve, drawn


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed over budget, and what compute and disk allow."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, schedule in enumerate(
        dict.fromkeys(case["settings"]["schedule"] for case in cases)
    ):
        own = [case for case in cases if case["settings"]["schedule"] == schedule]
        budgets = [100 * case["budget"] / case["state"] for case in own]
        whole = statistics.median(own[0]["without"])
        axes.plot(
            budgets,
            [whole / statistics.median(case["wall_s"]) for case in own],
            "o-",
            color=f"C{number}",
            label=schedule,
        )
        axes.plot(
            budgets,
            [whole / max(case["bounds_s"].values()) for case in own],
            ":",
            color=f"C{number}",
        )
    axes.set(
        xlabel="memory.budget, % of the state",
        ylabel="speed, of that without a budget",
        xlim=(0, 102),
        ylim=(0, 1.1),
    )
    axes.legend(title="dotted: the bound of cores and disk", frameon=False)
    write_svg(figure, path)


def main() -> None:
    parser = arguments(__doc__, rounds=3, shapes=list(SHAPES), choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--limit", type=int, default=8 * 10**9, help="bytes that the large model's process may take"
    )
    parser.add_argument(
        "--budget", type=int, default=int(5.5e9), help="memory.budget of the large model, bytes"
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs=2,
        default=[2, 6],
        help="of the models whose step is extrapolated",
    )
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "2bw"])
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0, 0.1, 0.25, 0.5, 1],
        help="budgets of the curve: of the way from the least to all",
    )
    parser.add_argument("--turns", type=int, default=3, help="of both sides of the host")
    parser.add_argument("--folder", default="", help="where the file of the state is; empty: here")
    args = parse(parser)
    with tempfile.TemporaryDirectory(dir=args.folder or ".") as folder:
        args.folder = folder
        bench = Bench(args)
        cases = [
            case
            for name in args.shapes
            for case in {"large": large, "curve": curve, "host": host}[name](bench)
        ]
    args.folder = ""
    path = write_results("budget", cases, args, meaning=MEANING, shapes=SHAPES)
    if drawn := [case for case in cases if case["settings"]["shape"] == "curve"]:
        draw(drawn, path.with_suffix(".svg"))
    print(path)
    slow = [case["case"] for case in cases if case.get("ratio", 0) > BOUND]
    print(f"over {BOUND}: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
