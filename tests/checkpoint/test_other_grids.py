"""Training that goes on on another grid, schedule or ZeRO setting is the training that it would
have been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import start
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import CheckpointError
from hybridpar.job import JobPlan
from hybridpar.train.engine import StepResult
from hybridpar.verify.oracle import Oracle

pytestmark = pytest.mark.ranks

# float64: sums in another order differ by some 1e-13, a wrong moment or version by 1e-5 or more
TOLERANCE = 1e-9
BATCH = 4
SAVED_AT = 3
STEPS = 6
BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 12,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 11,
        "seq_length": 8,
        "vocab_size": 37,
        "dropout": 0.1,
    },
    "optim": {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1},
    "train": {"num_steps": STEPS, "micro_batch_size": 1, "dtype": "fp64"},
}
BERT = {"kind": "bert", "num_kv_heads": 4}
FIVE = {"num_experts": 5, "router_bias_rate": 0.01}
EXPERTS = {"num_experts": 3, "moe_layers": "01", "router_bias_rate": 0.01}


def make(grid: dict[str, int], **sections: dict[str, Any]) -> Config:
    """Batches of 4 samples on any number of replicas."""
    grid = {"dp": 1} | grid
    config = from_mapping(
        BASE | {"parallel": grid, "pipeline": {"num_microbatches": BATCH // grid["dp"]}}
    )
    return from_mapping(sections, config)


def run(config: Config, root: Path, stop: int, dtype: str = "") -> list[StepResult]:
    """Trains from the last checkpoint to step `stop`, and saves."""
    engine, loader = start(config)
    steps: list[StepResult] = []
    done = checkpoint.resume(root, engine, "corpus", print)
    engine.train(loader, stop - done, steps.append)
    checkpoint.save(root, engine, "corpus")
    return steps


def on_grid(config: Config, root: Path, stop: int) -> list[StepResult]:
    parallel = config.parallel
    return run_ranks(run, parallel.num_ranks, config, root, stop)[0]


def close(steps: list[StepResult], expected: list[StepResult]) -> None:
    for a, b in zip(steps, expected, strict=True):
        assert a.step == b.step
        assert a.loss == pytest.approx(b.loss, rel=TOLERANCE)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=TOLERANCE)
        assert a.lr == b.lr


def weights_close(root: Path, expected: dict[str, Tensor]) -> None:
    _, weights = checkpoint.load_full(root / f"step_{STEPS:08d}")
    for name, tensor in expected.items():
        torch.testing.assert_close(
            weights[name], tensor, rtol=0, atol=TOLERANCE * float(tensor.abs().max())
        )


def moves(tmp_path: Path, before: Config, after: Config, expected: Config) -> None:
    """`before` to the middle, then `after`, against `expected` on one process without a stop."""
    steps = on_grid(before, tmp_path / "moved", SAVED_AT) + on_grid(
        after, tmp_path / "moved", STEPS
    )
    whole = run(
        replace(
            expected,
            parallel=replace(expected.parallel, tp=1, cp=1, pp=1, dp=1, ep=1, zero=0),
            pipeline=replace(expected.pipeline, num_microbatches=BATCH),
        ),
        tmp_path / "whole",
        STEPS,
    )
    close(steps, whole)
    weights_close(
        tmp_path / "moved", checkpoint.load_full(tmp_path / "whole" / f"step_{STEPS:08d}")[1]
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("before", "after", "sections"),
    [
        (
            {"pp": 3},
            {"tp": 2, "dp": 2, "zero": 1},
            {"optim": {"name": "sgd"}, "pipeline": {"schedule": "2bw"}},
        ),
        ({"tp": 3, "zero": 1}, {"pp": 2, "dp": 2, "zero": 1}, {"optim": {"name": "muon"}}),
        ({"pp": 2, "dp": 2, "zero": 1}, {"tp": 2}, {"optim": {"name": "lamb"}, "model": BERT}),
        (
            {"dp": 2, "zero": 1},
            {"tp": 2, "pp": 2},
            {"optim": {"staleness": "nesterov"}, "model": BERT},
        ),
        (
            {"tp": 2, "pp": 2},
            {"pp": 3},
            {"optim": {"staleness": "extrapolation"}, "pipeline": {"schedule": "2bw"}},
        ),
        (
            {"pp": 2, "dp": 2, "zero": 1},
            {"tp": 3},
            {"optim": {"staleness": "prediction", "name": "muon"}, "pipeline": {"schedule": "2bw"}},
        ),
        ({"tp": 3}, {"tp": 3, "zero": 1, "sequence": True}, {"model": BERT}),
        (
            {"dp": 2, "tp": 2, "zero": 1},
            {"pp": 3},
            {"model": EXPERTS, "optim": {"name": "muon"}, "pipeline": {"schedule": "2bw"}},
        ),
        ({"pp": 2}, {"dp": 2, "zero": 3}, {"model": EXPERTS}),
        ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 4, "zero": 1}, {"model": FIVE}),
        ({"dp": 4, "ep": 4}, {"tp": 2, "pp": 2}, {"model": FIVE, "optim": {"name": "muon"}}),
        (
            {"dp": 4, "ep": 2, "zero": 3},
            {"dp": 2, "ep": 2, "pp": 2},
            {"model": FIVE, "pipeline": {"schedule": "2bw"}},
        ),
        ({"tp": 2}, {"dp": 2, "ep": 2, "zero": 2}, {"model": FIVE}),
        ({"cp": 2, "dp": 2, "ep": 4, "zero": 1}, {"cp": 2, "ep": 2}, {"model": FIVE}),
        ({"dp": 2, "ep": 2}, {"cp": 3, "ep": 3}, {"model": FIVE, "pipeline": {"schedule": "2bw"}}),
        ({"cp": 2, "dp": 2, "zero": 1}, {"cp": 4}, {}),
        ({"cp": 2, "pp": 2}, {"cp": 2, "zero": 3}, {"pipeline": {"schedule": "2bw"}}),
    ],
    ids=str,
)
def test_another_grid(
    tmp_path: Path,
    before: dict[str, int],
    after: dict[str, int],
    sections: dict[str, dict[str, Any]],
) -> None:
    moves(tmp_path, make(before, **sections), make(after, **sections), make({}, **sections))


@pytest.mark.thorough
def test_two_versions_of_one_are_those_of_a_run_that_was_synchronous_till_then(
    tmp_path: Path,
) -> None:
    two: dict[str, Any] = {"schedule": "2bw"}
    moves(
        tmp_path,
        make({"pp": 2}),
        make({"tp": 2, "pp": 2}, pipeline=two),
        make({}, pipeline=two | {"sync_steps": SAVED_AT}),
    )


def test_one_version_of_two(tmp_path: Path) -> None:
    """Against the oracle, which is told what each batch runs on: the older version, then the
    newest."""
    two: dict[str, Any] = {"schedule": "2bw"}
    steps = on_grid(make({"pp": 2}, pipeline=two), tmp_path, SAVED_AT) + on_grid(
        make({"tp": 2}), tmp_path, STEPS
    )
    config = make({})
    oracle = Oracle(
        JobPlan(config),
        lambda block, batch, index: max(batch - 1, 0) if batch < SAVED_AT else batch,
        BATCH,
    )
    loader = SyntheticLoader(config.model, 1, BATCH)
    for batch, step in enumerate(steps):
        expected = oracle.step(batch, loader, 1)
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    weights_close(
        tmp_path, {n: t for n, t in oracle.history[-1].items() if not oracle._second_holder(n)}
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_a_single_stage_takes_over_any_schedule(tmp_path: Path, schedule: str) -> None:
    """On one stage pipedream has no old gradients, so the expected run is two-fold."""
    before = make({"pp": 2}, pipeline={"schedule": schedule})
    first = on_grid(before, tmp_path / "moved", SAVED_AT)
    assert len(first) == SAVED_AT
    copied = on_grid(make({"tp": 2}), tmp_path / "moved", STEPS)
    again = on_grid(before, tmp_path / "again", SAVED_AT)
    assert again == first
    close(copied, run(make({}), tmp_path / "again", STEPS))


def test_overflows_and_the_loss_scale_go_along(tmp_path: Path) -> None:
    """fp16, whose first batches overflow at this scale, also one that begins with the older
    version's after the move: every grid skips the same ones."""
    sections: dict[str, Any] = {"train": {"dtype": "fp16"}, "optim": {"loss_scale": 2.0**20}}
    two: dict[str, Any] = {"schedule": "2bw"}
    steps = on_grid(make({"pp": 2}, pipeline=two, **sections), tmp_path / "a", SAVED_AT)
    steps += on_grid(make({"tp": 2, "pp": 2}, pipeline=two, **sections), tmp_path / "a", STEPS)
    whole = run(make({}, pipeline=two, **sections), tmp_path / "b", STEPS)
    assert [s.skipped for s in steps] == [s.skipped for s in whole]
    assert [s.loss_scale for s in steps] == [s.loss_scale for s in whole]
    assert [s.skipped for s in steps[SAVED_AT:]] == [True, False, False]


def test_another_batch_size_is_refused(tmp_path: Path) -> None:
    run(make({}), tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"try pipeline\.num_microbatches = 4"):
        run(make({}, pipeline={"num_microbatches": 2}), tmp_path, 2)
