"""Gains over the manual plan for 512 devices, ours beside NEST's, with the same models, devices and
limits.

    python -m benchmarks.nest

NEST (arXiv 2603.06798, github.com/scai-tech/Nest, MIT, commit 3e163ad) publishes throughputs over
that of a manual plan (reference_results.md), with 4,096 sequences a batch in micro-batches of one,
all layers recomputed, 64 GB a device, and a network of three levels: 8 devices at 900 GB/s, 4
servers at 100, the rest at 400 (0.1, 0.2 and 0.3 ms). Its accelerator is 8 arrays of 128 x 128 at
1.05 GHz. Here a device has a link of its own to each level, as what they share is not said. Tensor
parallelism is left to GPT-3, as there. Mixtral is not planned: plans of ours have all experts on every rank.

Published gains are of throughputs of their estimates, ours of our simulator's, each over the manual
plan in the same. alike: our best 1f1b of what NEST may choose. whole: our best of all schedules,
recomputed where it must be. A manual plan that does not divide the batch (llama3: 6 replicas) takes
the micro-batches of the fullest replica.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import RESULTS, report
from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.planner.costs.candidate_memory import MemoryCheck
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimated
from hybridpar.planner.machines.hardware import GIB, Cluster, Device, Level, Link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.searching.candidates import Candidate, Request, balanced, candidates
from hybridpar.planner.searching.plan_report import describe
from hybridpar.planner.searching.search import search

DEVICES = 512
BATCH = 4096
PER_SERVER = 8
SERVERS = 4
DEVICE = Device("tpu-v4-like", 8 * 128 * 128 * 2 * 1.05e9, 64e9, 1.2e12, 0.8, units=8)
LLAMA = {
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
    "seq_length": 4096,
}


@dataclass(frozen=True)
class Case:
    """A model; its manual plan; published throughputs at 512 devices, over one of fewer devices
    that all share."""

    model: ModelConfig
    tp: int
    pp: int
    dp: int
    published: dict[str, float]


CASES = {
    "llama2-7B": Case(
        ModelConfig(
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            ffn_hidden_size=11008,
            vocab_size=32000,
            **LLAMA,
        ),
        1,
        8,
        64,
        {"manual": 7.31, "mcmc": 8.65, "alpa-e": 3.72, "phaze": 8.01, "nest": 9.14},
    ),
    "llama3-70B": Case(
        ModelConfig(
            num_layers=80,
            hidden_size=8192,
            num_heads=64,
            num_kv_heads=8,
            ffn_hidden_size=28672,
            vocab_size=128256,
            **LLAMA,
        ),
        1,
        80,
        6,
        {"manual": 5.48, "mcmc": 5.48, "alpa-e": 8.38, "phaze": 10.93, "nest": 10.94},
    ),
    "GPT-3": Case(
        ModelConfig(
            num_layers=96, hidden_size=12288, num_heads=96, seq_length=2048, vocab_size=51200
        ),
        4,
        32,
        4,
        {"manual": 3.91, "mcmc": 4.58, "alpa-e": 1.86, "phaze": 4.47, "nest": 5.22},
    ),
}


def configured(case: Case, tp: int, pp: int, dp: int) -> Config:
    """Micro-batches of one, all layers recomputed; dp 0: to be chosen."""
    return Config(
        model=case.model,
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        pipeline=PipelineConfig("1f1b", num_microbatches=-(-BATCH // max(dp, 1)), recompute="all"),
        train=TrainConfig(dtype="bf16", micro_batch_size=1, device="cuda"),
    )


def machine_for(config: Config, number: int) -> Machine:
    links = [
        Link(f"level {i}", rate * GIB, 1e-4 * (i + 1), 1.0)
        for i, rate in enumerate((900, 100, 400))
    ]
    per_group = PER_SERVER * SERVERS
    cluster = Cluster(
        DEVICE,
        PER_SERVER,
        -(-number // PER_SERVER),
        links[0],
        links[1],
        PER_SERVER,
        (Level(per_group, links[2], per_group),),
    )
    return estimated(config, cluster, number)


def manual(case: Case) -> float:
    """Seconds of a step by the manual plan, which may use fewer devices."""
    config = configured(case, case.tp, case.pp, case.dp)
    return balanced(config, machine_for(config, case.tp * case.pp * case.dp)).cost.step_time


def alike(case: Case, config: Config, machine: Machine) -> Candidate:
    """The fastest 1f1b that NEST might choose, too: all layers recomputed, ZeRO-1 where it
    helps."""
    request = Request(_kept(case), BATCH, ("1f1b",), (1,), split_backward=False)
    memory = MemoryCheck(machine.memory_limit)
    found = []
    for one in candidates(config, machine, request):
        for zero in (0, 1):
            made = replace(
                one.config,
                parallel=replace(one.config.parallel, zero=zero, sequence=False),
                pipeline=replace(one.config.pipeline, recompute="all"),
            )
            cost = StepCost(made, machine)
            if memory.fits(cost):
                found.append(Candidate(made, cost))
    return min(found, key=lambda one: one.cost.step_time)


def whole(case: Case, config: Config, machine: Machine) -> Candidate:
    """The best of all schedules."""
    return search(config, machine, Request(_kept(case), BATCH, (), (1,), top=1, quick=True)).ranked[
        0
    ]


def _kept(case: Case) -> dict[str, int]:
    return {"tp": 1} if case.tp == 1 else {}


def planned(name: str) -> dict[str, Any]:
    """A model's gains, published and ours."""
    case = CASES[name]
    config = configured(case, 1, 1, 0)
    base = manual(case)
    machine = machine_for(config, DEVICES)
    plans = {"alike": alike(case, config, machine), "whole": whole(case, config, machine)}
    return {
        "case": f"{name}, {DEVICES} devices",
        "published": {
            way: round(value / case.published["manual"], 2) for way, value in case.published.items()
        },
        "ours": {way: round(base / plan.cost.step_time, 2) for way, plan in plans.items()},
        "plans": {way: describe(plan.config) for way, plan in plans.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans for NEST's models and network.")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the result file")
    parser.add_argument("--models", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--add", action="store_true", help="keep the file's other cases")
    args = parser.parse_args()
    report(
        "nest",
        map(planned, args.models),
        args,
        show=print,
        meaning="throughput over the manual plan's: published, and by our simulator",
    )


if __name__ == "__main__":
    main()
