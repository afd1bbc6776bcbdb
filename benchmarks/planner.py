"""Claims: on two cores, `hybridpar plan` predicts the step time of every grid within 15% and its
memory within 5%, and its first choice is the fastest grid that was measured, or within 5% of it.

    python -m benchmarks.planner                                    ranks of one machine
    python -m benchmarks.planner --moves --name planner_moves       state split over replicas, on hosts, or in a file
    sudo env "PATH=$PATH" python -m benchmarks.planner --link lan=200:1     two hosts and a slow link (scripts/testbed)
    sudo env "PATH=$PATH" python -m benchmarks.planner --link dsl=20/100:5 --grids 1,2,1 --name
    planner_dsl sudo env "PATH=$PATH" python -m benchmarks.planner --link wan=50:5 --grids 1,2,1
    --shapes thin --schedules 2bw \
        --warmup latency --codecs none int8 int4 dct --name planner_codecs
    python -m benchmarks.planner --shapes vit mixer --name planner_own     models of one's own (examples/), larger

The machine is profiled once, as `hybridpar profile` does. Then every grid is trained, in every
round, by Gloo ranks of one thread each; the median over the rounds counts. `ratio`: predicted over
measured. The planner chooses among the grids for the same global batch, and what it chooses is
trained like the others. Memory: the allocator's peak of the fullest stage, in a run of its own.
With --grids, (tp, pp, dp), only these are trained, and none is chosen. Over a link each entry has
what links need and give (planner.links_report).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.common import (
    SHAPES,
    FixedLoader,
    Shape,
    arguments,
    engine_config,
    parse,
    record_costs,
    run_ranks,
)
from benchmarks.hosts import ROOT, name_of, on_two_hosts
from hybridpar.config import Config, Launch, ModelSpec, import_spec
from hybridpar.config.compression_methods import MESSAGES
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import measured_machine
from hybridpar.planner.measuring.measure_machine import measure_here, measure_machine
from hybridpar.planner.measuring.profile import Profile
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.links_report import LinkNeed, link_needs
from hybridpar.planner.searching.search import search
from hybridpar.prediction import MemoryWatch, predict
from hybridpar.train.engine import Engine
from hybridpar.train.launching.launch import keep_freed_memory

sys.path.append(str(ROOT / "examples"))
MOVES = (  # stages, schedule, ZeRO, whether the host updates, share of the state that is in memory
    (1, "1f1b", 1, False, 0.0),
    (1, "1f1b", 2, False, 0.0),
    (1, "1f1b", 3, False, 0.0),
    (1, "gpipe", 3, False, 0.0),
    (2, "2bw", 0, False, 0.0),
    (2, "2bw", 0, True, 0.0),
    (1, "2bw", 1, True, 0.0),
    (2, "1f1b", 0, False, 0.6),
    (1, "gpipe", 0, False, 0.6),
)
GRIDS = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2))
MEANING = (
    "ratio: predicted step time over measured, median of rounds; of a choice: its measured step "
    "time over that "
    "of the fastest"
)
TIME_BOUND = 0.15


@dataclass(frozen=True)
class OwnShape:
    """A model of examples/, and the micro-batch, in place of a `Shape`."""

    spec: str
    settings: tuple[tuple[str, int], ...]
    micro_batch: int

    @property
    def model(self) -> ModelSpec:
        return import_spec(self.spec)(**dict(self.settings))

    @property
    def microbatch_tokens(self) -> int:
        return self.micro_batch


MODELS = SHAPES | {
    "vit": OwnShape("vit:ViT", (("depth", 6), ("width", 192), ("image", 32)), 8),
    "mixer": OwnShape("mixer:Mixer", (("depth", 6), ("width", 256), ("image", 32)), 8),
}


@dataclass
class Case:
    """One configuration: what is predicted, and what was measured in each round."""

    config: Config
    predicted: float
    measured: list[float] = field(default_factory=list)
    needs: list[LinkNeed] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    """Measured and predicted, of the fullest stage."""

    @property
    def name(self) -> str:
        parallel = self.config.parallel
        pipeline = self.config.pipeline
        zero = f" zero {parallel.zero}" if parallel.zero else ""
        memory = " host" * self.config.memory.host_optimizer + " budget" * (
            self.config.memory.budget > 0
        )
        warmup = f" {pipeline.warmup}" if pipeline.warmup != "depth" else ""
        messages = (
            f" {self.config.compression.messages}"
            if self.config.compression.messages != "none"
            else ""
        )
        return (
            f"tp={parallel.tp} pp={parallel.pp} dp={parallel.dp} {pipeline.schedule}{warmup} "
            f"{pipeline.num_microbatches}x{self.config.train.micro_batch_size}{zero}{memory}{messages}"
        )

    @property
    def ranks(self) -> int:
        return self.config.parallel.num_ranks

    @property
    def typical(self) -> float:
        return statistics.median(self.measured)

    def row(self, settings: dict[str, Any]) -> dict[str, Any]:
        measured, predicted = self.memory
        return {
            "case": self.name,
            "ratio": round(self.predicted / self.typical, 4),
            "predicted_ms": round(1e3 * self.predicted, 3),
            "measured_ms": [round(1e3 * t, 3) for t in self.measured],
            "memory_measured": measured,
            "memory_predicted": predicted,
            "memory_ratio": round(predicted / measured, 4),
            "settings": settings,
            "links": [need.as_json() for need in self.needs],
        }


def train_all(
    configs: Sequence[Config], shape: Shape | OwnShape, batches: int, with_memory: bool
) -> list[Any]:
    """Step time of each, or the peaks of its stages, measured and predicted. Collectives: on all
    ranks."""
    keep_freed_memory()
    return [_memory(c, shape) if with_memory else _step_time(c, shape, batches) for c in configs]


def _place(config: Config, shape: Shape | OwnShape) -> tuple[ProcessGrid, FixedLoader]:
    parallel = config.parallel
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    scaled = replace(shape, micro_batch=config.train.micro_batch_size)
    return grid, FixedLoader(scaled, config.pipeline.num_microbatches, grid.dp.rank, grid.dp.size)


def _step_time(config: Config, shape: Shape | OwnShape, batches: int) -> float:
    return record_costs(config, *_place(config, shape), batches).measured.step_time


def _memory(config: Config, shape: Shape | OwnShape) -> tuple[int, int]:
    grid, loader = _place(config, shape)
    device = torch.device("cpu")
    watch = MemoryWatch(JobPlan(config), device)
    engine = Engine(JobPlan(config), grid, device)
    engine.train(watch.loader(loader), 5, lambda result: None)
    compared = watch.compare(grid, engine.moves.peak)
    engine.state.memory.close()
    fullest = max(range(grid.pp.size), key=compared.measured.__getitem__)
    return compared.measured[fullest], compared.predicted[fullest]


def choose(
    base: Config, profile: Profile, ranks: int, batch: int, batches: Sequence[int]
) -> Config:
    """The configuration that the planner takes for so many ranks."""
    free = replace(base, parallel=replace(base.parallel, tp=1, pp=1, dp=0))
    names = (base.pipeline.schedule,)
    request = Request(batch_size=batch, schedules=names, micro_batches=tuple(batches), quick=True)
    return search(free, measured_machine(profile, ranks), request).ranked[0].config


def plan_cases(
    base: Config,
    profile: Profile,
    batch: int,
    ranks: Sequence[int],
    grids: Sequence[str] = (),
    codecs: Sequence[Any] = ("none",),
) -> tuple[list[Case], dict[int, Config]]:
    """Every grid of so many ranks, and what the planner chooses for each number of them.

    codecs: of messages between stages; each grid with each of them.
    """
    b = base.train.micro_batch_size
    configs = [
        replace(
            base,
            parallel=replace(base.parallel, tp=tp, pp=pp, dp=dp),
            pipeline=replace(base.pipeline, num_microbatches=batch // (b * dp)),
        )
        for tp, pp, dp in GRIDS
        if tp * pp * dp in ranks
        and tp <= base.model.max_tp
        and (not grids or f"{tp},{pp},{dp}" in grids)
    ]
    chosen = {n: choose(base, profile, n, batch, (b,)) for n in ranks if n > 1 and not grids}
    for config in chosen.values():
        if not any(_same(config, other) for other in configs):
            configs.append(config)
    configs = [
        replace(config, compression=replace(config.compression, messages=name))
        for config in configs
        for name in (codecs if config.parallel.pp > 1 else codecs[:1])
    ]
    cases = []
    for config in configs:
        n = config.parallel.num_ranks
        cost = StepCost(config, measured_machine(profile, n))
        cases.append(Case(config, cost.step_time, needs=link_needs(cost)))
    return cases, chosen


def moving_cases(base: Config, profile: Profile, batch: int, folder: str) -> list[Case]:
    """Configurations of two ranks whose state moves, each beside the same where it stays."""
    configs = []
    for pp, schedule, zero, host, share in MOVES:
        config = replace(
            base,
            parallel=replace(base.parallel, pp=pp, dp=2 // pp, zero=zero),
            pipeline=replace(
                base.pipeline,
                schedule=schedule,  # type: ignore[arg-type]
                num_microbatches=batch // (base.train.micro_batch_size * (2 // pp)),
            ),
            memory=replace(base.memory, host_optimizer=host),
        )
        if share:
            state = min(
                stage.state for stage in predict(JobPlan(config), device=torch.device("cpu"))
            )
            config = replace(
                config, memory=replace(config.memory, budget=int(share * state), folder=folder)
            )
        configs.append(config)
    return [
        Case(config, StepCost(config, measured_machine(profile, 2)).step_time) for config in configs
    ]


def _same(a: Config, b: Config) -> bool:
    """Whether two configurations train in the same way."""
    plain = [replace(c.pipeline, split=()) for c in (a, b)]
    return (
        a.parallel == b.parallel
        and plain[0] == plain[1]
        and a.train == b.train
        and (a.pipeline.split == b.pipeline.split or not (a.pipeline.split and b.pipeline.split))
    )


def report(
    cases: Sequence[Case], chosen: dict[int, Config], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Prints and returns the entries of the result file."""
    rows = [case.row(settings) for case in cases]
    for case, row in zip(cases, rows, strict=True):
        print(
            f"{case.name:<40} measured {1e3 * case.typical:8.1f} ms, predicted {row['ratio']:.3f} "
            "of that; memory "
            f"{row['memory_ratio']:.3f}",
            *case.needs,
            sep="\n  ",
            flush=True,
        )
    for n, config in chosen.items():
        here = [case for case in cases if case.ranks == n]
        fastest = min(here, key=lambda case: case.typical)
        taken = next(case for case in here if _same(case.config, config))
        over = taken.typical / fastest.typical
        print(
            f"{n} ranks: chosen {taken.name}, {over:.3f} times the fastest, {fastest.name}",
            flush=True,
        )
        rows.append(
            {
                "case": f"choice of {n} ranks",
                "chosen": taken.name,
                "fastest": fastest.name,
                "ratio": round(over, 4),
                "settings": settings,
            }
        )
    return rows


def on_one_machine(args: Any) -> list[dict[str, Any]]:
    rows = []
    for shape_name in args.shapes:
        shape = MODELS[shape_name]
        for schedule in args.schedules:
            base = engine_config(
                shape, schedule=schedule, num_microbatches=args.batch // shape.micro_batch
            )
            path = Path(args.profile) if args.profile else None
            profile = (
                read_profile(path)
                if path and path.exists()
                else measure_machine(base, Launch(0, 0, 1, 1), sizes=(shape.micro_batch,))
            )
            if path:
                write_profile(profile, path)
            cases, chosen = (
                plan_cases(base, profile, args.batch, args.ranks)
                if not args.moves
                else (moving_cases(base, profile, args.batch, args.folder), {})
            )
            for round_ in range(args.rounds + 1):
                for n in args.ranks:
                    here = [case for case in cases if case.ranks == n]
                    found = run_ranks(
                        train_all, n, [c.config for c in here], shape, args.batches, round_ == 0
                    )
                    for case, value in zip(here, found, strict=True):
                        print(f"{case.name:<40} {value} predicted {case.predicted:.4f}", flush=True)
                        if round_ == 0:
                            case.memory = value
                        else:
                            case.measured.append(value)
            rows += report(
                cases,
                chosen,
                {"shape": shape_name, "schedule": schedule, "batch": args.batch, "link": ""},
            )
    return rows


def on_host(args: Any, links: Any) -> None:
    """Everything, on one of the two ranks of the test bed."""
    rows = []
    for shape_name in args.shapes:
        shape = MODELS[shape_name]
        for schedule in args.schedules:
            base = engine_config(
                shape, schedule=schedule, num_microbatches=args.batch // shape.micro_batch
            )
            base = replace(
                base,
                pipeline=replace(
                    base.pipeline, warmup=args.warmup if schedule == "2bw" else "depth"
                ),
            )
            degrees = sorted({int(grid.split(",")[0]) for grid in args.grids}) or (1, 2)
            profile = measure_here(base, degrees, (shape.micro_batch,), False, torch.device("cpu"))
            shared = [profile]
            dist.broadcast_object_list(shared)
            cases, chosen = plan_cases(base, shared[0], args.batch, (2,), args.grids, args.codecs)
            for _ in range(args.rounds):
                for case in cases:
                    case.measured += train_all([case.config], shape, args.batches, False)
            for case in cases:
                (case.memory,) = train_all([case.config], shape, args.batches, True)
            if dist.get_rank() == 0:
                rows += report(
                    cases,
                    chosen,
                    {
                        "shape": shape_name,
                        "schedule": schedule,
                        "batch": args.batch,
                        "link": args.link,
                    },
                )
    if dist.get_rank() == 0:
        write(rows, args)


def write(rows: list[dict[str, Any]], args: Any) -> None:
    times = [r["ratio"] for r in rows if "measured_ms" in r]
    within = sum(abs(ratio - 1) <= TIME_BOUND for ratio in times)
    print(f"{within} of {len(times)} step times within {TIME_BOUND:.0%}")
    print(common.write_results("planner", rows, args, meaning=MEANING, shapes=MODELS))


def main() -> int:
    parser = arguments(__doc__, rounds=2, shapes=["small"], choices=MODELS)
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=[1, 2],
        help="of one machine; over a link they are 2",
    )
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--batches", type=int, default=4, help="recorded batches of a run")
    parser.add_argument(
        "--profile",
        default="",
        help="of one machine: read from here if it is there, else kept here",
    )
    parser.add_argument(
        "--moves", action="store_true", help="two ranks of one machine whose state moves"
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the file of a budget")
    parser.add_argument(
        "--link", default="", metavar="NAME=UP[/DOWN]:DELAY_MS", help="over two hosts and this link"
    )
    parser.add_argument(
        "--grids", nargs="+", default=[], metavar="TP,PP,DP", help="only these, over a link"
    )
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=["none"],
        choices=["none", *MESSAGES],
        help="of messages, over a link",
    )
    parser.add_argument("--warmup", default="depth", help="of 2bw, where nothing is chosen")
    args = parse(parser)
    if args.link:
        return on_two_hosts("planner", on_host, args, (args.link,), [(name_of(args.link), 1, ())])
    write(on_one_machine(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
