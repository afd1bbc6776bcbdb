"""Sites that train apart and meet: each equals its part of one process in float64, whatever its
grid and schedule."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.config import Config, from_mapping
from hybridpar.verify.run import Disturbance, verify

pytestmark = pytest.mark.ranks

PLAIN = {"every": 2}
STREAMED = {"every": 4, "fragments": 3, "delay": 1, "mix": 0.5, "momentum": 0.5}


def make(parallel: dict[str, Any], outer: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 3,
                "hidden_size": 24,
                "num_heads": 3,
                "seq_length": 7,
                "vocab_size": 41,
                "dropout": 0.1,
            },
            "parallel": {"sites": 2, "dp": 1} | parallel,
            "outer": outer,
            "pipeline": {"num_microbatches": 3} | sections.get("pipeline", {}),
            "train": {"micro_batch_size": 1, "num_steps": 20},
            "optim": {"lr": 1e-2, "clip_grad": 0.5} | sections.get("optim", {}),
        }
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("parallel", "outer", "sections"),
    [
        ({"pp": 2}, STREAMED, {"pipeline": {"schedule": "2bw"}}),
        ({"dp": 2, "zero": 1}, STREAMED, {"optim": {"name": "muon"}}),
        ({"tp": 2}, PLAIN, {"pipeline": {"schedule": "2bw"}}),
        ({"sites": 3}, STREAMED, {}),
    ],
    ids=str,
)
def test_sites_equal_one_process(
    parallel: dict[str, Any], outer: dict[str, Any], sections: dict[str, Any]
) -> None:
    config = make(parallel, outer, **sections)
    grid = {name: size for name, size in parallel.items() if name in ("tp", "pp", "dp")}
    report = verify(config, grid, 7, Disturbance(frozenset({3}), resume_at=5))
    assert report.ok, report.first_divergence
    assert set(report.worst) == {"init", "loss", "grad_norm", "gradient", "weight"}
