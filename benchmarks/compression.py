"""Claim: with PowerSGD between two replicas, hybridpar's step is no slower than that of DDP with
torch's powerSGD_hook.

    python -m benchmarks.compression             the race, and how much of a stream of gradients
                                                 arrives
    python -m benchmarks.compression --no-race   the latter alone, which needs no quiet machine
    python -m benchmarks.compression --losses    loss at equal tokens of every method, of --seeds,
                                                 instead

The race: sides as in data_parallel, fp32, both compressors of rank 4 with error feedback and a warm
start. Bytes: what a rank sends in a step. Arrived: 1 - |sum of what was applied - sum of
gradients|^2 / |sum of gradients|^2 after ten batches, without those that the hook sends whole, of
two replicas' matrices: a falling spectrum, slowly turning; sbpca takes them in four equal parts,
and has no error feedback. Memory: the predicted peak of a rank of two, MiB by ZeRO stage. The
losses: a GPT of two layers on some of the Python standard library's
text, two replicas, one stage.
"""

from __future__ import annotations

import _pydecimal
import argparse
import doctest
import inspect
import tarfile
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from benchmarks.common import OURS, SHAPES, OurStep, Shape, case, engine_config, race, run_ranks
from benchmarks.data_parallel import DDPStep
from benchmarks.messages import over_seeds
from hybridpar.config import CompressionConfig, Config, from_mapping
from hybridpar.data import BatchLoader, open_data
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.nn.matmul import Product
from hybridpar.nn.placement import Init, Placement
from hybridpar.prediction import predict
from hybridpar.state import GradientReducer, Partition, Route, StatePolicy
from hybridpar.state.compression import BatchGradients, Compression
from hybridpar.state.gradients import BlockParts
from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import Memory
from hybridpar.train.engine import Engine

RANK = 4
BLOCKS = 4
SAME = 1e-4
ALIKE = 0.1
"""Largest relative differences of the first loss, and of those after updates by a part of the
gradient."""
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "dct": {"gradients_kept": 0.01},
    "powersgd": {"gradients_rank": RANK},
    "sbpca": {"gradients_rank": RANK, "gradients_blocks": BLOCKS},
    "powersgd int8": {"gradients": "powersgd", "gradients_rank": 15, "gradients_values": "int8"},
    "powersgd int4": {"gradients": "powersgd", "gradients_rank": 30, "gradients_values": "int4"},
}
"""Settings by name; the last two take as many bytes as rank 4 in fp32 does."""
SITES: dict[str, dict[str, Any]] = {
    f"sites, {every}{', mean' if mean else ''}": {"every": every, "precision": "int4"} | mean
    for mean in ({}, {"lr": 1.0, "momentum": 0.0})
    for every in (8, 16)
}
"""Trainings that sum no gradients: settings of the outer step. mean: what sites go on with is their
mean."""
ONE_BY_ONE = "sbpca, a block each"
"""sbpca with as many blocks as micro-batches."""
WHOLE = 2
BATCHES = 12
MEANING = (
    f"{common.RATIO}. arrived: share of the sum of the gradients, by energy; bytes: of whole ones; "
    "memory: predicted peak of a rank in MiB, with ZeRO-0 to 3"
)
TEXTS = (mock, _pydecimal, argparse, doctest, inspect, tarfile, typing)
"""Modules whose source text a small model learns; the first is held out."""
LOSSES = Shape(2, 128, 4, 64, 1024, 2)
SIZES = {"up": (384, 256), "down": (256, 384)}


def settings_of(method: str) -> CompressionConfig:
    return CompressionConfig(**{"gradients": method} | METHODS[method])


def policy_of(method: str, dp: int) -> StatePolicy:
    """Return the state policy of a replica that compresses its gradients so."""
    sections = {"parallel": {"dp": dp}, "pipeline": {"num_microbatches": BLOCKS}}
    config = replace(from_mapping(sections), compression=settings_of(method))
    return JobPlan(config).state_policy(num_versions=1, num_gradient_buffers=1)


ONE_BUCKET = 1 << 12
"""MB. The hook sends second factors as first ones arrive, over Gloo not in one order on all ranks:
with several buckets one takes the other's."""


def hook_of(model: DistributedDataParallel) -> powerSGD_hook.PowerSGDState:
    """Has DDP's replicas send factors: all but of the first steps, which must be whole."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=WHOLE, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return state


def measure(shape_name: str, m: int, rounds: int) -> dict[str, Any]:
    """Races the steps. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    config = engine_config(shape, dp=size, num_microbatches=m)
    ours = {}
    grids = {}
    for name, method in (
        (OURS, "powersgd"),
        ("hybridpar, whole", "none"),
        ("hybridpar, sbpca", "sbpca"),
        ("hybridpar, dct", "dct"),
        ("hybridpar, int8", "int8"),
    ):
        grids[name] = ProcessGrid(dp=size)
        ours[name] = OurStep(replace(config, compression=settings_of(method)), shape, grids[name])
    whole = DDPStep(shape, m, "fp32")
    theirs = DDPStep(shape, m, "fp32", ONE_BUCKET)
    hook = hook_of(theirs.model)
    result = race(
        {**ours, "DDP, powerSGD_hook": theirs, "DDP": whole},
        rounds,
        warmup=WHOLE + 1,
        tolerance=ALIKE,
    )
    common.check_losses({name: of[:1] for name, of in result.losses.items()}, SAME)
    found = case(
        f"{shape_name} dp={size} m={m}",
        result,
        size * m * shape.microbatch_tokens,
        shape=shape_name,
        dp=size,
        num_microbatches=m,
        threads=1,
        rank=RANK,
    )
    steps = rounds + WHOLE + 1
    found["bytes_a_step"] = {name: _sent(step.engine) // steps for name, step in ours.items()}
    _, before, after = hook.compression_stats()
    theirs_sent = {
        "DDP, powerSGD_hook": after,
        "DDP": before,
    }  # in elements, of the steps with factors
    found["bytes_a_step"] |= {
        name: round(4 * count / (steps - WHOLE)) for name, count in theirs_sent.items()
    }
    return found


def _sent(engine: Engine) -> int:
    """Bytes that a rank put on the wire; of all-reduces, its gradient once."""
    traffic = engine.grid.dp.traffic.num_bytes
    compression = engine.state.compression
    return traffic["all_reduce"] + compression.sent().num_bytes


# -- what arrives


def stream(rank: int) -> Iterator[dict[str, Tensor]]:
    """Gradients of a replica: a slowly turning matrix whose singular values fall as 1 / k, and
    noise."""
    draw = torch.Generator().manual_seed(3)
    bases = {
        name: [torch.linalg.qr(torch.randn(n, 64, generator=draw)).Q for n in size]
        for name, size in SIZES.items()
    }
    values = 1 / torch.arange(1, 65)
    own = torch.Generator().manual_seed(rank)
    for _ in range(BATCHES):
        yield {
            name: (left * values) @ right.t() + 1e-3 * torch.randn(SIZES[name], generator=own)
            for name, (left, right) in bases.items()
        }
        for pair in bases.values():
            for i, basis in enumerate(pair):
                pair[i] = torch.linalg.qr(basis + 0.01 * torch.randn(basis.shape, generator=draw)).Q


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack(
            [(p * gradients[name]).sum() for name, p in self.named_parameters()]
        ).sum()


def arrived() -> dict[str, dict[str, float]]:
    """Share of gradients that has arrived after all batches, and of bytes that were sent, by
    compressor. Collectives: called on all ranks."""
    grid = ProcessGrid(dp=dist.get_world_size())
    layout = FlatLayout(SIZES, torch.float32)
    placements = {
        name: Placement(size, Init("zeros"), matrices=(((0, size[0]),),), factored=True)
        for name, size in SIZES.items()
    }
    found = {}
    for method in METHODS:
        partition = Partition(layout, {name: Route(grid.dp) for name in SIZES})
        compression = Compression(partition, placements, policy_of(method, grid.dp.size), Memory())
        reducer = GradientReducer(partition, compression)
        flat = layout.zeros()
        totals = _totals()
        for batch, gradients in islice(enumerate(stream(grid.dp.rank)), WHOLE, None):
            for name, view in layout.views(flat).items():
                view.copy_(gradients[name])
            factors: BlockParts = {
                (name, block): [Product(torch.eye(len(x)) / BLOCKS, x)]
                for name, x in gradients.items()
                if name in compression.factored
                for block in range(BLOCKS)
            }
            compression.expect(BatchGradients(batch, factors))
            compression.open()
            reducer.arm(flat)
            reducer.flush()
            reducer.wait()
            applied = layout.views(flat)
            applied |= {name: compression.total(name) for name in compression.kept_as_factors}
            compression.close(made=True)
            _note(totals, gradients, applied)
        sent = compression.sent()
        share = sent.num_bytes / sent.whole_bytes if compression.packed else 1.0
        found[method] = _share(totals, share)
    module = Given()
    model = DistributedDataParallel(module)
    hook = hook_of(model)
    totals = _totals()
    for batch, gradients in enumerate(stream(grid.dp.rank)):
        model.zero_grad(set_to_none=True)
        model(gradients).backward()
        if batch >= WHOLE:
            _note(
                totals,
                gradients,
                {name: p.grad * grid.dp.size for name, p in module.named_parameters()},
            )
    _, before, after = hook.compression_stats()
    return found | {"powerSGD_hook": _share(totals, after / before)}


def _totals() -> dict[str, list[Tensor]]:
    return {name: [torch.zeros(size), torch.zeros(size)] for name, size in SIZES.items()}


def _note(
    totals: dict[str, list[Tensor]], gradients: dict[str, Tensor], applied: dict[str, Tensor]
) -> None:
    for name, (given, taken) in totals.items():
        whole = gradients[name].clone()
        dist.all_reduce(whole)
        given += whole
        taken += applied[name]


def _share(totals: dict[str, list[Tensor]], sent: float) -> dict[str, float]:
    lost, all_ = (
        sum(float(x.square().sum()) for x in part)
        for part in (
            [given - taken for given, taken in totals.values()],
            [given for given, _ in totals.values()],
        )
    )
    return {"arrived": round(1 - lost / all_, 5), "bytes": round(sent, 5)}


# -- memory


def memory(shape_name: str, m: int) -> dict[str, list[float]]:
    """Predicted peak of one of two replicas, MiB by ZeRO stage, by method."""
    config = engine_config(SHAPES[shape_name], dp=2, num_microbatches=m)
    found = {}
    settings = {method: settings_of(method) for method in METHODS}
    settings[ONE_BY_ONE] = replace(settings["sbpca"], gradients_blocks=m)
    for name, compression in settings.items():
        peaks = [_peak(replace(config, compression=compression), zero) for zero in range(4)]
        found[name] = [round(peak / 2**20, 1) for peak in peaks]
    return found


def _peak(config: Config, zero: int) -> int:
    made = replace(config, parallel=replace(config.parallel, zero=zero))  # type: ignore[arg-type]
    return predict(JobPlan(made))[0].total


# -- losses


def losses(
    schedule: str, method: str, start: int, steps: int, seed: int, folder: str
) -> dict[str, Any]:
    """Trains a small GPT. Collectives: called on all ranks."""
    apart = method in SITES
    size = dist.get_world_size()
    config: Config = from_mapping(
        {
            "model": LOSSES.section | {"init_std": 0.05},
            "parallel": {"sites": size, "dp": 1} if apart else {"dp": size},
            "pipeline": {"schedule": schedule, "num_microbatches": 4},
            "optim": {"lr": 3e-3, "min_lr": 1e-4, "warmup_steps": 10, "betas": [0.9, 0.95]},
            "train": {"num_steps": steps, "micro_batch_size": LOSSES.micro_batch, "seed": seed},
            "data": {
                "corpus": [text.__file__ for text in TEXTS[1:]],
                "valid_corpus": [TEXTS[0].__file__],
                "cache": folder,
            },
            "outer": SITES.get(method, {}),
            "compression": {}
            if apart
            else {"gradients": method, "gradients_period": 20, "gradients_start": start}
            | METHODS[method],
        }
    )
    grid = ProcessGrid(sizes_of(config.parallel))
    data = open_data(config, quiet=True)
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    options = {
        "micro_batch_size": 2,
        "num_microbatches": 4,
        "dp_rank": grid.replica,
        "dp_size": grid.num_replicas,
    }
    engine.train(BatchLoader(data.train, **options), steps, lambda step: None)
    held_out = engine.evaluate(BatchLoader(data.valid[""], **options), 8)
    codec = f"{method} from {start}" if start else method
    return {
        "case": f"{schedule} {codec}, {steps} steps, seed {seed}",
        "valid_loss": round(sum(held_out.values()), 4),
        "settings": {
            "shape": "losses",
            "schedule": schedule,
            "codec": codec,
            "seed": seed,
            "steps": steps,
        },
        **shares_sent(engine, steps),
    }


def shares_sent(engine: Engine, steps: int) -> dict[str, float]:
    """Elements and bytes that a rank has sent, of those of the gradients of as many steps."""
    site = engine.grid.site
    compression = engine.state.compression
    elements = num_bytes = float(engine.grid.num_replicas > 1)
    if compression.packed:
        sent = compression.sent()
        elements = sent.elements / sent.whole_elements
        num_bytes = sent.num_bytes / sent.whole_bytes
    elif site.size > 1:
        elements = steps // engine.config.outer.every / steps
        whole = 4 * steps * engine.state.partition.layout.numel
        num_bytes = site.traffic.num_bytes["broadcast"] / site.size / whole
    return {"elements": round(elements, 5), "bytes": round(num_bytes, 5)}


def write_losses(args: argparse.Namespace) -> None:
    """Trains with every method."""
    with tempfile.TemporaryDirectory() as folder:
        found = common.report(
            "compression_losses",
            (
                run_ranks(losses, 2, schedule, method, args.start, args.steps, seed, folder)
                for seed, schedule, method in product(args.seeds, args.schedules, args.methods)
            ),
            args,
            show=print,
            shapes={"losses": LOSSES},
            meaning=(
                "valid_loss: after the last step; elements, bytes: that a rank sent, of those of "
                "whole gradients"
            ),
        )
    print(*over_seeds(found), sep="\n")


def show(entry: dict[str, Any]) -> None:
    if "arrived" in entry:
        print(entry["arrived"])
    elif "memory" in entry:
        print(entry["memory"])
    else:
        common.print_case(entry)
        print(entry["bytes_a_step"], flush=True)


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in () if args.no_race else args.shapes:
        yield run_ranks(measure, 2, shape, 2, args.rounds)
    yield {
        "case": "arrived",
        "settings": {"shape": args.shapes[0], "sizes": SIZES, "rank": RANK},
        "arrived": run_ranks(arrived, 2),
    }
    for shape, m in product(args.shapes, args.microbatches):
        yield {
            "case": f"memory {shape} dp=2 m={m}",
            "settings": {"shape": shape, "dp": 2, "num_microbatches": m},
            "memory": memory(shape, m),
        }


def main() -> None:
    parser = common.arguments(__doc__, rounds=7, shapes=["small"])
    parser.add_argument("--no-race", action="store_true", help="leave out what is timed")
    parser.add_argument(
        "--microbatches", nargs="+", type=int, default=[2, 8], help="of the predicted memory"
    )
    parser.add_argument(
        "--losses",
        action="store_true",
        help="train a small model with every method, and nothing else",
    )
    parser.add_argument("--steps", type=int, default=80, help="of each of these trainings")
    parser.add_argument(
        "--start", type=int, default=0, help="first batch of these trainings that is compressed"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of these trainings")
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "2bw"], help="of these trainings"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*METHODS, *SITES],
        default=list(METHODS),
        help="of these trainings",
    )
    args = common.parse(parser)
    if args.losses:
        write_losses(args)
    else:
        common.report("compression", cases(args), args, show=show, meaning=MEANING)


if __name__ == "__main__":
    main()
