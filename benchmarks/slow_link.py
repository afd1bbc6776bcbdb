"""Claims: over a slow link between two hosts 2bw keeps nine tenths of its speed without one, where
the bytes fit, and is faster there than 1f1b, gpipe and tensor parallelism; between replicas it
hides the all-reduce of the gradients.

    sudo env "PATH=$PATH" python -m benchmarks.slow_link

Needs root: the hosts are network namespaces (scripts/testbed). Where they cannot be made it says so
and does nothing.

One process of one thread (of `slices` two) on each of two hosts, Gloo over TCP. The hosts share
several links, and every side has a copy for each link, in the same processes, so that all of them
run by turns:

    round 0   2bw on free  2bw on lan  2bw on wan   1f1b on free ...        round 1   the other way round ...

`free` is a virtual cable without limit. A ratio is taken within a round, time over time as in all
benchmarks: of a side on `free` to the same side on a link (`share`: 1, the link costs nothing), and
of other sides to 2bw on the same link. Times are of the steady state, from one update to another. A
side must have the same losses on all links, to the bit.

What is printed for each side:

    tokens/s, best      of the fastest rounds: on a machine with other work they say more than the
                        median
    share, quartiles    of its speed on `free`: median over the rounds
    by bytes            what the byte counts allow, with T the time of a batch on `free` and s that
                        of what it sends each way at the link's rate: T / max(T, s) where it
                        computes meanwhile, T / (T + s) where it waits (tensor parallelism;
                        synchronous replicas, but for what the last backward hides)
    simulated           what schedules.simulate.simulator says of the plan that ran, with stages of the
                        same weight. A transfer can be hidden up to half of a forward and backward
                        (2bw with pipeline.warmup = "latency"), a whole one ("bandwidth") or not at
                        all (1f1b; 2bw with "depth")
    inputs, norm        per cent of the time that each rank waited, for inputs and for the norm and
                        reduction
    no core             per cent that it could have gone on, but other work had the core: if much,
                        numbers mean little
    emulator            CPU time of the link's emulator, of one core

Kinds: `pipelines` (2 stages), `codecs` (2bw with compressed messages between its 2 stages),
`tensor` (2bw against tensor parallelism), `replicas` (2bw against a synchronous step), `gradients`
(the same, sending a hundredth of them), `slices` (2 stages of tp=2 each on a host, whose ranks send
slices of what goes between stages, or all of it each; the result file has the bytes that each host
sent over the link, by its own counters and by ours), `split`: 2bw with the ordinary warm-up, with
backwards in two parts and whole: the gradient is on its way while W is computed, which hides half
of W on each link, the most that so many micro-batches in flight can; whole with one more in flight
(latency warm-up); and with each micro-batch cut into two, of which one more in flight is fewer
samples than the ordinary warm-up has (`share_of_first`: of the first side's speed on `free`).
`--links far=1000:20 --shapes light small small_4`: the first is paced, `paced`: pipelines
and replicas whose stages wait besides, as if for an accelerator, so that ranks, TCP and emulator do
not fight for the cores: what schedule and transport do on hosts that have the CPU time to send.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch.distributed as dist

from benchmarks.common import SHAPES, arguments, parse, report
from benchmarks.hosts import FREE, on_two_hosts
from benchmarks.link_sides import Link, Method, Rounds, Side, ratio

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
COMPRESSED = 2e-2
"""Tolerance of the first loss, where messages lose a tenth of an activation."""
PACES_S = 0.1, 0.05
SPLIT_PACE_S = 0.15

Methods = Mapping[str, Method]  # the first is the one that the others are held against
PIPELINES: Methods = {
    "2bw, latency": Method(pp=2, schedule="2bw", warmup="latency"),
    "2bw, bandwidth": Method(pp=2, schedule="2bw", warmup="bandwidth"),
    "2bw, depth": Method(pp=2, schedule="2bw"),
    "1f1b": Method(pp=2),
    "gpipe": Method(pp=2, schedule="gpipe"),
}
CODECS: Methods = {
    name: replace(PIPELINES["2bw, latency"], messages=name)
    for name in ("none", "bf16", "int8", "int4")
}
SPLIT: Methods = {
    "2bw, split": Method(pp=2, schedule="2bw", split=True),
    "2bw, depth": PIPELINES["2bw, depth"],
    "2bw, latency": PIPELINES["2bw, latency"],
    "2bw, halves": Method(pp=2, schedule="2bw", warmup="latency", split=True, pieces=2),
}
TENSOR: Methods = {
    "2bw, latency": PIPELINES["2bw, latency"],
    "tensor": Method(tp=2, overlaps=False),
}
SLICES: Methods = {
    "slices": Method(tp=2, pp=2, schedule="2bw", warmup="latency"),
    "copies": Method(tp=2, pp=2, schedule="2bw", warmup="latency", slices=False),
}
GRADIENTS: Methods = {
    "2bw, dct": Method(dp=2, schedule="2bw", gradients="dct"),
    "1f1b, dct": Method(dp=2, gradients="dct"),
}
REPLICAS: Methods = {
    "2bw": Method(dp=2, schedule="2bw"),
    "synchronous": Method(dp=2, overlaps=False),
}


class Case:
    """Methods that take turns on all links, on one shape. Collectives: created and used on all
    ranks."""

    def __init__(
        self, kind: str, methods: Methods, links: Sequence[Link], shape: str, dtype: str, m: int
    ):
        pace_ms = 1e3 * next(iter(methods.values())).pace
        self.name = f"{kind} {shape} {dtype} m={m}" + (f" pace={pace_ms:.0f} ms" if pace_ms else "")
        self.methods = methods
        self.links = links
        self.dtype = dtype
        self.settings = {
            "kind": kind,
            "shape": shape,
            "dtype": dtype,
            "num_microbatches": m,
            "threads": 1,
            "pace_ms": pace_ms,
        }
        self.sides = {
            (name, link.name): Side(method, link, SHAPES[shape], dtype, m)
            for name, method in methods.items()
            for link in links
        }

    def run(self, rounds: int, batches: int) -> None:
        """Runs all sides by turns, in another order in every round."""
        order = list(self.sides.values())
        for side in order:  # TCP finds the link's rate, memory is allocated
            side.run(1)
            side.rounds = Rounds()
        for i in range(rounds):
            for side in order if i % 2 == 0 else order[::-1]:
                side.run(batches)
        first = order[0].losses[0]
        for (method, link), side in self.sides.items():
            assert side.losses == self.sides[method, FREE].losses, (
                f"{method}: other losses on {link} than on {FREE}"
            )
            tolerance = TOLERANCE[self.dtype] if side.method.messages == "none" else COMPRESSED
            assert abs(side.losses[0] - first) <= tolerance * first, (
                f"{method}: {side.losses[0]}, {first}"
            )

    def entry(self) -> dict[str, Any]:
        """The case in the result file."""
        links = [link.name for link in self.links]
        sides = {
            method: {
                link: self.sides[method, link].numbers(self.sides[method, FREE]) for link in links
            }
            for method in self.methods
        }
        best, *others = self.methods
        whole = self.sides[best, FREE].wall()
        for numbers in (numbers for of_links in sides.values() for numbers in of_links.values()):
            numbers["share_of_first"] = ratio(whole, [1e-3 * ms for ms in numbers["wall_ms"]])
        return {
            "case": self.name,
            "settings": self.settings,
            "rounds": len(sides[best][FREE]["wall_ms"]),
            "links": {
                link.name: {"mbit": link.mbit, "delay_ms": link.delay_ms} for link in self.links
            },
            "sides": sides,
            "against": best,
            "ratio": {
                other: {link: _over(sides[other], sides[best], link) for link in links}
                for other in others
            },
        }


def _over(other: Mapping[str, Any], best: Mapping[str, Any], link: str) -> dict[str, float]:
    """Time of one method over that of the best one on a link: measured, and as the byte counts
    say."""
    by_bytes = [min(side[FREE]["wall_ms"]) / side[link]["share_by_bytes"] for side in (other, best)]
    return ratio(other[link]["wall_ms"], best[link]["wall_ms"]) | {
        "by_bytes": round(by_bytes[0] / by_bytes[1], 2)
    }


HEADINGS = (
    "",
    "on",
    "tokens/s",
    "share",
    "quartiles",
    "best",
    "by bytes",
    "simulated",
    "inputs",
    "norm",
    "no core",
    "emulator",
    "",
)
WIDTHS = (13, 5, 8, 5, 12, 5, 8, 9, 7, 7, 7, 8, 14)
SHARES = ("waiting_for_inputs", "waiting_for_norm", "without_a_core")


def print_case(entry: Mapping[str, Any]) -> None:
    """A line for each side."""
    rows = [(*HEADINGS[:-1], f"time over {entry['against']}")]
    for method, links in entry["sides"].items():
        for link, side in links.items():
            share = side["share"]
            over = entry["ratio"].get(method, {}).get(link)
            rows.append(
                (
                    method,
                    link,
                    f"{side['best_tokens_per_s']:.0f}",
                    f"{share['median']:.2f}",
                    f"[{share['q1']:.2f}, {share['q3']:.2f}]",
                    f"{share['best']:.2f}",
                    f"{side['share_by_bytes']:.2f}",
                    f"{side['share_simulated']:.2f}" if "share_simulated" in side else "-",
                    *(" ".join(f"{100 * x:3.0f}" for x in side[key]) for key in SHARES),
                    f"{side['cpu_cores']['emulator']:.1%}",
                    f"{over['median']:5.2f}, best {over['best']:5.2f} (by bytes "
                    f"{over['by_bytes']:.2f})"
                    if over
                    else "",
                )
            )
    print(f"\n{entry['case']}")
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, WIDTHS[1:], strict=True))
        print(f"  {first:<{WIDTHS[0]}}", *cells, flush=True)


# -- the two hosts


def on_host(args: argparse.Namespace, links: Sequence[Link]) -> None:
    """Everything, on one rank."""
    alone = args.kinds[0] if args.kinds in (["codecs"], ["gradients"], ["split"]) else ""
    part = "_slices" if dist.get_world_size() > 2 else f"_{alone}" if alone else ""
    report(f"slow_link{part}", cases(args, links), args, show=print_case)


def cases(args: argparse.Namespace, links: Sequence[Link]) -> Iterator[dict[str, Any]]:
    """Entries of the result file. Collectives: on all ranks."""
    for case, rounds, batches in plan_cases(args, links):
        case.run(rounds, batches)
        yield case.entry()


def plan_cases(args: argparse.Namespace, links: Sequence[Link]) -> Iterator[tuple[Case, int, int]]:
    """Yields the cases one by one, each with its rounds and the batches of a round."""
    m = args.microbatches
    rounds = args.rounds
    few = min(args.rounds, 2)
    replica = args.replica_shape
    first = args.dtypes[0]
    some = {name: method for name, method in SPLIT.items() if name in (args.methods or SPLIT)}
    table: dict[str, list[tuple[Methods, str, str, int, int, int]]] = {
        "pipelines": [
            (PIPELINES, shape, dtype, m, rounds, 2)
            for shape, dtype in product(args.shapes, args.dtypes)
        ],
        "codecs": [(CODECS, shape, first, m, rounds, 2) for shape in args.shapes],
        # over the slowest link a step takes many seconds
        "tensor": [(TENSOR, args.shapes[0], dtype, m, few, 1) for dtype in args.dtypes],
        "replicas": [
            (REPLICAS, replica, first, each, rounds, 2) for each in args.replica_microbatches
        ],
        "gradients": [
            (GRADIENTS, replica, first, each, rounds, 2) for each in args.replica_microbatches
        ],
        "slices": [(_paced(SLICES, PACES_S[0]), "light", "fp32", m, rounds, 2)],
        "split": [
            (_paced(some, SPLIT_PACE_S) if shape == "light" else some, shape, first, m, rounds, 4)
            for shape in args.shapes
        ],
        "paced": [
            *((_paced(PIPELINES, pace), "light", "fp32", m, rounds, 2) for pace in PACES_S),
            (_paced(REPLICAS, PACES_S[0]), replica, "fp32", m, rounds, 2),
        ],
    }
    for kind in (kind for kind in args.kinds if (kind == "slices") == (dist.get_world_size() > 2)):
        for methods, shape, dtype, microbatches, times, batches in table[kind]:
            yield Case(kind, methods, links, shape, dtype, microbatches), times, batches


def _paced(methods: Methods, seconds: float) -> Methods:
    return {name: replace(method, pace=seconds) for name, method in methods.items()}


def main() -> int:
    parser = arguments(__doc__, rounds=5, shapes=["small", "thin"])
    kinds = [
        "pipelines",
        "codecs",
        "tensor",
        "replicas",
        "gradients",
        "slices",
        "paced",
        "split",
    ]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument(
        "--methods", nargs="+", choices=list(SPLIT), help="of kind split, those to run"
    )
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--replica-shape", choices=SHAPES, default="thin")
    parser.add_argument(
        "--replica-microbatches", nargs="+", type=int, default=[4, 12], help="on each replica"
    )
    parser.add_argument(
        "--links",
        nargs="+",
        default=["lan=200:1", "wan=50:5"],
        metavar="NAME=UP[/DOWN]:DELAY_MS",
        help="besides the one without limit",
    )
    parser.add_argument(
        "--congestion",
        default="",
        help="control of TCP on the hosts, such as reno, which sends at "
        "once what bbr paces; default: the machine's own",
    )
    args = parse(parser)
    return on_two_hosts(
        "slow_link",
        on_host,
        args,
        (FREE, *args.links),
        [(FREE, n, ()) for n in sorted({1 + (kind == "slices") for kind in args.kinds})],
        ["--congestion", args.congestion] if args.congestion else [],
    )


if __name__ == "__main__":
    sys.exit(main())
