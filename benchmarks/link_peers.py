"""Claims: over a slow link between two hosts, stages with compressed messages train four times as
fast as torch's pipelining and twenty times as fast as DTensor, and replicas with compressed
gradients twice as fast as DDP with powerSGD_hook; or the bytes that went over the link say why not.

    sudo env "PATH=$PATH" python -m benchmarks.link_peers

Needs root: the hosts are network namespaces (scripts/testbed). Where they cannot be made it says so
and does nothing.

One process of one thread on each of two hosts, Gloo over TCP, fp32. On each link a job of its own,
in which all sides take turns: --batches steps each, of which ours fill and drain the pipeline once.
DTensor has the batch as one micro-batch. kB a step: what the first host has sent over the link, by
its own counter. Wire: what these take at the link's rate, of the time of a step; where that is near
1 nothing but fewer bytes is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import common
from benchmarks.common import OURS, SHAPES, OurStep, Step, case, engine_config, over_ranks, race
from benchmarks.compression import ONE_BUCKET, RANK, hook_of
from benchmarks.data_parallel import DDPStep
from benchmarks.hosts import FREE, name_of, on_two_hosts
from benchmarks.link_sides import Link
from benchmarks.pipeline import TorchPipelineStep
from benchmarks.tensor_parallel import DTensorStep
from hybridpar.config import CompressionConfig
from hybridpar.grid import ProcessGrid, sizes_of

ALIKE = 0.2
"""Largest relative difference of losses after some steps, where a part of what is sent is left
out."""
STAGES = {OURS: "int4", "hybridpar, int8": "int8", "hybridpar, exact": "none"}
REPLICAS = {
    OURS: {"gradients": "powersgd", "gradients_rank": RANK},
    "hybridpar, dct": {"gradients": "dct", "gradients_kept": 0.005},
    "hybridpar, whole": {},
}


class Repeated:
    """So many steps of a side at a time."""

    def __init__(self, step: Step, batches: int):
        self.step = step
        self.batches = batches

    def __call__(self) -> float:
        if isinstance(self.step, OurStep):  # without draining between them
            self.step.engine.train(self.step.loader, self.batches, self.step._note)
            return self.step._last
        return [self.step() for _ in range(self.batches)][-1]


def stages(shape_name: str, m: int) -> dict[str, Step]:
    """Two stages, and tensor parallelism. Collectives: on both ranks."""
    shape = SHAPES[shape_name]
    config = engine_config(shape, pp=2, num_microbatches=m, schedule="2bw", warmup="latency")
    sides: dict[str, Step] = {
        name: _ours(replace(config, compression=CompressionConfig(messages=codec)), shape)  # type: ignore[arg-type]
        for name, codec in STAGES.items()
    }
    one = replace(shape, micro_batch=m * shape.micro_batch)
    return sides | {
        "Schedule1F1B": TorchPipelineStep(shape, "1f1b", m, "fp32"),
        "DTensor": DTensorStep(one, init_device_mesh("cpu", (2,)), "fp32"),
    }


def replicas(shape_name: str, m: int) -> dict[str, Step]:
    """Two replicas. Collectives: on both ranks."""
    shape = SHAPES[shape_name]
    config = engine_config(shape, dp=2, num_microbatches=m, schedule="2bw")
    sides: dict[str, Step] = {
        name: _ours(replace(config, compression=CompressionConfig(**settings)), shape)
        for name, settings in REPLICAS.items()
    }
    hooked = DDPStep(shape, m, "fp32", ONE_BUCKET)
    whole = DDPStep(shape, m, "fp32")
    hook_of(hooked.model)
    return sides | {"DDP, powerSGD_hook": hooked, "DDP": whole}


def _ours(config: Any, shape: Any) -> OurStep:
    return OurStep(config, shape, ProcessGrid(sizes_of(config.parallel)))


KINDS: Mapping[str, tuple[Callable[[str, int], dict[str, Step]], int]] = {
    "stages": (stages, 1),
    "replicas": (replicas, 2),
}
"""Sides, and replicas."""


def measure(kind: str, link: Link, args: argparse.Namespace) -> dict[str, Any]:
    """Races the sides of a kind. Collectives: on both ranks."""
    make, num_replicas = KINDS[kind]
    shape = args.shapes[0]
    m = args.microbatches
    batches = args.batches
    sides = {name: Repeated(step, batches) for name, step in make(shape, m).items()}
    result = race(sides, args.rounds, warmup=1, tolerance=ALIKE)
    for times in (result.wall, result.cpu):
        for name, seconds in times.items():
            times[name] = [s / batches for s in seconds]
    found = case(
        f"{kind} {shape} m={m} on {link.name}",
        result,
        num_replicas * m * SHAPES[shape].microbatch_tokens,
        shape=shape,
        num_microbatches=m,
        kind=kind,
        link={"mbit": link.mbit, "delay_ms": link.delay_ms},
        threads=1,
        batches=batches,
    )
    found["bytes_a_step"], found["wire"] = {}, {}
    for name, side in sides.items():
        dist.barrier()
        before = link.sent_bytes()
        side()
        sent = max(over_ranks([(link.sent_bytes() - before) / batches], "max"))
        found["bytes_a_step"][name] = round(sent)
        found["wire"][name] = round(link.seconds(sent) / median(result.wall[name]), 3)
    return found


def show(found: dict[str, Any]) -> None:
    common.print_case(found)
    for name, sent in found["bytes_a_step"].items():
        print(
            f"    {name:<22} {sent / 1e3:9.1f} kB a step, wire {found['wire'][name]:.2f}",
            flush=True,
        )


def on_host(args: argparse.Namespace, links: Sequence[Link]) -> None:
    """All kinds on one link, on one of the two ranks."""
    link = next(link for link in links if link.name == args.on)
    common.report(
        "link_peers",
        (measure(kind, link, args) for kind in args.kinds),
        args,
        show=show,
        meaning=(
            "ratio: peer's time / hybridpar's; bytes_a_step: over the link, of the host that sends "
            "more; wire: what they "
            "take of a step's time"
        ),
    )


def main() -> int:
    parser = common.arguments(__doc__, rounds=3, shapes=["thin"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batches", type=int, default=12, help="steps of a side at a time")
    parser.add_argument(
        "--links", nargs="+", default=["wan=50:5", FREE], metavar="NAME=UP[/DOWN]:DELAY_MS"
    )
    parser.add_argument("--on", default="", help=argparse.SUPPRESS)
    args = common.parse(parser)
    names = list(map(name_of, args.links))
    return on_two_hosts(
        "link_peers",
        on_host,
        args,
        args.links,
        [(name, 1, ("--on", name, *["--add"] * (name != names[0]))) for name in names],
    )


if __name__ == "__main__":
    sys.exit(main())
