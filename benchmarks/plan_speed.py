"""Function calls and CPU time of `plan` for 1,536 and 1,024 devices, and of `simulate` for 4,096
ranks in 256 stages.

    python -m benchmarks.plan_speed

The bar is a number of calls (BARS), as seconds depend on the core and on what else runs: 20 s of CPU
time are wanted for each `plan`, and 10 for `simulate`. Imports are apart. The model has 12,288
features and 80 layers (145.6 billion parameters), 96 layers for 1,024 devices (175 billion), or 256
layers for 256 stages, on servers of 8 A100 with 8 links of 200 Gbit/s.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.common import RESULTS, report
from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.job import JobPlan
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimated
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.plan_report import describe
from hybridpar.planner.searching.search import search
from hybridpar.train.forecasts.preview import preview


def configuration(num_layers: int, *, tp: int = 1, pp: int = 1, dp: int = 1, m: int = 1) -> Config:
    """A GPT of 12,288 features."""
    return Config(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=12288,
            num_heads=96,
            seq_length=2048,
            vocab_size=51200,
        ),
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        pipeline=PipelineConfig("1f1b", num_microbatches=m),
        train=TrainConfig(dtype="bf16", device="cuda"),
    )


def cluster(servers: int) -> Cluster:
    """Servers of 8 A100."""
    return Cluster(
        find_device("a100-80gb"), 8, servers, find_link("nvlink3"), find_link("infiniband-hdr"), 8
    )


def plan(num_layers: int = 80, servers: int = 192, batch: int = 2304) -> str:
    """Plans for 1,536 devices: the choice in words."""
    config = configuration(num_layers)
    on = cluster(servers)
    result = search(config, estimated(config, on), Request({}, batch))
    return f"{describe(result.ranked[0].config)}; {result.considered} configurations considered"


def plan_175b() -> str:
    """Plans the 175B model for 1,024 devices: the choice in words."""
    return plan(96, 128, 1536)


def simulate(stages: int = 256, dp: int = 2, m: int = 512) -> str:
    """Simulates 4,096 ranks, 8 for each stage of a replica: the step in words."""
    config = configuration(stages, tp=8, pp=stages, dp=dp, m=m)
    on = cluster(stages * dp)
    cost = StepCost(config, estimated(config, on))
    return f"{preview(JobPlan(config), 2, cost.costs).step_time:.6g} s a step"


BARS: dict[Callable[[], str], float] = {plan: 56e6, plan_175b: 63e6, simulate: 45e6}
"""Most function calls, of Python and of C. A tenth above what they take with Python 3.11."""


def calls(what: Callable[[], str]) -> int:
    """Function calls of a call. Its plans stay in caches, so only the first call has all of them."""
    profile = cProfile.Profile()
    profile.runcall(what)
    return sum(entry.callcount for entry in profile.getstats())


def first_calls(what: Callable[[], str]) -> int:
    """Function calls of the first call in a process of its own, without imports."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(plan, 2, 1, 8).result()  # imports what is imported at first use
        return pool.submit(calls, what).result()


def measured(what: Callable[[], str]) -> dict[str, Any]:
    """CPU seconds of a call, what it says, and its function calls."""
    start = time.process_time()
    wall = time.perf_counter()
    said = what()
    return {
        "case": what.__name__,
        "cpu_s": round(time.process_time() - start, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "calls": first_calls(what),
        "most_calls": round(BARS[what]),
        "result": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="CPU time of plan and simulate for large clusters."
    )
    parser.add_argument("--out", default=str(RESULTS), help="folder of the result file")
    parser.add_argument("--add", action="store_true", help="keep the file's other cases")
    parser.add_argument(
        "--only",
        choices=[what.__name__ for what in BARS],
        nargs="+",
        default=[what.__name__ for what in BARS],
    )
    args = parser.parse_args()
    plan(2, 1, 8)  # which imports what is imported at first use
    report(
        "plan_speed",
        (measured(what) for what in BARS if what.__name__ in args.only),
        args,
        show=print,
        meaning="CPU seconds",
    )


if __name__ == "__main__":
    main()
