"""Claims: two sites that exchange fragments beside training lose little of their speed over a link
of 10 Mbit/s and 20 ms, over which replicas that sum every gradient are an order of magnitude
slower.

    sudo env "PATH=$PATH" python -m benchmarks.sites

Needs root: the hosts are network namespaces (scripts/testbed). Where they cannot be made it says so
and does nothing.

One process of one thread on each of two hosts, Gloo over TCP. Every side has a copy on the link and
one on `free`, a virtual cable without limit, in the same processes, so that all of them run by
turns:

    streamed    2 sites, each half of the model exchanged every 30 steps in bf16, 14 steps under
                way, mix 0.5
    waiting     2 sites, all of it exchanged every 30 steps in fp32, while training waits (DiLoCo)
    replicas    dp=2: gradients are summed every step
    seldom      as streamed, in thirds every 90 steps in int4, 30 under way (where it is asked for:
                --sides)

A round of sites is 30 steps, with all messages that leave in them and all of their way. What is
printed: time of a step; `share`, speed over that on `free`, medians over the rounds; and how many
times as long a step of a side takes as one of `streamed` on the same link. by bytes: the share that
the byte counts allow.

Paced: forward and backward of a micro-batch wait besides, as if for an accelerator (--pace, 0:
not), so that ranks, TCP and the link's emulator do not fight for the cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    SHAPES,
    FixedLoader,
    Shape,
    arguments,
    engine_config,
    over_ranks,
    parse,
    report,
)
from benchmarks.hosts import FREE, on_two_hosts
from benchmarks.link_sides import Link, grid_on, pace, ratio
from hybridpar.config import OuterConfig
from hybridpar.grid import sizes_of
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

EVERY = 30
DELAY = 14
OUTER = {
    "streamed": OuterConfig(every=EVERY, fragments=2, delay=DELAY, mix=0.5, precision="bf16"),
    "waiting": OuterConfig(every=EVERY),
    "replicas": None,
    "seldom": OuterConfig(every=90, fragments=3, delay=30, mix=0.5, precision="int4"),
}
STREAMED = next(iter(OUTER))
REPLICA_STEPS = 1


@dataclass
class Side:
    """A way to train, on one link, with an engine of its own; outer None: replicas. Collectives: on
    both ranks."""

    outer: OuterConfig | None
    link: Link
    shape: Shape
    m: int
    pace: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = dist.get_world_size()
        config = engine_config(self.shape, dp=1 if self.outer else ranks, num_microbatches=self.m)
        if self.outer is not None:
            config = replace(
                config, outer=self.outer, parallel=replace(config.parallel, sites=ranks)
            )
        self.grid = grid_on(self.link, sizes_of(config.parallel))
        self.engine = Engine(JobPlan(config), self.grid, torch.device("cpu"))
        if self.pace:
            pace(self.engine, self.pace)
        self.loader = FixedLoader(self.shape, self.m, self.grid.replica, self.grid.num_replicas)
        self.steps = self.outer.every if self.outer else REPLICA_STEPS
        self._train(max(self.steps - 1, 1))  # so that at no end of a round a message is under way
        self.traffic = (self.grid.site if self.outer else self.grid.dp).traffic
        self.traffic.clear()

    def _train(self, steps: int) -> None:
        self.engine.train(self.loader, steps, lambda result: self.losses.append(result.loss))

    def run(self) -> None:
        """A round."""
        dist.barrier()
        start = time.perf_counter()
        self._train(self.steps)
        self.seconds.append((time.perf_counter() - start) / self.steps)

    def step_bytes(self) -> float:
        """Bytes of a step, on average, that each rank sends each other one. Of what is gathered all
        are counted."""
        own = sum(self.traffic.num_bytes.values()) / (dist.get_world_size() if self.outer else 1)
        return own / (len(self.seconds) * self.steps)


def entry(
    sides: Mapping[tuple[str, str], Side], links: Sequence[Link], args: argparse.Namespace
) -> dict[str, Any]:
    """The case in the result file. Collectives: on both ranks."""
    wall = {key: over_ranks(side.seconds, "max") for key, side in sides.items()}
    found: dict[str, Any] = {}
    for name in args.sides:
        for link in links:
            side = sides[name, link.name]
            times = wall[name, link.name]
            alone = min(wall[name, FREE])
            wire = link.seconds(side.step_bytes() * (dist.get_world_size() - 1))
            by_bytes = alone / (
                max(alone, wire) if side.outer and side.outer.delay else alone + wire
            )
            found.setdefault(name, {})[link.name] = {
                "step_ms": round(1e3 * statistics.median(times), 2),
                "share": ratio(wall[name, FREE], times),
                "share_by_bytes": round(by_bytes, 3),
                "bytes_of_a_step": round(side.step_bytes()),
                "over_streamed": ratio(times, wall[STREAMED, link.name]),
                "wall_ms": [round(1e3 * t, 2) for t in times],
            }
    shape = args.shapes[0]
    more = f" over {args.link}, {args.sites} sites" if args.sites > 2 else ""
    return {
        "case": f"sites {shape} fp32 m={args.microbatches} pace={1e3 * args.pace:.0f} ms{more}",
        "rounds": args.rounds,
        "settings": {
            "shape": shape,
            "sites": args.sites,
            "num_microbatches": args.microbatches,
            "threads": 1,
            "every": EVERY,
            "delay": DELAY,
            "pace_ms": 1e3 * args.pace,
        },
        "links": {link.name: {"mbit": link.mbit, "delay_ms": link.delay_ms} for link in links},
        "sides": found,
    }


def print_case(case: Mapping[str, Any]) -> None:
    """A line for each side."""
    print(
        f"\n{case['case']}\n  {'':<10} {'on':<6} {'ms a step':>10} {'share':>6} {'quartiles':>14} "
        f"{'by bytes':>8} "
        f"{'kB a step':>9} {'time over streamed':>19}"
    )
    for name, links in case["sides"].items():
        for link, side in links.items():
            share = side["share"]
            quartiles = f"[{share['q1']:.3f}, {share['q3']:.3f}]"
            print(
                f"  {name:<10} {link:<6} {side['step_ms']:>10.1f} {share['median']:>6.3f} "
                f"{quartiles:>14} {side['share_by_bytes']:>8.3f} "
                f"{side['bytes_of_a_step'] / 1e3:>9.1f} {side['over_streamed']['median']:>19.2f}",
                flush=True,
            )


def on_host(args: argparse.Namespace, links: Sequence[Link]) -> None:
    """Everything, on one of the two ranks."""
    sides = {
        (name, link.name): Side(outer, link, SHAPES[args.shapes[0]], args.microbatches, args.pace)
        for name, outer in OUTER.items()
        if name in args.sides
        for link in links
    }
    for i in range(args.rounds):
        for side in list(sides.values())[:: 1 if i % 2 == 0 else -1]:
            side.run()
    for (name, _), side in sides.items():
        assert side.losses == sides[name, FREE].losses, (
            f"{name}: other losses on a link than on {FREE}"
        )
    report(
        "sites",
        [entry(sides, links, args)],
        args,
        show=print_case,
        meaning=(
            "share: speed over that on the link without limit; over_streamed: time of a step over "
            "streamed's"
        ),
    )


def main() -> int:
    parser = arguments(__doc__, rounds=3, shapes=["thin"])
    parser.add_argument("--microbatches", type=int, default=1, help="of a site")
    parser.add_argument(
        "--pace", type=float, default=0.15, help="seconds that a micro-batch waits besides"
    )
    parser.add_argument(
        "--link",
        default="far=10:20",
        metavar="NAME=MBIT[/BACK]:DELAY_MS",
        help="with BACK, what the first host sends is slower than all else",
    )
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=list(OUTER),
        default=list(OUTER)[:3],
        help="streamed among them",
    )
    args = parse(parser)
    return on_two_hosts(
        "sites", on_host, args, (FREE, args.link), options=("--hosts", str(args.sites))
    )


if __name__ == "__main__":
    sys.exit(main())
