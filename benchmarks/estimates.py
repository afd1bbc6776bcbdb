"""Claim: without a fit `hybridpar plan` predicts steps on machines elsewhere within 15 %, on our
own H200 within 10 %.

    python -m benchmarks.estimates

Nothing is measured here. Our H200: the tokens a second of benchmarks/results/gpu_single*.json.
Megatron-LM's table of GPT models from 1.7 to 145.6 billion parameters on 32 to 1,536 A100 (arXiv
2104.04473, table 1): layers, hidden sizes, degrees, batches and TFLOP/s of a GPU, from memory; its
micro-batches are not stated, so the best of 1, 2, 4 and 8 counts, and all are in the file. Kernels
are those of each framework, hardware that of the tables in planner/machines/hardware.py. Of the H200 the
rates of a large product, of attention at 1.3B and of AdamW were measured; 345M is another shape.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain
from typing import Any

from benchmarks.common import RESULTS, SHAPES, report
from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimate, machine_of
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.machines.kernel_times import MEGATRON_2020, OURS, Kernels

MEASURED = {"345M": "gpu_single.json", "1.3B": "gpu_single_1.3B.json"}
# billion parameters, heads, hidden, layers, tp, pp, GPUs, samples of a batch, TFLOP/s of a GPU
MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
)
MICRO_BATCHES = (1, 2, 4, 8)


def step_time(config: Config, cluster: Cluster, kernels: Kernels) -> float:
    """Seconds, as `plan` predicts them."""
    profile = estimate(config, cluster, (config.train.micro_batch_size,), kernels)
    return StepCost(config, machine_of(cluster, profile)).step_time


def ours(name: str) -> dict[str, Any]:
    """Tokens a second of one H200 that trains a published shape, predicted and measured."""
    case = json.loads((RESULTS / MEASURED[name]).read_text())["cases"][0]
    shape = SHAPES[name]
    link = find_link("nvlink4")
    model = ModelConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_heads=shape.num_heads,
        seq_length=shape.seq_length,
        vocab_size=shape.vocab,
    )
    config = Config(
        model=model,
        parallel=ParallelConfig(dp=1),
        pipeline=PipelineConfig("1f1b", num_microbatches=1),
        train=TrainConfig(dtype="bf16", micro_batch_size=shape.micro_batch, device="cuda"),
    )
    step = step_time(config, Cluster(find_device("h200-141gb"), 1, 1, link, link), OURS)
    measured = case["tokens_per_s"]["hybridpar"]
    return {
        "case": f"H200, {name}",
        "unit": "tokens/s",
        "predicted": round(config.batch_tokens / step),
        "measured": measured,
        "error": round(config.batch_tokens / step / measured - 1, 4),
    }


def megatron(row: tuple[float, ...]) -> dict[str, Any]:
    """TFLOP/s of a GPU that Megatron-LM's table says, and ours: recomputation counts, as it does
    there."""
    size, heads, hidden, layers, tp, pp, gpus, batch, measured = row
    heads, hidden, layers, tp, pp, gpus, batch = map(
        int, (heads, hidden, layers, tp, pp, gpus, batch)
    )
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        seq_length=2048,
        vocab_size=51200,
        dropout=0.1,
        attention_dropout=0.1,
    )
    dp = gpus // (tp * pp)
    cluster = Cluster(
        find_device("a100-80gb"), 8, gpus // 8, find_link("nvlink3"), find_link("infiniband-hdr"), 8
    )
    flops = (
        96
        * batch
        * 2048
        * layers
        * hidden**2
        * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    )
    found = {}
    for b in MICRO_BATCHES:
        if batch % (dp * b) == 0:
            config = Config(
                model=model,
                parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
                pipeline=PipelineConfig(
                    "1f1b", num_microbatches=batch // (dp * b), recompute="all"
                ),
                train=TrainConfig(dtype="fp16", micro_batch_size=b, device="cuda"),
            )
            found[b] = flops / step_time(config, cluster, MEGATRON_2020) / gpus / 1e12
    best = max(found, key=lambda b: found[b])
    return {
        "case": f"Megatron-LM, {size:g}B, {gpus} A100",
        "unit": "TFLOP/s of a GPU",
        "micro_batch": best,
        "predicted": round(found[best], 1),
        "measured": measured,
        "error": round(found[best] / measured - 1, 4),
        "by_micro_batch": {str(b): round(value, 1) for b, value in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions for machines that are not at hand.")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the result file")
    args = parser.parse_args()
    print("| case | | predicted | measured | error |\n|---|---|---|---|---|")
    report(
        "estimates",
        chain(map(ours, MEASURED), map(megatron, MEGATRON)),
        args,
        meaning="predicted and published speeds",
        show=lambda case: print(
            f"| {case['case']} | {case['unit']} | {case['predicted']:,} | {case['measured']:,} | "
            f"{100 * case['error']:+.1f}% |"
        ),
    )


if __name__ == "__main__":
    main()
