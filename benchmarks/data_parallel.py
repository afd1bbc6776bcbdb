"""Claim: with two data-parallel ranks, hybridpar's training step is faster than that of PyTorch's
DDP.

    python -m benchmarks.data_parallel

The peer is the plain GPT under DistributedDataParallel (`gradient_as_bucket_view`, the default
bucket size, `no_sync` while micro-batches accumulate). One thread a rank, Gloo, AdamW. 'bf16':
hybridpar with bf16 weights, fp32 masters and fp32 gradients, which is what is reduced; the peer
with fp32 weights under bf16 autocast, fp32 gradients too.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from benchmarks.common import OURS, SHAPES, OurStep, Shape, case, engine_config, race, run_ranks
from benchmarks.plain import PlainGPT, ReplicaStep
from hybridpar.grid import ProcessGrid

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


class DDPStep(ReplicaStep):
    """The plain GPT under DDP. bucket_mb: None: DDP's own."""

    def __init__(self, shape: Shape, m: int, dtype: str, bucket_mb: int | None = None):
        super().__init__(
            DistributedDataParallel(
                PlainGPT(shape, autocast=dtype == "bf16"),
                gradient_as_bucket_view=True,
                bucket_cap_mb=bucket_mb,
            ),
            shape,
            m,
        )


def measure(shape_name: str, dtype: str, m: int, rounds: int) -> dict[str, Any]:
    """Races hybridpar and DDP on one shape. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    config = engine_config(shape, dp=size, num_microbatches=m, dtype=dtype)
    sides = {OURS: OurStep(config, shape, ProcessGrid(dp=size)), "DDP": DDPStep(shape, m, dtype)}
    result = race(sides, rounds, tolerance=TOLERANCE[dtype])
    return case(
        f"{shape_name} {dtype} dp={size} m={m}",
        result,
        size * m * shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        dp=size,
        num_microbatches=m,
        threads=1,
    )


def main() -> None:
    parser = common.arguments(__doc__, rounds=11, shapes=["ref", "small"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4], help="on each rank")
    args = common.parse(parser)
    common.report(
        "data_parallel",
        (
            run_ranks(measure, 2, *key, args.rounds)
            for key in product(args.shapes, args.dtypes, args.microbatches)
        ),
        args,
    )


if __name__ == "__main__":
    main()
