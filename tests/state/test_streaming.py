"""Streaming batch PCA: the numbers of one process that has the factors of all replicas, and state equal on all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from state.test_compression import SKIPPED, Skips, build, loader, make, resume, save
from torch import Tensor

from hybridpar import random
from hybridpar.config import Config
from hybridpar.nn.placement import split_ranges
from hybridpar.state import find_divergence
from hybridpar.state.compression.streaming import Tracked, basis

PCA = {"gradients": "sbpca", "gradients_rank": 3, "gradients_blocks": 3, "gradients_smallest": 100}
Factors = list[tuple[Tensor, Tensor]]
Estimate = tuple[Tensor, Tensor, Tensor]
"""X, D and s."""


@dataclass
class Ran:
    """What one rank has seen of every batch, by parameter, and its state before each, and at the end."""

    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: list[dict[str, Factors]] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    learned: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: Any = None
    traffic: int = 0
    diverged: str = ""


def run(config: Config, steps: int, skips: bool = False) -> Ran:
    engine = build(config, Skips(config) if skips else None)
    state, compression, ran = engine.state, engine.state.compression, Ran()
    assert compression is not None
    ran.axes = {name: state.partition.axis_of(name).ranks for name in compression.packed}
    start: Any = compression.start

    def note(bucket: Any, flat: Tensor) -> Any:
        batch = compression._batch
        if len(ran.parts) == batch:
            ran.parts.append({})
            ran.learned.append({key: x.clone() for key, x in compression.feedback.learned.items()})
        there = state.gradients.parts(state.gradients.buffer_index(batch))
        ran.parts[-1] |= {name: [(part.dy.double(), part.x.double()) for part in there[name]]
                          for name in bucket.names if name in compression.packed}
        return start(bucket, flat)

    compression.start = note  # type: ignore[method-assign]
    before = engine.grid.dp.traffic.num_bytes["broadcast"]
    engine.train(loader(engine), steps, lambda step: ran.losses.append(step.loss),
                 lambda batch, gradients: ran.sums.append({name: x.clone() for name, x in gradients.items()}))
    ran.traffic = engine.grid.dp.traffic.num_bytes["broadcast"] - before
    ran.learned.append({key: x.clone() for key, x in compression.feedback.learned.items()})
    ran.sent, ran.diverged = compression.sent, find_divergence(state.placed(), engine.grid)
    return ran


def of(learned: dict[str, Tensor], name: str) -> Estimate:
    x, d, s = (learned[f"{name}.{what}"].double() for what in ("basis_in", "basis_out", "scale"))
    return x, d, s


def orthonormal(x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x)
    return q @ torch.diag(torch.sign(torch.diag(r)))


def oracle(replicas: list[Factors], before: Estimate, num_blocks: int) -> tuple[Tensor, Estimate]:
    """The sum that is taken for that of a batch, and what is learned from it; of gradients that are whole."""
    (x, d, s), more = before, int(before[2].any())
    for i, (a, b) in enumerate(split_ranges(len(replicas[0]), num_blocks), start=more):
        g = sum(dy.t() @ rows for own in replicas for dy, rows in own[a:b])
        if i == 0:
            m, k = d.shape
            d = orthonormal(random.normal(0, random.site(f"sbpca {m} {k}"), rows=m, cols=k, stride=k, start=0,
                                          dtype=torch.float64))
            x = orthonormal(g.t() @ d)
            d = orthonormal(g @ x)
        else:
            x = orthonormal(i * x + g.t() @ d / s)
            d = orthonormal(i * d + g @ x / s)
        s = (i * s + torch.diag(d.t() @ g @ x)) / (i + 1)
    return num_blocks * d @ torch.diag(s) @ x.t(), (x, d, s)


DEEP = {"model": {"num_layers": 4, "hidden_size": 24, "num_heads": 3, "seq_length": 8, "vocab_size": 31}}
FP64 = {"train": {"dtype": "fp64"}}
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "2bw, three replicas, a step is skipped": ({"dp": 3}, "2bw", FP64),
    "1f1b, tp": ({"dp": 2, "tp": 2}, "1f1b", FP64),
    "2bw, split backward, bf16": (
        {"dp": 2, "pp": 2}, "2bw", {"pipeline": {"split_backward": True}, "train": {"dtype": "bf16"}}),
    "interleaved, ZeRO-1": ({"dp": 2, "pp": 2, "zero": 1}, "interleaved", DEEP | FP64),
    "pipedream": ({"dp": 2, "pp": 2}, "pipedream", {"optim": {"clip_grad": 0.0}} | FP64)}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_one_process_with_all_factors(case: str) -> None:
    parallel, schedule, more = CASES[case]
    config, skips = make(PCA, parallel, schedule, **more), "skipped" in case
    ran = run_ranks(run, config.parallel.num_ranks, config, 4, skips)
    assert {one.diverged for one in ran} == {""}
    exact = {"rtol": 1e-9, "atol": 1e-11} if config.train.dtype == "fp64" else {"rtol": 1e-3, "atol": 1e-4}
    for name, ranks in {name: of for one in ran for name, of in one.axes.items()}.items():
        group = [ran[rank] for rank in ranks]
        for batch in range(4):
            before = of(group[0].learned[batch], name)
            total, after = oracle([one.parts[batch][name] for one in group], before, 3)
            for one in group:
                torch.testing.assert_close(one.sums[batch][name].double(), total, **exact)
            wanted = before if skips and batch == SKIPPED else after
            for tensor, expected in zip(of(group[0].learned[batch + 1], name), wanted, strict=True):
                torch.testing.assert_close(tensor, expected, **exact)
    assert sum(len(one.axes) for one in ran) >= 4 * config.model.num_layers
