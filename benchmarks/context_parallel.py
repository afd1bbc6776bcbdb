"""Claim: two ranks that share a sample of 2,048 tokens take at most 1.12 of half the time that one
process takes for it, a thread each.

    python -m benchmarks.context_parallel

Sides: ours gathers keys and values (parallel.cp_comm = "all_gather"), `ring` and `ulysses` are its
other ways; `apart` is one process with the whole sample on each core, whose weights stay apart, so
that both sides have the same two busy cores. The claim is `apart` over ours of at least 2 / 1.12 =
1.79, in fp32; in bf16 the sum of fp32 gradients takes as long, and the rest half the time. A step
is an optimizer step on one micro-batch of one sample.

torch's context parallelism (torch.distributed.tensor.experimental.context_parallel, 2.13) knows no
attention of CPUs: "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have
a sharding strategy registered". So it is not among the sides.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch.distributed as dist

from benchmarks import common
from benchmarks.common import OURS, OurStep, Shape, case, engine_config, race, run_ranks
from hybridpar.grid import ProcessGrid

LONG = {
    "2048": Shape(4, 256, 4, 2048, 4096, 1),
    "4096": Shape(4, 256, 4, 4096, 4096, 1),
    "2048_wide": Shape(2, 512, 8, 2048, 4096, 1),
    "tiny": Shape(2, 64, 4, 64, 256, 1),
}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


def measure(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Race the ways of context parallelism and one process on one shape.

    Collectives: called on all ranks.
    """
    shape = LONG[name]
    cp = dist.get_world_size()
    config = engine_config(shape, dtype=dtype)

    def shared(comm: str) -> OurStep:
        parallel = replace(config.parallel, cp=cp, cp_comm=comm)  # type: ignore[arg-type]
        return OurStep(replace(config, parallel=parallel), shape, ProcessGrid(cp=cp))

    sides = {
        OURS: shared("all_gather"),
        "ring": shared("ring"),
        "ulysses": shared("ulysses"),
        "apart": OurStep(config, shape, ProcessGrid()),
    }
    result = race(sides, rounds, tolerance=TOLERANCE[dtype])
    return case(
        f"{name} {dtype} cp={cp}",
        result,
        shape.microbatch_tokens,
        shape=name,
        dtype=dtype,
        cp=cp,
        threads=1,
    )


def main() -> None:
    parser = common.arguments(__doc__, rounds=11, shapes=["2048"], choices=LONG)
    args = common.parse(parser)
    cases = (run_ranks(measure, 2, *key, args.rounds) for key in product(args.shapes, args.dtypes))
    common.report("context_parallel", cases, args, shapes=LONG)


if __name__ == "__main__":
    main()
