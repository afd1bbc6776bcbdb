"""Claim: with gradients and weights split over two replicas, hybridpar's step is faster than those
of PyTorch's FSDP2 and of DeepSpeed's ZeRO, and takes no more memory.

    python -m benchmarks.zero        DeepSpeed takes part where it is installed: pip install
                                     --no-deps deepspeed hjson msgpack ninja psutil py-cpuinfo

zero=3    weights are gathered for each forward and backward, gradients reduce-scattered after each,
          also where micro-batches accumulate: FSDP2 with its defaults, each layer and then the
          rest; the same with CPUOffloadPolicy; DeepSpeed's stage 3. hybridpar with 1f1b; with gpipe
          it takes each block for all micro-batches at once.
zero=2    weights are whole, gradients reduce-scattered after each backward: DeepSpeed's stage 2,
          and FSDP2 that keeps what it has gathered from forward to backward.

One thread a rank, Gloo, AdamW, fp32, the plain GPT for the peers. Peak memory is the allocator's,
of a process that trains two steps of one side.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks import common
from benchmarks.common import (
    CLIP,
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
from benchmarks.plain import PlainGPT, ReplicaStep, adamw, cross_entropy
from hybridpar.grid import ProcessGrid
from hybridpar.prediction import measure as measure_memory

DEEPSPEED = "DeepSpeed"


class OurZeRO(OurStep):
    """hybridpar's step with parallel.zero = `zero`."""

    def __init__(self, shape: Shape, m: int, *, zero: int, schedule: str = "1f1b"):
        size = dist.get_world_size()
        config = engine_config(shape, dp=size, num_microbatches=m, schedule=schedule)
        super().__init__(
            replace(config, parallel=replace(config.parallel, zero=zero)),
            shape,
            ProcessGrid(dp=size),
        )


class FSDPStep(ReplicaStep):
    """The plain GPT under FSDP2."""

    def __init__(self, shape: Shape, m: int, **options: Any):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = PlainGPT(shape)
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh, **options)
        super().__init__(model, shape, m)


class _Loss(nn.Module):
    """The plain GPT with its loss, as DeepSpeed takes it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.model = PlainGPT(shape)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(tokens), labels)


class DeepSpeedStep:
    """One optimizer step of the plain GPT under DeepSpeed's ZeRO, `m` micro-batches on each rank.

    Its buckets, by default 2 GB, are of a layer, as FSDP2's and hybridpar's. Weights stay gathered
    where they are used again within a billion parameters, its default, which is all of them;
    `frugal`: two layers at most do.
    """

    def __init__(self, shape: Shape, m: int, *, stage: int, frugal: bool = False):
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
        import deepspeed  # not installed everywhere, and slow

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        module = _Loss(shape)
        warnings.filterwarnings("ignore", category=FutureWarning)  # it calls torch by old names
        layer = 12 * shape.hidden**2
        zero = {"stage": stage, "reduce_bucket_size": layer, "allgather_bucket_size": layer}
        if stage == 3:
            zero["stage3_prefetch_bucket_size"] = layer
        if frugal:
            zero |= {"stage3_max_live_parameters": 2 * layer, "stage3_max_reuse_distance": 0}
        settings = {
            "train_micro_batch_size_per_gpu": shape.micro_batch,
            "gradient_accumulation_steps": m,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=adamw(module.parameters()),
            config=settings,
            dist_init_required=False,
        )
        self.loader = FixedLoader(shape, m, dist.get_rank(), dist.get_world_size())
        self.step = 0

    def __call__(self) -> float:
        pairs = self.loader.pairs(self.step)
        self.step += 1
        total = torch.zeros(())
        for tokens, labels in pairs:
            loss = self.engine(tokens, labels)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(pairs)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


SIDES: Mapping[int, Mapping[str, Any]] = {
    3: {
        OURS: partial(OurZeRO, zero=3),
        f"{OURS}, gpipe": partial(OurZeRO, zero=3, schedule="gpipe"),
        "FSDP2": FSDPStep,
        "FSDP2, CPUOffloadPolicy": partial(
            FSDPStep, offload_policy=CPUOffloadPolicy(pin_memory=False)
        ),
        f"{DEEPSPEED}, stage 3": partial(DeepSpeedStep, stage=3),
        f"{DEEPSPEED}, stage 3, frugal": partial(DeepSpeedStep, stage=3, frugal=True),
    },
    2: {
        OURS: partial(OurZeRO, zero=2),
        "FSDP2, weights kept": partial(FSDPStep, reshard_after_forward=False),
        f"{DEEPSPEED}, stage 2": partial(DeepSpeedStep, stage=2),
    },
}
"""Makers of a step of (shape, number of micro-batches), by parallel.zero and name."""


def sides(zero: int) -> dict[str, Any]:
    """Return the peers whose programs are installed."""
    there = find_spec("deepspeed") is not None
    return {
        name: make for name, make in SIDES[zero].items() if there or not name.startswith(DEEPSPEED)
    }


def peak(shape_name: str, zero: int, name: str, m: int) -> int:
    """Bytes that this rank's allocator has handed out at most. Collectives: called on all ranks."""
    with measure_memory(torch.device("cpu")) as meter:
        step = SIDES[zero][name](SHAPES[shape_name], m)
        meter.restart_peak()  # a peer's model is whole before it is split
        for _ in range(2):
            step()
    return meter.read().peak


def measure(shape_name: str, zero: int, m: int, rounds: int) -> dict[str, Any]:
    """Races all on one shape. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    steps: dict[str, common.Step] = {name: make(shape, m) for name, make in sides(zero).items()}
    result = race(steps, rounds, tolerance=1e-4)
    return case(
        f"{shape_name} zero={zero} dp={size} m={m}",
        result,
        size * m * shape.microbatch_tokens,
        shape=shape_name,
        zero=zero,
        dp=size,
        num_microbatches=m,
        threads=1,
    )


def show(entry: dict[str, Any]) -> None:
    common.print_case(entry)
    print(entry["case"], entry["peak_mib"], flush=True)


def main() -> None:
    parser = common.arguments(__doc__, rounds=7, shapes=["ref", "small"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4], help="on each rank")
    parser.add_argument("--zero", nargs="+", type=int, choices=list(SIDES), default=list(SIDES))
    args = common.parse(parser)
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed, and does not take part")
    common.report(
        "zero",
        (
            run_ranks(measure, 2, shape, zero, m, args.rounds)
            | {
                "peak_mib": {
                    name: round(run_ranks(peak, 2, shape, zero, name, m) / 2**20, 1)
                    for name in sides(zero)
                }
            }
            for shape, m, zero in product(args.shapes, args.microbatches, args.zero)
        ),
        args,
        show=show,
    )


if __name__ == "__main__":
    main()
