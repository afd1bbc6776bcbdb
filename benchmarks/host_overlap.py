"""Claims: under 2bw an optimizer on the host costs no time where it fits into the schedule's slack,
gradient clipping on; what does not fit is predicted; 1f1b, which has no slack, waits for all of it.

    python -m benchmarks.host_overlap

Two stages on two processes of one thread each, through the engine. The stages wait besides, as if
for an accelerator, and so do the copies and the host's update, by bytes and by parameters: the link
and the host's speed are emulated. All sides take turns in the same processes. A side must have the
same losses as without a host, to the bit.

A side is named by the host's time, or the link's, of the schedule's slack. Training should wait for
nothing where `sum`, the left of this inequality over its right, is at most 1; for a norm, one
action passes:

    norm, host's update, copies to it and from it, each a group ahead of the next <= (m - p + 1)
    pairs

What is printed: the ratio of the step time without a host to that with it (1: hidden), and how much
longer a step takes, measured and as `check` predicts it: by simulation of the plan, of the time
that a pair takes without a host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import (
    FixedLoader,
    Shape,
    arguments,
    engine_config,
    over_ranks,
    parse,
    report,
    run_ranks,
)
from benchmarks.link_sides import pace
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.hosts import HostEngines
from hybridpar.schedules.simulate.predict import exposed_on_host
from hybridpar.state.host import HostWork
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.engine import Engine, Residency

SHAPES = {"waits": Shape(6, 64, 2, 64, 64, 2)}
STAGES = 2
MICROBATCHES = 8
PACE_S = 0.03
SCHEDULES = ("2bw", "1f1b")
HOSTS = {  # update, and copy each way, of all groups together: shares of the slack
    "0.5": (0.5, 0.12),
    "0.8": (0.8, 0.2),
    "0.6, link": (0.15, 0.6),
    "0.8, link": (0.2, 0.8),
    "1.2": (1.2, 0.3),
    "1.6": (1.6, 0.4),
    "1.6, link": (0.4, 1.6),
}
NONE = "none"


class EmulatedHost(HostWork):
    """A host and a link that take so many seconds for a parameter, and for a byte."""

    def __init__(self, parameter_s: float, byte_s: float):
        self.parameter_s = parameter_s
        self.byte_s = byte_s

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        end = time.perf_counter() + self.byte_s * sum(source.nbytes for _, source in pairs)
        super().copy(pairs)
        _sleep_until(end)

    def step(self, step: Callable[[], None], numel: int) -> None:
        end = time.perf_counter() + self.parameter_s * numel
        super().step(step, numel)
        _sleep_until(end)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class Side:
    """A schedule with a host, or without one. Collectives: created and used on all ranks."""

    def __init__(self, schedule: str, *, hosted: bool):
        shape = SHAPES["waits"]
        m = MICROBATCHES
        config = engine_config(shape, pp=STAGES, num_microbatches=m, schedule=schedule)
        config = replace(
            config,
            memory=replace(config.memory, host_optimizer=hosted, parts=config.model.num_blocks),
        )
        self.work = EmulatedHost(0.0, 0.0)
        self.seconds = (0.0, 0.0)
        self.engine = Engine(
            JobPlan(config),
            ProcessGrid(pp=STAGES),
            torch.device("cpu"),
            residency=Residency(host_work=self.work),
        )
        self.groups = list(map(float, self.engine.state.host.sizes))
        self.most = over_ranks([sum(self.groups)], "max")[0]
        pace(self.engine, PACE_S)
        self.loader = FixedLoader(shape, m)
        self.losses: list[float] = []
        self.rounds: list[float] = []

    def emulate(self, update_s: float, copy_s: float) -> None:
        """The host takes so long for a batch, and a copy each way, on the rank with the most
        parameters."""
        self.seconds = update_s, copy_s
        self.work.parameter_s = update_s / self.most
        self.work.byte_s = copy_s / self.most / 4

    def run(self, batches: int) -> None:
        """Trains, and notes how long a batch took from the update of the first one on."""
        ends: list[float] = []

        def note(result: StepResult) -> None:
            ends.append(time.perf_counter())
            self.losses.append(result.loss)

        dist.barrier()
        self.engine.train(self.loader, batches + (1 if self.engine.schedule.flush else 3), note)
        self.rounds.append((ends[batches] - ends[0]) / batches)

    def sum(self, pair_s: float) -> float:
        """The left of the inequality over its right, on the first rank."""
        share, (update, copy) = sum(self.groups) / self.most, self.seconds
        engines = HostEngines((copy * share, update * share, copy * share), self.groups)
        engines.send(0.0)
        return engines.begin(pair_s / 3) / ((MICROBATCHES - STAGES + 1) * pair_s)

    def predicted(self, pair_s: float) -> float:
        """Seconds that a step is longer than without a host, of the time that a pair takes then.
        Collectives: yes."""
        everyone: list[Any] = [None] * STAGES
        dist.all_gather_object(everyone, self.groups)
        update, copy = (
            [seconds * sum(groups) / self.most for groups in everyone] for seconds in self.seconds
        )
        costs = Costs(
            forward=pair_s / 3,
            backward=pair_s * 2 / 3,
            to_host=copy,
            host=update,
            from_host=copy,
            host_shares=everyone,
        )
        return exposed_on_host(
            ScheduleOptions.of(self.engine.config), self.engine.shape, costs, len(self.groups)
        )[1]


def measure(rounds: int, batches: int) -> list[dict[str, Any]]:
    """All sides, by turns. Collectives: on all ranks."""
    torch.set_num_threads(1)
    sides = {
        (schedule, name): Side(schedule, hosted=name != NONE)
        for schedule in SCHEDULES
        for name in (NONE, *HOSTS)
    }
    for side in sides.values():  # with a host that takes no time
        side.run(1)
        side.rounds.clear()
        side.run(2)
    slack_s = (
        (MICROBATCHES - STAGES + 1) / MICROBATCHES * over_ranks(sides["2bw", NONE].rounds, "max")[0]
    )
    for side in sides.values():
        side.rounds.clear()
    for (_, name), side in sides.items():
        if name != NONE:
            side.emulate(*(share * slack_s for share in HOSTS[name]))
    for number in range(rounds):
        for side in list(sides.values())[:: 1 if number % 2 == 0 else -1]:
            side.run(batches)
    cases = []
    for (schedule, name), side in sides.items():
        without = sides[schedule, NONE]
        assert side.losses == without.losses, f"{schedule} with a host of {name} has other losses"
        if name == NONE:
            continue
        pair_s = statistics.median(over_ranks(sides["2bw", NONE].rounds, "max")) / MICROBATCHES
        with_host, alone = over_ranks(side.rounds, "max"), over_ranks(without.rounds, "max")
        exposed = statistics.median(a - b for a, b in zip(with_host, alone, strict=True))
        cases.append(
            {
                "case": f"{schedule}, {name} of the slack",
                "settings": {
                    "shape": "waits",
                    "schedule": schedule,
                    "stages": STAGES,
                    "num_microbatches": MICROBATCHES,
                    "pace_s": PACE_S,
                    "update_s": round(side.seconds[0], 4),
                    "copy_s": round(side.seconds[1], 4),
                },
                "ratio": round(
                    statistics.median(b / a for a, b in zip(with_host, alone, strict=True)), 4
                ),
                "step_ms": round(1e3 * statistics.median(with_host), 2),
                "alone_ms": round(1e3 * statistics.median(alone), 2),
                "exposed_ms": round(1e3 * exposed, 2),
                "predicted_ms": round(1e3 * side.predicted(pair_s), 2),
                "sum": round(side.sum(pair_s), 3),
            }
        )
    return cases


def show(one: dict[str, Any]) -> None:
    print(
        f"{one['case']:<28} sum {one['sum']:5.2f} {one['ratio']:6.3f} of the speed without a host; "
        "a step of "
        f"{one['step_ms']:6.1f} ms is longer by {one['exposed_ms']:6.1f} ms, "
        f"{one['predicted_ms']:6.1f} predicted"
    )


def main() -> None:
    parser = arguments(__doc__, rounds=5, shapes=("waits",), choices=SHAPES)
    parser.add_argument(
        "--batches", type=int, default=6, help="timed batches of a side in each round"
    )
    args = parse(parser)
    cases = run_ranks(measure, STAGES, args.rounds, args.batches)
    report(
        "host_overlap",
        cases,
        args,
        show=show,
        shapes=SHAPES,
        meaning=(
            "ratio: step time without a host over that with it, median over the rounds; "
            "exposed_ms, predicted_ms: by how "
            "much a step is longer, measured and by simulation"
        ),
    )


if __name__ == "__main__":
    main()
