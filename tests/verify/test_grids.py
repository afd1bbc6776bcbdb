"""Every grid is the same training run: loss, gradients, norm and weights equal the single-process
oracle in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import gpt

from hybridpar.config import Config, from_mapping
from hybridpar.verify.run import TOLERANCE, compare, run_grid, verify

pytestmark = pytest.mark.ranks

BERT = {"kind": "bert", "vocab_size": 67, "sentence_head": "nsp"}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}
LLAMA = {
    "num_kv_heads": 3,
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "ffn_hidden_size": 50,
    "bias": False,
    "tie_embeddings": False,
}
NEOX = {
    "position": "rotary",
    "rotary_fraction": 0.5,
    "parallel_residual": True,
    "activation": "gelu_exact",
}
SCHEDULES = ("naive", "gpipe", "1f1b", "2bw", "pipedream")


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A small model with odd sizes: 6 heads of 8, vocabulary 61, 3 layers."""
    own = {
        "model": model or {},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((3, 48, 6, 14, 61), own, sections)


def holds(grid: dict[str, int], config: Config, num_batches: int = 3) -> None:
    report = verify(config, grid, num_batches)
    assert report.ok, report.first_divergence
    assert set(report.worst) == {"init", "loss", "grad_norm", "gradient", "weight"}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "model",
    [{}, {"tie_embeddings": False}, BERT, {**BERT, "tie_embeddings": False}],
    ids=["gpt", "gpt-untied", "bert", "bert-untied"],
)
@pytest.mark.parametrize(
    "grid",
    [
        {"tp": 3},
        {"tp": 4},
        {"pp": 2},
        {"pp": 4},
        {"dp": 3},
        {"tp": 2, "pp": 2, "dp": 2},
    ],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
def test_models_on_grids(grid: dict[str, int], model: dict[str, Any]) -> None:
    holds(grid, make(model), num_batches=2)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "grid", [{"pp": 3}, {"tp": 2, "pp": 2, "dp": 2}, {"pp": 4}], ids=["pp3", "2x2x2", "pp4"]
)
def test_schedules(schedule: str, grid: dict[str, int]) -> None:
    """2bw against the delayed-gradient oracle, pipedream against stage-by-stage versions; dropout
    on."""
    holds(grid, make(DROPOUT, pipeline={"schedule": schedule}), num_batches=4)


def test_uneven_heads_groups_features_and_vocabulary() -> None:
    """6 query heads in 3 groups, 50 ffn features, 61 words: nothing divides; beyond tp 3 ranks
    share keys, values."""
    holds({"tp": 6}, make(LLAMA), num_batches=2)


@pytest.mark.thorough
def test_uneven_groups_with_everything_else() -> None:
    holds({"tp": 4, "pp": 2}, make(LLAMA, pipeline={"schedule": "2bw", "recompute": "all"}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "grid",
    [{"tp": 3}, {"tp": 4, "pp": 2}, {"pp": 3, "dp": 2}],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_parallel_residuals_and_partial_rotary_positions(
    grid: dict[str, int], recompute: str
) -> None:
    holds(grid, make({**NEOX, **DROPOUT}, pipeline={"schedule": "2bw", "recompute": recompute}))


@pytest.mark.thorough
def test_a_position_table_that_is_longer_than_sequences() -> None:
    config = make({**BERT, "max_positions": 23})
    holds({"tp": 2, "pp": 2}, config)
    on_grid = from_mapping(
        {"parallel": {"tp": 2, "pp": 2, "dp": 1}, "train": {"dtype": "fp64"}}, config
    )
    gradient = run_grid(on_grid, 1).gradients[0]["blocks.0.positions.weight"]
    assert gradient.shape == (23, 48)
    assert gradient[:14].any(1).all()
    assert not gradient[14:].any()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("split", [(4, 1), (1, 1, 1, 1, 1)], ids=str)
def test_uneven_layer_splits(split: tuple[int, ...]) -> None:
    """Down to a stage that holds just the embedding, or just the head."""
    holds(
        {"pp": len(split)},
        make(pipeline={"split": split, "num_microbatches": 6, "schedule": "2bw"}),
    )


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("recompute", ["all", "0,2", "stage", "stage:0", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
def test_recomputation_uses_the_version_of_the_forward(schedule: str, recompute: str) -> None:
    holds({"pp": 2}, make(DROPOUT, pipeline={"schedule": schedule, "recompute": recompute}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("m", [1, 7])
def test_gradient_accumulation(m: int) -> None:
    holds({"dp": 2}, make(BERT, pipeline={"num_microbatches": m}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("schedule", "m"), [("pipedream", 1), ("gpipe", 2), ("1f1b", 1)])
def test_fewer_microbatches_than_stages(schedule: str, m: int) -> None:
    holds({"pp": 4}, make(pipeline={"schedule": schedule, "num_microbatches": m}))


@pytest.mark.thorough
def test_no_clipping() -> None:
    """pipedream then never waits for another stage's norm, and reports it later."""
    holds(
        {"pp": 3}, make(pipeline={"schedule": "pipedream"}, optim={"clip_grad": 0.0}), num_batches=4
    )


def test_init_is_equal_to_the_bit_on_all_grids() -> None:
    config = make(LLAMA)
    runs = {}
    for grid in (
        {"tp": 1, "pp": 1, "dp": 1},
        {"tp": 4, "pp": 1, "dp": 1},
        {"tp": 2, "pp": 3, "dp": 1},
    ):
        on_grid = from_mapping({"parallel": grid, "train": {"dtype": "fp64"}}, config)
        runs[tuple(grid.values())] = run_grid(on_grid, 1).initial
    first, *others = runs.values()
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_wrong_gradient_is_found_and_named() -> None:
    """The check itself must be able to fail."""
    config = from_mapping({"parallel": {"dp": 1}, "train": {"dtype": "fp64"}}, make())
    run = run_grid(config, 2)
    run.gradients[1]["blocks.2.mlp.up.weight"][3, 5] += 1e-6
    report = compare(config, run, 2)
    assert not report.ok
    assert report.first_divergence.name == "blocks.2.mlp.up.weight"
    assert report.first_divergence.batch == 1
    assert report.worst["gradient"].error > TOLERANCE
