"""ZeRO-2 and 3 against the oracle in float64: gradients are summed over replicas after each
micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from verify.test_grids import BERT, DROPOUT, LLAMA, make

from hybridpar.verify.run import Disturbance, verify

pytestmark = pytest.mark.ranks

RESUMED = Disturbance(resume_at=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "grid", "model", "sections", "disturbance"),
    [
        (
            2,
            {"pp": 2, "dp": 3},
            BERT,
            {"optim": {"name": "lamb"}, "pipeline": {"schedule": "2bw", "early_switch": 1}},
            RESUMED,
        ),
        (
            3,
            {"tp": 2, "pp": 2, "dp": 2},
            DROPOUT,
            {"pipeline": {"schedule": "2bw"}},
            Disturbance(frozenset({1, 2}), 2),
        ),
        (
            3,
            {"dp": 3},
            LLAMA,
            {"optim": {"name": "muon"}, "pipeline": {"schedule": "gpipe"}},
            RESUMED,
        ),
        (
            3,
            {"pp": 2, "dp": 2},
            {},
            {"pipeline": {"schedule": "interleaved", "split_backward": True}},
            RESUMED,
        ),
        (
            3,
            {"dp": 2},
            {},
            {"pipeline": {"schedule": "2bw"}, "optim": {"staleness": "prediction"}},
            RESUMED,
        ),
    ],
    ids=str,
)
def test_shared_gradients_and_weights(
    zero: int,
    grid: dict[str, int],
    model: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    disturbance: Disturbance,
) -> None:
    report = verify(make(model, parallel={"zero": zero}, **sections), grid, 3, disturbance)
    assert report.ok, report.first_divergence
