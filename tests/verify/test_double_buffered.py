"""2bw with all that it must be exact with: against the delayed-gradient oracle in float64."""

from __future__ import annotations

from typing import Any

import pytest
from verify.test_grids import BERT, DROPOUT, LLAMA, make

from hybridpar.config import Config
from hybridpar.verify.run import CALM, Disturbance, verify

pytestmark = pytest.mark.ranks

RESUMED = Disturbance(resume_at=2)
ZERO: dict[str, Any] = {"zero": 1}


def config(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    pipeline = {"schedule": "2bw", **sections.pop("pipeline", {})}
    return make(model, pipeline=pipeline, **sections)


def holds(
    grid: dict[str, int], on: Config, disturbance: Disturbance = CALM, num_batches: int = 4
) -> None:
    report = verify(on, grid, num_batches, disturbance)
    assert report.ok, report.first_divergence


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "disturbance", [CALM, Disturbance(frozenset({1, 2}), 2)], ids=["calm", "nan-resumed"]
)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_whole_grid(zero: int, disturbance: Disturbance) -> None:
    on = config(DROPOUT, parallel={"zero": zero}, optim={"warmup_steps": 4})
    holds({"tp": 2, "pp": 2, "dp": 2}, on, disturbance)


@pytest.mark.thorough
@pytest.mark.parametrize("grid", [{"dp": 3}, {"pp": 4}, {"pp": 2, "dp": 3}], ids=str)
@pytest.mark.parametrize("optim", ["adamw", "lamb", "sgd", "muon"])
def test_sharded_optimizer_state(optim: str, grid: dict[str, int]) -> None:
    """ZeRO-1 over uneven replicas; tied weights are shared by all replicas of both ends, also where
    dp is 1."""
    holds(grid, config(BERT, parallel=ZERO, optim={"name": optim, "weight_decay": 0.1}), RESUMED)


def test_sharded_optimizer_state_of_several_versions() -> None:
    holds(
        {"pp": 2, "dp": 2}, config(parallel=ZERO, pipeline={"schedule": "pipedream"}), num_batches=3
    )


@pytest.mark.thorough
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_rows_that_several_tensor_ranks_hold_are_not_shared_out(optim: str) -> None:
    shared = {**LLAMA, "num_kv_heads": 1}
    holds({"tp": 2, "dp": 2}, config(shared, parallel=ZERO, optim={"name": optim}), num_batches=3)


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "m", "early_switch"), [(1, 4, 2), (2, 4, 0), (4, 8, 1)])
def test_early_switch(p: int, m: int, early_switch: int) -> None:
    pipeline = {"num_microbatches": m, "early_switch": early_switch}
    holds(
        {"pp": p, "dp": 2 if p < 3 else 1},
        config(DROPOUT, pipeline=pipeline),
        Disturbance(frozenset({2}), 3),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "pipeline",
    [
        {"warmup": "latency", "num_microbatches": 6, "early_switch": 3, "recompute": "stage"},
        {"warmup": "bandwidth", "num_microbatches": 7},
        {"gradient_buffers": 1},
        {"sync_steps": 2, "early_switch": 1, "recompute": "all"},
    ],
    ids=str,
)
def test_options_of_the_schedule(pipeline: dict[str, Any]) -> None:
    holds({"pp": 3}, config(pipeline=pipeline), RESUMED)


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", ["extrapolation", "prediction", "nesterov", "lr_rescale"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_staleness_corrections(optim: str, staleness: str) -> None:
    """Over updates that follow one another, one that is skipped, and a resume."""
    on = config(optim={"name": optim, "staleness": staleness})
    holds({"tp": 2, "pp": 2}, on, Disturbance(frozenset({2}), 4), num_batches=5)


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", ["extrapolation", "prediction"])
def test_corrections_of_parts(staleness: str) -> None:
    """Both kinds of version in one batch: ZeRO-1, on early switch."""
    holds(
        {"pp": 2, "dp": 2},
        config(parallel=ZERO, pipeline={"early_switch": 1}, optim={"staleness": staleness}),
        RESUMED,
    )


@pytest.mark.thorough
def test_a_correction_that_is_missing_is_found() -> None:
    """The comparison must be able to fail: an oracle that knows nothing of the correction
    disagrees."""
    from dataclasses import replace

    from hybridpar.verify.run import compare, run_grid

    on = config(
        parallel={"tp": 1, "pp": 1, "dp": 1},
        train={"dtype": "fp64"},
        optim={"staleness": "prediction"},
    )
    run = run_grid(on, 3)
    assert compare(on, run, 3).ok
    assert not compare(replace(on, optim=replace(on.optim, staleness="none")), run, 3).ok
