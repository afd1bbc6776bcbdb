"""Claim: the step time that hybridpar simulates from a run's measured costs is within 10% of the
measured one.

For every schedule, 2 to 4 stages and 4 to 16 micro-batches a batch; also where 3 or 4 ranks share 2
cores.

    python -m benchmarks.simulator

Every case is a run of its own: Gloo ranks of one thread each, a few batches to warm up, then
`--batches` recorded ones. `simulated` over `measured` step time is its ratio. Each case runs once
in every round; the median over the rounds counts. `cores`: as many as ranks had at once while all
were wanted, which the simulation takes into account.

Across: the costs that one schedule has measured predict the others, for the same stages and
micro-batches; and those of 8 micro-batches the same schedule's step with 4 and 16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from benchmarks import common
from benchmarks.common import SHAPES, FixedLoader, engine_config, record_costs, run_ranks, summary
from hybridpar.config import PipelineConfig
from hybridpar.grid import ProcessGrid
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.reporting.costs_file import RunCosts

BOUND = 0.10
REFERENCE = 8  # micro-batches whose costs predict other numbers of them


@dataclass
class Case:
    """One schedule on one number of stages and micro-batches, measured once in every round."""

    schedule: str
    stages: int
    microbatches: int
    runs: list[RunCosts] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.schedule} pp={self.stages} m={self.microbatches}"

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return PipelineConfig(schedule=self.schedule).num_virtual_stages

    def simulated(self, source: RunCosts) -> float:
        """This case's step time with the costs of another run."""
        sizes = PipelineShape(self.stages, self.microbatches, self.chunks)
        timeline = predict_timeline(ScheduleOptions(self.schedule), sizes, source.measured.costs)
        return timeline.step_time(self.microbatches)

    def ratios(self, source: Case) -> list[float]:
        """Simulated from the costs of `source`, over measured: in each round."""
        return [
            self.simulated(theirs) / own.measured.step_time
            for own, theirs in zip(self.runs, source.runs, strict=True)
        ]


def measure(shape_name: str, cases: Sequence[tuple[str, int]], batches: int) -> list[RunCosts]:
    """Trains each case (schedule, micro-batches) and returns what it measured. Collectives: called
    on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    grid = ProcessGrid(pp=size)
    return [
        record_costs(
            engine_config(shape, pp=size, num_microbatches=m, schedule=schedule),
            grid,
            FixedLoader(shape, m),
            batches,
        )
        for schedule, m in cases
    ]


def row(name: str, ratios: Sequence[float], **more: Any) -> dict[str, Any]:
    """One entry of the result file."""
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return {"case": name, "ratio": summary(ratios), "worst_round": round(worst, 4), **more}


def own_rows(cases: Sequence[Case], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every case from its own costs."""
    for case in cases:
        measured = [1e3 * run.measured.step_time for run in case.runs]
        yield row(
            case.name,
            case.ratios(case),
            measured_ms=[round(ms, 3) for ms in measured],
            simulated_ms=[round(1e3 * case.simulated(run), 3) for run in case.runs],
            cores=[round(run.measured.costs.cores or 0.0, 2) for run in case.runs],
            settings=settings
            | {"schedule": case.schedule, "pp": case.stages, "num_microbatches": case.microbatches},
        )


def across_rows(cases: Sequence[Case], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every case from the costs of others."""
    for case in cases:
        for source in cases:
            same_sizes = (source.stages, source.microbatches) == (case.stages, case.microbatches)
            same_schedule = (source.stages, source.schedule) == (case.stages, case.schedule)
            if source.chunks != case.chunks:
                continue  # whose costs are of other stages
            if (same_sizes != same_schedule) and (same_sizes or source.microbatches == REFERENCE):
                yield row(
                    f"{case.name} from {source.schedule} m={source.microbatches}",
                    case.ratios(source),
                    settings=settings,
                )


def report(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """How many are within the bound, and those that are not."""
    errors = [abs(r["ratio"]["median"] - 1) for r in rows]
    if not errors:
        return
    within = sum(error <= BOUND for error in errors)
    print(
        f"{title}: {within} of {len(rows)} within {BOUND:.0%}, median error "
        f"{statistics.median(errors):.1%}, largest "
        f"{max(errors):.1%}",
        flush=True,
    )
    for r, error in zip(rows, errors, strict=True):
        if error > BOUND:
            print(f"  {r['case']:<40} {r['ratio']['median']:.3f}")


def main() -> None:
    parser = common.arguments(__doc__, rounds=3, shapes=["mini"])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--batches", type=int, default=10, help="recorded batches of a run")
    args = common.parse(parser)
    own = []
    across = []
    for shape in args.shapes:
        cases = [
            Case(schedule, p, m)
            for p in args.stages
            for m in args.microbatches
            for schedule in args.schedules
            if m >= p - 1 or not SCHEDULES[schedule].needs_full_pipeline
        ]
        for _ in range(args.rounds):
            for p in args.stages:
                here = [case for case in cases if case.stages == p]
                todo = [(case.schedule, case.microbatches) for case in here]
                for case, run in zip(
                    here, run_ranks(measure, p, shape, todo, args.batches), strict=True
                ):
                    case.runs.append(run)
                    measured = run.measured.step_time
                    cores = run.measured.costs.cores
                    print(
                        f"{case.name:<24} measured {1e3 * measured:8.1f} ms, simulated "
                        f"{case.simulated(run) / measured:6.3f} of that, {cores:.2f} cores",
                        flush=True,
                    )
        settings = {"shape": shape, "dtype": "fp32", "threads": 1, "batches": args.batches}
        own += own_rows(cases, settings)
        across += across_rows(cases, settings)
    report("from their own costs", own)
    report("from those of others", across)
    print(common.write_results("simulator", [*own, *across], args))


if __name__ == "__main__":
    main()
