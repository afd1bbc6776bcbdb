"""Replicas that share the experts of each layer equal one process: 6 experts over 1 to 4 ranks, in
any split, with every other kind of parallelism."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from custom_models import CustomExperts, ExpertsOfOwnSamples
from engines import start
from ranks import run_ranks
from verify.test_experts import BERT, DEEPSEEK, GELU, holds, make, named

from hybridpar.config import Config
from hybridpar.verify.run import Disturbance, run_grid, verify

pytestmark = pytest.mark.ranks

SIX = {"num_experts": 6}
MOST_RANKS = 16
GRIDS = [
    {"ep": ep, "tp": tp, "pp": pp, "cp": cp, "dp": ep // math.gcd(ep, cp)}
    for ep, tp, pp, cp in product((2, 3, 4), (1, 2), (1, 2), (1, 2))
    if ep // math.gcd(ep, cp) * cp * tp * pp <= MOST_RANKS
]
"""2, 3 and 4 ranks of ep beside two ranks of other axes, or one, with as few replicas as there can
be."""


def six(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return make(SIX | (model or {}), **sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "model", [{}, DEEPSEEK, GELU, BERT], ids=["mixtral", "seek", "gelu", "bert"]
)
@pytest.mark.parametrize(
    "grid",
    [
        {"dp": 4, "ep": 4},
        {"dp": 3, "ep": 3},
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 2},
        {"dp": 2, "ep": 2, "tp": 2},
        {"dp": 2, "ep": 2, "pp": 2},
        {"dp": 4, "ep": 2, "tp": 2, "pp": 2},
        {"dp": 4, "ep": 1},
    ],
    ids=named,
)
def test_grids(grid: dict[str, int], model: dict[str, Any], zero: int) -> None:
    """Over 4 ranks the experts are 2, 2, 1, 1."""
    holds(grid, six(model, parallel={"zero": zero}), num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize("grid", GRIDS, ids=named)
def test_every_axis_beside_every_split(grid: dict[str, int]) -> None:
    holds(grid, six(DEEPSEEK, parallel={"zero": 1}), num_batches=2)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("packing", ["none", "stream", "best_fit"])
@pytest.mark.parametrize(
    "grid",
    [
        {"cp": 2, "dp": 2, "ep": 4},
        {"cp": 3},
        {"cp": 2, "ep": 2},
        {"cp": 4, "ep": 2},
        {"cp": 2, "dp": 3, "ep": 3},
        {"cp": 4, "ep": 4, "tp": 2},
        {"cp": 2, "dp": 2, "ep": 2, "tp": 2, "pp": 2},
        {"cp": 2, "dp": 2, "ep": 4, "pp": 2},
    ],
    ids=named,
)
@pytest.mark.parametrize(
    "parallel",
    [{}, {"sequence": True}, {"zero": 1, "cp_comm": "ring"}, {"zero": 3}],
    ids=["plain", "sequence", "ring", "zero 3"],
)
@pytest.mark.parametrize("model", [{}, DEEPSEEK], ids=["mixtral", "seek"])
def test_context_parallelism(
    model: dict[str, Any], parallel: dict[str, Any], grid: dict[str, int], packing: str
) -> None:
    """Loads of a sequence are summed over cp, and ranks of cp share experts first."""
    config = six(model, parallel=parallel, data={"packing": packing})
    holds(grid, config, num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "2bw", "recompute": "all"},
        {"schedule": "1f1b", "split_backward": True, "recompute": "selective"},
        {"schedule": "interleaved", "split": (1, 1, 2, 1), "recompute": "stage"},
        {"schedule": "pipedream"},
    ],
    ids=str,
)
def test_context_parallelism_on_schedules(pipeline: dict[str, Any]) -> None:
    holds({"cp": 2, "pp": 2, "ep": 2}, six(DEEPSEEK, pipeline=pipeline), num_batches=3)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("recompute", ["none", "all", "selective", "stage"])
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "naive"},
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "split_backward": True},
        {"schedule": "2bw"},
        {"schedule": "2bw", "split_backward": True},
        {"schedule": "pipedream"},
        {"schedule": "interleaved", "split": (1, 1, 2, 1)},
        {"schedule": "1f1b", "stage_layout": "v", "split_backward": True},
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_schedules(pipeline: dict[str, Any], recompute: str) -> None:
    config = six(DEEPSEEK, pipeline={**pipeline, "recompute": recompute})
    holds({"pp": 2, "dp": 2, "ep": 2}, config, num_batches=4)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "optim",
    [{"name": "muon"}, {"name": "lamb"}, {"name": "sgd", "momentum": 0.9}, {"clip_grad": 0.01}],
    ids=str,
)
def test_optimizers(optim: dict[str, Any], zero: int) -> None:
    """The norm counts every expert once, whichever rank holds it."""
    config = six(DEEPSEEK, optim=optim, parallel={"zero": zero})
    holds({"tp": 2, "dp": 4, "ep": 2}, config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "grid",
    [{"dp": 2, "ep": 2}, {"tp": 3}, {"pp": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}],
    ids=named,
)
@pytest.mark.parametrize("model", [CustomExperts(), ExpertsOfOwnSamples()], ids=["text", "own"])
def test_a_custom_model_that_describes_its_experts(
    model: CustomExperts, grid: dict[str, int]
) -> None:
    """Its router has a balance loss, which counts the tokens of all ranks of cp."""
    holds(grid, replace(six(), model=model), num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("sequence", [False, True])
def test_packed_documents(packing: str, sequence: bool) -> None:
    config = six(data={"packing": packing}, parallel={"sequence": sequence})
    holds({"tp": 2, "dp": 3, "ep": 3}, config, num_batches=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "memory",
    [
        {"budget": 1_300_000},
        {"limit": 3_000_000},
        {"host_optimizer": True},
        {"offload_activations": 1},
    ],
    ids=str,
)
def test_memory_that_leaves_the_device(memory: dict[str, Any]) -> None:
    holds({"dp": 2, "cp": 2, "ep": 4}, six(DEEPSEEK, memory=memory), num_batches=2)


@pytest.mark.thorough
def test_compressed_messages() -> None:
    pipeline = {"schedule": "2bw"}
    config = six(DEEPSEEK, compression={"messages": "int8"}, pipeline=pipeline)
    holds({"pp": 2, "dp": 2, "ep": 2}, config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compression",
    [{"gradients": "dct", "gradients_kept": 1.0}, {"gradients": "powersgd", "gradients_rank": 64}],
    ids=lambda c: c["gradients"],
)
def test_gradients_that_a_method_sends_in_full(compression: dict[str, Any]) -> None:
    """Every element, or factors of full rank: over two replicas of each expert, and four of
    everything else, up to rounding in float32."""

    def steps(**section: Any) -> list[tuple[float, float]]:
        config = six(
            DEEPSEEK | {"router_bias_rate": 0.0},
            parallel={"dp": 4, "ep": 2},
            compression=section,
        )
        found = run_ranks(losses_of, 4, config)
        assert all(one == found[0] for one in found)
        return found[0]

    got = steps(**compression, gradients_smallest=1)
    for one, expected in zip(got, steps(), strict=True):
        assert one == pytest.approx(expected, rel=1e-4)


def losses_of(config: Config) -> list[tuple[float, float]]:
    engine, loader = start(config)
    found: list[tuple[float, float]] = []
    engine.train(loader, 4, lambda step: found.append((step.loss, step.grad_norm)))
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("load", [1.0, 1.4])
@pytest.mark.parametrize(
    "pipeline",
    [{}, {"schedule": "2bw", "recompute": "all"}, {"split_backward": True}],
    ids=["plain", "recomputed", "split"],
)
@pytest.mark.parametrize(
    "grid",
    [
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 4},
        {"cp": 2, "dp": 2, "ep": 4},
        {"dp": 2, "ep": 2, "pp": 2},
    ],
    ids=named,
)
def test_rows_beyond_a_bound(grid: dict[str, int], pipeline: dict[str, Any], load: float) -> None:
    """Routing is never balanced, so at 1.0 some rank always has a second round."""
    config = six(DEEPSEEK, memory={"expert_load": load}, pipeline=pipeline)
    holds(grid, config, num_batches=3)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_skipped_batches_and_a_restart(schedule: str, zero: int) -> None:
    """A batch with NaN leaves weights and biases; a checkpoint of all experts is read again."""
    config = six(DEEPSEEK, pipeline={"schedule": schedule}, parallel={"zero": zero})
    disturbance = Disturbance(frozenset({1}), resume_at=2)
    report = verify(config, {"dp": 4, "ep": 2}, 4, disturbance)
    assert report.ok, report.first_divergence


def test_every_rank_holds_its_experts_and_sends_rows_alone() -> None:
    """Bytes of a micro-batch: loads; rows out and back, forward and backward. Rows that a rank
    sends itself are counted with the others."""
    config = six({"num_layers": 2}, train={"dtype": "fp64"}, parallel={"dp": 4, "ep": 4})
    found = run_ranks(held_and_sent, 4, config)
    assert [sorted(held) for held, _, _ in found] == [[0, 1], [2, 3], [4], [5]]
    tokens = 14 * 2
    rows = 8 * 48 * tokens * 2
    for _, calls, num_bytes in found:
        assert calls == 2 * 3 * 5
        assert sum(one[2] for one in found) == 4 * 2 * 3 * (8 * 6 + 4 * rows)
        assert num_bytes > 2 * 3 * (8 * 6 + 2 * rows)


def held_and_sent(config: Config) -> tuple[set[int], int, int]:
    engine, loader = start(config)
    engine.train(loader, 1, lambda step: None)
    traffic = engine.grid.experts.traffic
    names = [name.split(".") for name in engine.state.placements if ".experts." in name]
    held = {int(parts[4]) for parts in names}
    return held, traffic.calls["all_to_all"], traffic.num_bytes["all_to_all"]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "grid",
    [
        {"dp": 1, "cp": 2, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 2},
        {"dp": 2, "pp": 2},
        {"dp": 2, "cp": 2, "ep": 4},
    ],
    ids=named,
)
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_loads_are_equal_on_every_grid(grid: dict[str, int], recompute: str) -> None:
    """Every token of 12 samples that counts is on two experts in each of 3 layers, once."""
    model = {"router_bias_rate": 0.0}

    def loads(**parallel: int) -> list[Any]:
        train = {"dtype": "fp64", "micro_batch_size": 6 // parallel["dp"]}
        pipeline = {"num_microbatches": 2, "recompute": recompute}
        config = six(model, train=train, pipeline=pipeline, parallel=parallel)
        num_ranks = config.parallel.num_ranks
        return run_ranks(loads_of, num_ranks, config) if num_ranks > 1 else [loads_of(config)]

    (expected,) = loads(dp=1)
    assert [list(of_step) for of_step in expected] == [[1, 2, 3]] * 2
    assert len({sum(load) for of_step in expected for load in of_step.values()}) == 2
    assert all(found == expected for found in loads(**grid))


def loads_of(config: Config) -> list[Any]:
    engine, loader = start(config)
    found: list[Any] = []
    engine.train(loader, 2, lambda step: found.append(step.loads))
    return found


@pytest.mark.thorough
def test_biases_are_equal_on_every_grid() -> None:
    def biases(**parallel: int) -> list[torch.Tensor]:
        dp = parallel["dp"]
        config = six(train={"dtype": "fp64", "micro_batch_size": 12 // dp}, parallel=parallel)
        weights = run_grid(config, 3).weights[-1]
        return [tensor for name, tensor in weights.items() if name.endswith("mlp.bias")]

    expected = biases(dp=1)
    assert len(expected) == 3
    assert all(bias.any() for bias in expected)
    for grid in (
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 4},
        {"dp": 2, "ep": 2, "tp": 2},
        {"cp": 2, "dp": 1, "ep": 2},
        {"cp": 3, "dp": 2, "ep": 6},
    ):
        assert all(map(torch.equal, biases(**grid), expected))
