"""The oracle beyond plain training: predicted weights, skipped batches, rates that depend on the
delay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.job import JobPlan
from hybridpar.verify.oracle import Oracle
from hybridpar.verify.run import verify

M = 2


def make(**optim: Any) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 16,
                "num_heads": 2,
                "seq_length": 6,
                "vocab_size": 19,
            },
            "train": {"micro_batch_size": 1, "num_steps": 10},
            "pipeline": {"num_microbatches": M},
            "optim": {"lr": 1e-2, "weight_decay": 0.1, **optim},
            "parallel": {"dp": 1},
        }
    )


def delayed(block: int, batch: int, index: int) -> int:
    return max(batch - 1, 0)


def loader(config: Config) -> SyntheticLoader:
    return SyntheticLoader(config.model, 1, M, 0, 1, config.train.seed)


def test_prediction_runs_on_the_last_update_once_more_and_updates_the_weights_themselves() -> None:
    config = make(staleness="prediction")
    oracle = Oracle(JobPlan(config), delayed, M)
    plain = replace(config, optim=replace(config.optim, staleness="none"))
    for t in range(4):
        version = delayed(0, t, 0)
        at = oracle.history[version]
        before = oracle.history[max(version - 1, 0)]
        other = Oracle(JobPlan(plain), lambda *_: 0, M, [])
        other.history = [{n: 2 * at[n] - before[n] for n in at}]
        expected = other.step(t, loader(config), 1)
        step = oracle.step(t, loader(config), 1)
        assert step.loss == pytest.approx(expected.loss, rel=1e-12)
        for name, gradient in step.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-9, atol=1e-12)
    first = Oracle(JobPlan(plain), delayed, M)
    for t in range(2):  # before W(1) is used, prediction changes nothing
        first.step(t, loader(config), 1)
    for name, weight in first.history[2].items():
        assert torch.equal(weight, oracle.history[2][name])


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("staleness", ["none", "extrapolation", "prediction"])
def test_a_poisoned_batch_changes_nothing(staleness: str) -> None:
    """Neither weights nor the optimizer's state: the run goes on as if the batch had not been."""
    config = make(staleness=staleness)
    oracle = Oracle(JobPlan(config), lambda block, t, j: t, M, poisoned=frozenset([1]))
    oracle.step(0, loader(config), 1)
    skipped = oracle.step(1, loader(config), 1)
    assert math.isnan(skipped.grad_norm)
    assert all(torch.equal(w, oracle.history[1][n]) for n, w in skipped.weights.items())
    assert all(g.isnan().all() for g in skipped.gradients.values())
    assert oracle.rule.steps == 1 if staleness != "extrapolation" else oracle.rule.rule.steps == 1
    again = oracle.step(2, loader(config), 1)
    assert math.isfinite(again.grad_norm)
    assert math.isfinite(again.loss)


def test_nothing_is_predicted_after_a_skipped_update() -> None:
    config = make(staleness="prediction")
    losses = []
    for poisoned in ({0}, {0, 1}):
        oracle = Oracle(JobPlan(config), lambda block, t, j: t, M, poisoned=frozenset(poisoned))
        losses.append([oracle.step(t, loader(config), 1).loss for t in range(3)])
    fresh = Oracle(JobPlan(make()), lambda block, t, j: 0, M)
    assert losses[1] == [fresh.step(t, loader(config), 1).loss for t in range(3)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]


def test_the_rate_depends_on_the_delay() -> None:
    config = make(
        name="sgd",
        momentum=0.0,
        weight_decay=0.0,
        staleness="lr_rescale",
        decay="constant",
        clip_grad=0.0,
    )
    oracle = Oracle(JobPlan(config), delayed, M, delay=lambda batch: 1.0)
    step = oracle.step(0, loader(config), 1)
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(
            step.weights[name], oracle.history[0][name] - 0.005 * gradient, rtol=1e-12, atol=0.0
        )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_tied_weights_stay_one_where_stages_have_gradients_of_different_age(zero: int) -> None:
    config = from_mapping(
        {"pipeline": {"schedule": "pipedream"}, "parallel": {"zero": zero}},
        make(staleness="lr_rescale"),
    )
    report = verify(config, {"pp": 3}, 4)
    assert report.ok, report.first_divergence


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "model"),
    [
        ({"tp": 2, "pp": 2}, {}),
        (
            {"tp": 3},
            {"num_heads": 6, "num_kv_heads": 3, "activation": "swiglu", "ffn_hidden_size": 50},
        ),
        (
            {"tp": 4},
            {"num_heads": 6, "num_kv_heads": 2, "activation": "swiglu", "ffn_hidden_size": 50},
        ),
        ({"tp": 2, "dp": 2}, {"kind": "bert", "num_heads": 3}),
    ],
    ids=["tp2-pp2", "tp3", "tp4-shared", "bert-tp2-dp2"],
)
@pytest.mark.parametrize("staleness", ["none", "nesterov", "extrapolation"])
def test_muon_on_grids(grid: dict[str, int], model: dict[str, Any], staleness: str) -> None:
    config = from_mapping(
        {
            "model": {"hidden_size": 48, "num_heads": 6, **model},
            "pipeline": {"schedule": "2bw" if "pp" in grid else "1f1b"},
        },
        make(name="muon", staleness=staleness),
    )
    report = verify(config, grid, 4)
    assert report.ok, report.first_divergence
