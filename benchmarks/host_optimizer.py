"""Claim: AdamW on the host moves its bytes at 85 % of the machine's memory bandwidth or more, ahead
of its peers.

    python -m benchmarks.host_optimizer

Every side takes a step over the parameters of one model, far more than the caches hold, in turn
with the others. Ours is the update of a rank's state as training calls it, in each of the ways it
writes weights. Peers are torch's fused AdamW and, where it is installed, DeepSpeed's CPUAdam, on
one flat tensor for each weight decay as ZeRO-Offload has it. All must come to the same weights
first.

Bandwidth is STREAM's triad (triad.c) in the same round, by the faster of its two kinds of stores.
Bytes of a step are those that any AdamW has to move: of each parameter 4 read of the gradient, 4
read and 4 written of the weight and of both moments, 2 written of a bfloat16 copy. A side that
moves more has a smaller share.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    CLIP,
    LR,
    SEED,
    SHAPES,
    arguments,
    engine_config,
    parse,
    report,
    summary,
)
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.state.rank import RankState
from hybridpar.train.engine import Engine
from hybridpar.train.launching.launch import keep_freed_memory

# bytes a parameter, without and with a copy in bfloat16
FP32 = 28
COPY = 30
TRIADS = ("triad, plain stores", "triad, past the caches")
TRIAD_NUMEL = 1 << 26  # of each of its arrays of doubles
STEPS = 3  # before weights are compared
TOLERANCE = 1e-5  # largest difference of weights over the largest weight


@dataclass(frozen=True)
class Side:
    """`step` takes one over `numel` elements, `bytes_each` to move; `weights` are all, in the order
    of `by_decay`."""

    step: Callable[[], object]
    numel: int
    bytes_each: int
    weights: Callable[[], Tensor]


# -- sides


def state_of(shape: str, dtype: str, schedule: str) -> RankState:
    """A rank's state as the engine builds it, with made up gradients of norm CLIP."""
    config = engine_config(SHAPES[shape], dtype=dtype, schedule=schedule)
    state = Engine(JobPlan(config), ProcessGrid(), torch.device("cpu")).state
    state.allocate()
    draw = torch.Generator().manual_seed(SEED)
    for gradient in state.gradients.views(0).values():
        gradient.normal_(std=CLIP / state.gradients.layout.numel**0.5, generator=draw)
    return state


def by_decay(state: RankState, tensors: Mapping[str, Tensor]) -> dict[float, list[Tensor]]:
    """Tensors by parameter, as groups of equal weight decay."""
    decay = state.optimizer.groups[0].settings.weight_decay
    return {
        d: [
            tensors[slot.name].detach()
            for slot in state.slots
            if (slot.placement.weight_decay > 0) is (d == decay)
        ]
        for d in (decay, 0.0)
    }


def joined(groups: Mapping[float, Sequence[Tensor]]) -> dict[float, Tensor]:
    return {decay: torch.cat([x.flatten() for x in group]) for decay, group in groups.items()}


def flat(groups: Mapping[float, Sequence[Tensor]]) -> Tensor:
    return torch.cat(list(joined(groups).values()))


def ours(state: RankState, bytes_each: int) -> Side:
    def weights() -> Tensor:
        return flat(by_decay(state, state.weights.parameters_of_optimizer()))

    return Side(
        lambda: state.update(0, LR, 1.0),
        sum(slot.numel for slot in state.slots),
        bytes_each,
        weights,
    )


def leaves_of(
    weights: Mapping[float, list[Tensor]], gradients: Mapping[float, list[Tensor]]
) -> list[dict[str, Any]]:
    """Copies as groups of parameters."""
    groups = []
    for decay in weights:
        leaves = [w.clone().requires_grad_() for w in weights[decay]]
        for x, gradient in zip(leaves, gradients[decay], strict=True):
            x.grad = gradient.clone()
        groups.append({"params": leaves, "weight_decay": decay})
    return groups


def theirs(
    state: RankState, build: Callable[..., torch.optim.Optimizer], *, one: bool, copy: bool = False
) -> Side:
    """A peer. `one`: on one tensor for each weight decay, else for each parameter. `copy`: and into
    bfloat16."""
    weights = by_decay(state, state.weights.parameters_of_optimizer())
    gradients = by_decay(state, state.gradients.views(0))
    if one:
        weights, gradients = (
            {d: [x] for d, x in joined(groups).items()} for groups in (weights, gradients)
        )
    groups = leaves_of(weights, gradients)
    settings = state.optimizer.groups[0].settings
    optimizer = build(groups, lr=LR, betas=settings.betas, eps=settings.eps)
    leaves = {group["weight_decay"]: [x.detach() for x in group["params"]] for group in groups}
    copies = [
        (x, torch.empty_like(x, dtype=torch.bfloat16))
        for group in leaves.values()
        for x in group
        if copy
    ]

    def step() -> None:
        optimizer.step()
        for x, low in copies:
            low.copy_(x)

    return Side(
        step, sum(slot.numel for slot in state.slots), COPY if copy else FP32, lambda: flat(leaves)
    )


def fused(groups: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True, **settings)


def sides_of(shape: str) -> dict[str, Side]:
    in_place = state_of(shape, "fp32", "1f1b")
    sides = {
        "torch fused": theirs(in_place, fused, one=False),
        "hybridpar": ours(in_place, FP32),
        "hybridpar, other buffer": ours(state_of(shape, "fp32", "2bw"), FP32),
        "hybridpar, bf16 copy": ours(state_of(shape, "bf16", "1f1b"), COPY),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        print(f"no deepspeed.ops.adam.DeepSpeedCPUAdam ({error})")
        return sides
    return sides | {
        "CPUAdam": theirs(in_place, DeepSpeedCPUAdam, one=True),
        "CPUAdam, bf16 copy": theirs(in_place, DeepSpeedCPUAdam, one=True, copy=True),
    }


PEERS = {"hybridpar": ("torch fused", "CPUAdam"), "hybridpar, bf16 copy": ("CPUAdam, bf16 copy",)}


def check(sides: Mapping[str, Side]) -> None:
    """Takes STEPS steps of each. Raises: AssertionError if a side's weights are not those of the
    first side."""
    for side in sides.values():
        for _ in range(STEPS):
            side.step()
    first = next(iter(sides.values())).weights()
    for name, side in sides.items():
        off = float((side.weights() - first).abs().max() / first.abs().max())
        assert off <= TOLERANCE, f"{name}: weights are off by {off}"


def triads() -> Iterator[tuple[str, Side]]:
    """Compiled for this machine, on arrays that stay."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "triad.so"
        subprocess.run(
            [
                *os.environ.get("CC", "cc").split(),
                "-O3",
                "-march=native",
                "-fopenmp",
                "-shared",
                "-fPIC",
                str(Path(__file__).with_name("triad.c")),
                "-o",
                str(path),
            ],
            check=True,
        )
        library = ctypes.CDLL(str(path))
    library.stream_array.restype = ctypes.c_void_p
    n = ctypes.c_ssize_t(TRIAD_NUMEL)
    arrays = [ctypes.c_void_p(library.stream_array(n)) for _ in range(3)]
    assert all(arrays), "no memory for the triad's arrays"
    for name, function in zip(
        TRIADS, (library.triad_plain, library.triad_past_caches), strict=True
    ):
        yield name, Side(partial(function, *arrays, n), TRIAD_NUMEL, 24, lambda: torch.empty(0))


# -- measuring


def measure(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Elements a second of each side in each round, after one that is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            start = time.perf_counter()
            sides[name].step()
            speeds[name].append(sides[name].numel / (time.perf_counter() - start))
    return {name: column[1:] for name, column in speeds.items()}


def cases_of(
    sides: Mapping[str, Side], speeds: Mapping[str, list[float]], **settings: Any
) -> Iterator[dict[str, Any]]:
    """Entries of the result file."""
    rates = {
        name: [sides[name].bytes_each * speed for speed in column]
        for name, column in speeds.items()
    }
    triad = [max(pair) for pair in zip(*(rates[name] for name in TRIADS), strict=True)]
    for name, column in rates.items():
        yield {
            "case": f"{name}, {settings['threads']} threads",
            "settings": settings,
            "share": summary([a / b for a, b in zip(column, triad, strict=True)]),
            "share_of_best": round(max(column) / max(triad), 4),
            "ratio": {
                peer: summary([a / b for a, b in zip(column, rates[peer], strict=True)])
                for peer in PEERS.get(name, ())
                if peer in rates
            },
            "elements_per_s": round(statistics.median(speeds[name])),
            "gb_per_s": [round(rate / 1e9, 2) for rate in column],
        }


def show(entry: Mapping[str, Any]) -> None:
    rates = entry["gb_per_s"]
    share = entry["share"]
    print(
        f"{entry['case']:<36} {entry['elements_per_s'] / 1e9:5.2f} G/s  "
        f"{statistics.median(rates):5.1f} GB/s, best "
        f"{max(rates):5.1f}   of the triad {share['median']:.2f}  [{share['q1']:.2f}, "
        f"{share['q3']:.2f}], best "
        f"of best {entry['share_of_best']:.2f}",
        flush=True,
    )
    for peer, ratio in entry["ratio"].items():
        print(
            f"    vs {peer:<22} {ratio['median']:5.2f}x  [{ratio['q1']:.2f}, {ratio['q3']:.2f}]",
            flush=True,
        )


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in args.shapes:
        sides = sides_of(shape)
        check(sides)
        sides |= triads()
        for threads in args.threads:
            torch.set_num_threads(threads)
            yield from cases_of(sides, measure(sides, args.rounds), shape=shape, threads=threads)


def main() -> None:
    parser = arguments(__doc__, rounds=15, shapes=["85M"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parse(parser)
    keep_freed_memory()  # as training does
    report(
        "host_optimizer",
        cases(args),
        args,
        show=show,
        meaning=(
            "share: of the triad's bandwidth in the same round, median and quartiles; "
            "share_of_best: the best round over "
            "the triad's best; ratio: a peer's time over ours; gb_per_s: of every round"
        ),
    )


if __name__ == "__main__":
    main()
