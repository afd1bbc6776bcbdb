"""Sums over replicas beside a replay, on a GPU that two ranks share over NCCL: each waits for its
gradients.

A kernel that sleeps stands in the captured backward before each gradient of a weight. A sum that
did not wait for the event would read the gradient of the batch before, which neither a tolerance
nor equal replicas would forgive.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.state.audit import audit_replicas
from hybridpar.state.layout import FlatLayout
from hybridpar.train.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

CYCLES = 2_000_000
"""Cycles of the sleep: about a millisecond, and a sum of the tiny gradients takes some 20
microseconds to begin."""
BATCHES = 8
MICROBATCHES = 3
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL's settings for ranks on one machine that talk as if they were on several."""


class _Sleep(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        return dy


def replicas(cuda_graphs: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """Train on two replicas; return losses and norms, the gradients of all batches, and how many
    were replayed."""
    os.environ.update(APART, NCCL_HOSTID=f"host{dist.get_rank()}")
    config = from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "num_heads": 4,
                "seq_length": 24,
                "vocab_size": 61,
            },
            "parallel": {"dp": 2, "zero": 1},
            "pipeline": {"num_microbatches": MICROBATCHES},
            "train": {
                "micro_batch_size": 2,
                "num_steps": 20,
                "dtype": "bf16",
                "cuda_graphs": cuda_graphs,
            },
            "optim": {"lr": 1e-2},
            "kernels": {"attention": "triton"},
        }
    )
    grid = ProcessGrid(dp=2, device_type="cuda")
    buckets = FlatLayout.buckets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FlatLayout, "buckets", lambda self, num_bytes, *group: buckets(self, 2**14, *group)
        )
        engine = Engine(JobPlan(config), grid, torch.device("cuda:0"))
    for block in engine.stage.blocks.values():
        block.register_forward_hook(
            lambda block, args, out: _Sleep.apply(out) if isinstance(out, Tensor) else out
        )
    steps: list[tuple[float, float]] = []
    gradients: dict[str, Tensor] = {}

    def keep(batch: int, found: dict[str, Tensor]) -> None:
        gradients.update({f"{batch}.{name}": gradient.cpu() for name, gradient in found.items()})

    loader = SyntheticLoader(config.model, 2, MICROBATCHES, grid.dp.rank, 2)
    engine.train(loader, BATCHES, lambda step: steps.append((step.loss, step.grad_norm)), keep)
    assert audit_replicas(engine.state.weights.full_weights(), grid.dp) is None
    graphs = engine.executor.graphs
    assert graphs is None or engine.state.reducer.summed_beside, (
        "no sum begins before a backward is over"
    )
    return steps, gradients, graphs.num_replayed if graphs else 0


def test_no_sum_beside_a_replay_begins_before_its_gradient_is_final() -> None:
    """To the bit as without graphs: kernels without atomics, and NCCL's sum of two is the same in
    any order."""
    plain, replayed = (
        run_ranks(replicas, 2, on, backend="nccl", start="spawn", timeout_s=120)
        for on in (False, True)
    )
    for (expected, of_plain, _), (steps, gradients, num_replayed) in zip(
        plain, replayed, strict=True
    ):
        assert num_replayed == BATCHES * MICROBATCHES - 2  # the first of each kind
        assert steps == expected
        for name, gradient in of_plain.items():
            assert torch.equal(gradients[name], gradient), name
