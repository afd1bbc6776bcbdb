"""Claim: with two data-parallel ranks, hybridpar's training step is faster than that of PyTorch's DDP.

    python -m benchmarks.data_parallel

The peer is the plain GPT under DistributedDataParallel (`gradient_as_bucket_view`, the default bucket size, `no_sync`
while micro-batches accumulate). One thread a rank, Gloo, AdamW. 'bf16': hybridpar with bf16 weights, fp32 masters and
fp32 gradients, which is what is reduced; the peer with fp32 weights under bf16 autocast, fp32 gradients too.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Shape,
    arguments,
    case,
    engine_config,
    parse,
    print_case,
    race,
    run_ranks,
    write_results,
)
from benchmarks.plain import PlainGPT, adamw, clip, cross_entropy
from hybridpar.grid import ProcessGrid

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


class DDPStep:
    """One optimizer step of the plain GPT under DDP, `num_microbatches` on each rank. bucket_mb: None: DDP's own."""

    def __init__(self, shape: Shape, num_microbatches: int, dtype: str, bucket_mb: int | None = None):
        self.model = DistributedDataParallel(
            PlainGPT(shape, autocast=dtype == "bf16"), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        self.optimizer = adamw(self.model.parameters())
        self.loader = FixedLoader(shape, num_microbatches, dist.get_rank(), dist.get_world_size())
        self.step = 0

    def __call__(self) -> float:
        pairs = self.loader.pairs(self.step)
        self.step += 1
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(pairs):
            with nullcontext() if i == len(pairs) - 1 else self.model.no_sync():
                loss = cross_entropy(self.model(tokens), labels) / len(pairs)
                loss.backward()
            total += loss.detach()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def measure(shape_name: str, dtype: str, m: int, rounds: int) -> dict[str, Any]:
    """Races hybridpar and DDP on one shape. Collectives: called on all ranks."""
    shape, size = SHAPES[shape_name], dist.get_world_size()
    config = engine_config(shape, dp=size, num_microbatches=m, dtype=dtype)
    sides = {OURS: OurStep(config, shape, ProcessGrid(dp=size)), "DDP": DDPStep(shape, m, dtype)}
    result = race(sides, rounds, tolerance=TOLERANCE[dtype])
    return case(f"{shape_name} {dtype} dp={size} m={m}", result, size * m * shape.microbatch_tokens, shape=shape_name,
                dtype=dtype, dp=size, num_microbatches=m, threads=1)


def main() -> None:
    parser = arguments(__doc__, rounds=11, shapes=["ref", "small"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4], help="on each rank")
    args = parse(parser)
    cases = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            for m in args.microbatches:
                cases.append(run_ranks(measure, 2, shape, dtype, m, args.rounds))
                print_case(cases[-1])
    print(write_results("data_parallel", cases, args))


if __name__ == "__main__":
    main()
