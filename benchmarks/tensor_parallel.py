"""Claim: with two tensor-parallel ranks, hybridpar's training step is faster than that of PyTorch's
DTensor.

    python -m benchmarks.tensor_parallel

The peer is the plain GPT under `parallelize_module` (column and row parallel linears, embedding
split by rows, head by columns) with `loss_parallel`: what PyTorch's own tutorial builds. One thread
a rank, Gloo, one micro-batch, AdamW. 'bf16': hybridpar with bf16 weights and fp32 masters, the peer
with fp32 weights under bf16 autocast.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks import common
from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Shape,
    case,
    engine_config,
    race,
    run_ranks,
)
from benchmarks.plain import PlainGPT, adamw, clip, cross_entropy
from hybridpar.grid import ProcessGrid

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


class DTensorStep:
    """One optimizer step of the plain GPT, split by DTensor over `mesh`."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, dtype: str):
        self.model = PlainGPT(shape, autocast=dtype == "bf16")
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for layer in self.model.layers:
            for column, row in (("qkv", "out"), ("up", "down")):
                plan[f"layers.{layer}.{column}"] = ColwiseParallel()
                plan[f"layers.{layer}.{row}"] = RowwiseParallel()
        parallelize_module(self.model, mesh, plan)
        self.optimizer = adamw(self.model.parameters())
        self.loader = FixedLoader(shape, 1)
        self.step = 0

    def __call__(self) -> float:
        ((tokens, labels),) = self.loader.pairs(self.step)
        self.step += 1
        with loss_parallel():
            loss = cross_entropy(self.model(tokens), labels)
            loss.backward()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def measure(shape_name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Races hybridpar and DTensor on one shape. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    config = engine_config(shape, tp=size, dtype=dtype)
    sides = {
        OURS: OurStep(config, shape, ProcessGrid(tp=size)),
        "DTensor": DTensorStep(shape, init_device_mesh("cpu", (size,)), dtype),
    }
    result = race(
        sides, rounds, tolerance=TOLERANCE[dtype], repeat=3 if shape_name == "small" else 1
    )
    return case(
        f"{shape_name} {dtype} tp={size}",
        result,
        shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        tp=size,
        threads=1,
    )


def main() -> None:
    args = common.parse(common.arguments(__doc__, rounds=11, shapes=["ref", "small"]))
    common.report(
        "tensor_parallel",
        (
            run_ranks(measure, 2, shape, dtype, args.rounds)
            for shape, dtype in product(args.shapes, args.dtypes)
        ),
        args,
    )


if __name__ == "__main__":
    main()
