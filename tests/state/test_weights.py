"""Costs of two versions of the weights, by the allocator: one copy of them and one gradient buffer,
and no switch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import Config, OptimConfig, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.optim import ParameterSlot, build_optimizer
from hybridpar.prediction import measure
from hybridpar.runtime.stage import Stage
from hybridpar.state.parameters import StageParameters
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.partition import Partition, Route
from hybridpar.state.residency.chunks import Memory
from hybridpar.state.residency.uses import uses_of
from hybridpar.state.weights import WeightStore
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")
NUMBERS = 100  # bytes: 0-d tensors, such as the optimizer's step count


def make(schedule: str, dtype: str, pp: int = 1, **pipeline: Any) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 4,
                "hidden_size": 64,
                "num_heads": 4,
                "seq_length": 32,
                "vocab_size": 500,
            },
            "parallel": {"pp": pp, "dp": 1},
            "train": {"micro_batch_size": 2, "dtype": dtype},
            "pipeline": {"schedule": schedule, "num_microbatches": 4, **pipeline},
        }
    )


def static_bytes(config: Config) -> tuple[int, int, int, int]:
    """Bytes that this rank's allocator has handed out and not got back when the pipeline is
    drained; and, from the engine's own buffers, bytes of a working copy and of a gradient buffer,
    and how many of the latter there are."""
    with measure(CPU) as meter:
        engine = Engine(JobPlan(config), ProcessGrid(pp=config.parallel.pp), CPU)
        engine.train(SyntheticLoader(config.model, 2, 4), 3, lambda step: None)
        engine.executor.losses.clear()
        current = meter.read().current
    gradients = engine.state.gradients.buffers
    return current, engine.state.weights.buffers[0].nbytes, gradients[0].nbytes, len(gradients)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gradient_buffers", [0, 1])
def test_2bw_costs_one_copy_and_one_gradient_buffer_over_1f1b(
    dtype: str, pp: int, gradient_buffers: int
) -> None:
    """pipeline.gradient_buffers: 0 takes the two that 2bw can use; with 1, only the copy is
    left."""
    flush = run_ranks(static_bytes, pp, make("1f1b", dtype, pp))
    double = run_ranks(static_bytes, pp, make("2bw", dtype, pp, gradient_buffers=gradient_buffers))
    for (before, copy, gradient, one), (after, _, _, num_buffers) in zip(
        flush, double, strict=True
    ):
        assert one == 1
        assert num_buffers == (gradient_buffers or 2)
        assert after - before == pytest.approx(copy + (num_buffers - 1) * gradient, abs=NUMBERS)


def make_store(
    dtype: torch.dtype, parts: Sequence[range] = (), *, predict: bool = False
) -> WeightStore:
    model = make("2bw", "fp32").model
    parameters = StageParameters(
        Stage(build_blocks(model, Axis("tp"), range(6), dtype=dtype)), dtype
    )
    uses = uses_of(parts, parameters.placements, parameters.blocks, elementwise=True)
    routes = dict.fromkeys(parameters.layout.names, Route(Axis("dp")))
    alone = Partition(parameters.layout, routes, uses=uses)
    frozen = Partition(parameters.frozen, {})
    optim = OptimConfig(staleness="prediction" if predict else "none")
    policy = StatePolicy(Config(optim=optim), 2, 1)
    return WeightStore(parameters, alone, frozen, policy, Memory(CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_store_takes_two_copies_and_a_master_in_low_precision(dtype: torch.dtype) -> None:
    with measure(CPU) as meter:
        store = make_store(dtype)
        n = store.layout.numel
        assert meter.read().current == n * (2 * dtype.itemsize + (4 if dtype.itemsize == 2 else 0))
        assert meter.read().peak == meter.read().current


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_switching_versions_takes_no_memory(dtype: torch.dtype) -> None:
    store = make_store(dtype)
    with measure(CPU) as meter:
        for version in (0, 1, 0, 1):
            store.newest = 1
            store.bind(version)
        assert meter.read().peak == 0, "pointers only"
        places = [(table[key], store.leaves_of(1)[name]) for table, key, name in store.places]
        assert all(bound is leaf for bound, leaf in places)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_making_a_version_takes_no_memory(dtype: torch.dtype, optim: str) -> None:
    """The new version is written over the one before the last; fused optimizers need nothing in
    between."""
    store = make_store(dtype)
    slots = [ParameterSlot(name, placement) for name, placement in store.placements.items()]
    optimizer = build_optimizer(from_mapping({"optim": {"name": optim}}).optim, slots, Axis("tp"))
    optimizer.allocate(CPU, store.master_dtype)
    gradients = list(store.layout.views(store.layout.zeros(CPU)).values())
    with measure(CPU) as meter:
        for _ in range(3):
            store.advance(
                lambda parameters: optimizer.step(parameters, gradients, lr=0.1, gradient_scale=0.5)
            )
        store.advance(None)
        assert meter.read().peak <= NUMBERS
    assert store.newest == 4


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_in_chunks_has_the_same_bits(dtype: torch.dtype, predict: bool) -> None:
    """Started, updated, left as it is, and read. The tied weight is a chunk of its own."""
    whole, parts = (
        make_store(dtype, cut, predict=predict)
        for cut in ((), (range(2), range(2, 3), range(3, 6)))
    )
    assert [len(store.buffers[0].chunks) for store in (whole, parts)] == [1, 4]
    one, other = used(whole, 1), used(parts, 3)
    assert all(torch.equal(one[name], other[name]) for name in one)


def used(store: WeightStore, num_groups: int) -> dict[str, torch.Tensor]:
    """All that there is to read after three updates, of which one is skipped."""
    store.fill(
        lambda tensors: initialize([(n, t, store.placements[n]) for n, t in tensors.items()], 3, 0)
    )
    gradients = store.layout.views(store.layout.zeros(CPU).fill_(0.01))
    groups = [
        {name: p for name, p in store.placements.items() if store.group_of(name) == g}
        for g in range(num_groups)
    ]
    optimizers = [
        build_optimizer(OptimConfig(), [ParameterSlot(*of) for of in group.items()], Axis("tp"))
        for group in groups
    ]
    for skip in (False, True, False):
        for number, (group, optimizer) in enumerate(zip(groups, optimizers, strict=True)):
            mine = [gradients[name].clone() for name in group]
            store.advance(
                None if skip else partial(optimizer.step, gradients=mine, lr=0.1), group=number
            )
    with store.unpredicted():
        seen = {
            f"unpredicted {name}": leaf.detach().clone()
            for name, leaf in store.leaves_of(3).items()
        }
    seen |= {
        f"{v} {name}": leaf.detach() for v in (2, 3) for name, leaf in store.leaves_of(v).items()
    }
    return seen | {f"full {name}": tensor for name, tensor in store.full_weights().items()}
