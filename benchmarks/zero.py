"""Claim: with gradients and weights split over two replicas, hybridpar's step is faster than that of PyTorch's FSDP2.

    python -m benchmarks.zero

The peer is the plain GPT under `fully_shard`, each layer and then the rest, with its defaults: weights are gathered for
each forward and backward, gradients reduce-scattered after each, also where micro-batches accumulate. So is
`parallel.zero = 3` with 1f1b; with gpipe hybridpar takes each block for all micro-batches at once. One thread a rank,
Gloo, AdamW, fp32. Peak memory is the allocator's, of a process that trains two steps of one side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Shape,
    Step,
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
from hybridpar.memory import measure as measure_memory

PEER = "FSDP2"
SCHEDULES = {OURS: "1f1b", f"{OURS}, gpipe": "gpipe"}


class FSDPStep:
    """One optimizer step of the plain GPT under FSDP2, `num_microbatches` on each rank."""

    def __init__(self, shape: Shape, num_microbatches: int):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = PlainGPT(shape)
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(self.model.parameters())
        self.loader = FixedLoader(shape, num_microbatches, dist.get_rank(), dist.get_world_size())
        self.step = 0

    def __call__(self) -> float:
        pairs = self.loader.pairs(self.step)
        self.step += 1
        total = torch.zeros(())
        for tokens, labels in pairs:
            loss = cross_entropy(self.model(tokens), labels) / len(pairs)
            loss.backward()
            total += loss.detach()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def make_side(name: str, shape: Shape, m: int) -> Step:
    if name == PEER:
        return FSDPStep(shape, m)
    size = dist.get_world_size()
    config = engine_config(shape, dp=size, num_microbatches=m, schedule=SCHEDULES[name])
    config = replace(config, parallel=replace(config.parallel, zero=3))
    return OurStep(config, shape, ProcessGrid(dp=size))


def peak(shape_name: str, name: str, m: int) -> int:
    """Bytes that this rank's allocator has handed out at most. Collectives: called on all ranks."""
    with measure_memory(torch.device("cpu")) as meter:
        step = make_side(name, SHAPES[shape_name], m)
        meter.restart_peak()  # the peer's model is whole before it is split
        for _ in range(2):
            step()
    return meter.read().peak


def measure(shape_name: str, m: int, rounds: int) -> dict[str, Any]:
    """Races both on one shape. Collectives: called on all ranks."""
    shape, size = SHAPES[shape_name], dist.get_world_size()
    sides = {name: make_side(name, shape, m) for name in (*SCHEDULES, PEER)}
    result = race(sides, rounds, tolerance=1e-4)
    return case(f"{shape_name} dp={size} m={m}", result, size * m * shape.microbatch_tokens, shape=shape_name,
                dp=size, num_microbatches=m, threads=1)


def main() -> None:
    parser = arguments(__doc__, rounds=7, shapes=["ref", "small"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4], help="on each rank")
    args = parse(parser)
    cases = []
    for shape in args.shapes:
        for m in args.microbatches:
            found = run_ranks(measure, 2, shape, m, args.rounds)
            found["peak_mib"] = {name: run_ranks(peak, 2, shape, name, m) / 2**20 for name in (*SCHEDULES, PEER)}
            print_case(found)
            print(found["peak_mib"])
            cases.append(found)
    print(write_results("zero", cases, args))


if __name__ == "__main__":
    main()
