"""Two stages on each rank, there and back: the same training, its memory and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import gpt
from ranks import run_ranks
from train.stretches import run, state

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.verify.run import verify

pytestmark = pytest.mark.ranks

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
V = {"stage_layout": "v", "split_backward": True}
FILLED = {
    "schedule": "own",
    "order": [
        "F0 F1 F2 F0b I0b W0b F1b I0 I1b W0 W1b F2b F3 I1 I2b W1 W2b F3b F4 I2 I3b W2 F4b I4b I3 "
        "W3b W3 I4 W4b W4",
        "F0 F0b F1 F1b I0b I0 W0b F2 W0 F2b I1b I1 W1b W1 F3 F3b I2b I2 W2b W2 F4 F4b I3b I3 W3b "
        "W3 I4b I4 W4b W4",
    ],
}
"""V-Half, with Ws filled into the gaps of uneven costs."""


def make(pipeline: dict[str, Any], pp: int = 2, **sections: dict[str, Any]) -> Config:
    own = {"parallel": {"pp": pp, "dp": 1}, "pipeline": {"num_microbatches": 5, **pipeline}}
    return gpt((6, 24, 2, 10, 37), own, sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("pp", "more", "pipeline", "sections"),
    [
        (4, {}, {"activations": "full", "num_microbatches": 3, "recompute": "stage:1,4"}, {}),
        (2, {"dp": 2}, {"activations": "full"}, {"parallel": {"zero": 1}}),
        (
            2,
            {"tp": 2},
            {"activations": "half", "schedule": "2bw", "sync_steps": 1},
            {"model": DROPOUT, "parallel": {"sequence": True}},
        ),
        (3, {}, {"activations": "min", "schedule": "2bw", "num_microbatches": 3}, {}),
    ],
    ids=str,
)
def test_verify(
    pp: int, more: dict[str, int], pipeline: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Loss, gradients, norm and weights are those of one process, to 1e-9 in float64."""
    report = verify(make(V | pipeline, pp, **sections), {"pp": pp, **more}, 4)
    assert report.ok, report.first_divergence


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("pp", "schedule", "orders", "sections"),
    [
        (
            2,
            "1f1b",
            (V, {}, V | {"activations": "half"}, V | {"virtual_stages": 4}),
            {"model": DROPOUT},
        ),
        (2, "1f1b", (V | FILLED, {}), {"model": DROPOUT}),
        (
            4,
            "1f1b",
            (V | {"activations": "min", "recompute": "stage"},),
            {"train": {"dtype": "bf16"}},
        ),
        (2, "2bw", (V | {"activations": "half"}, {}, {"virtual_stages": 2}), {"model": DROPOUT}),
    ],
    ids=str,
)
def test_equal_to_a_stage_on_each_rank_to_the_bit(
    tmp_path: Path,
    pp: int,
    schedule: str,
    orders: tuple[dict[str, Any], ...],
    sections: dict[str, Any],
) -> None:
    """However often orders change, from checkpoint to checkpoint; also where none changes. Nothing
    is added in another order but the norm, which clips nothing here. (Ends that are tied are: on
    one rank, head and embedding by turns.)"""
    untied = {
        "model": {"tie_embeddings": False} | sections.get("model", {}),
        "optim": {"clip_grad": 0.0},
    }
    last = 2 * len(orders)

    def config(pipeline: dict[str, Any]) -> Config:
        return make({"schedule": schedule} | pipeline, pp, **sections | untied)

    whole = [
        run_ranks(run, pp, config({}), tmp_path / "whole", step)
        for step in ((last,) if schedule == "1f1b" else range(2, last + 1, 2))
    ]  # 2bw drains where it is saved
    changing = [
        run_ranks(run, pp, config(order), tmp_path / "changing", 2 * i)
        for i, order in enumerate(orders, 1)
    ]
    assert [s.loss for part in changing for s in part[0][0]] == [
        s.loss for part in whole for s in part[0][0]
    ]
    expected = state(whole[-1])
    found = state(changing[-1])
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert changing[-1][0][2] == whole[-1][0][2], "evaluations"


@pytest.mark.thorough
def test_resume_of_tied_ends_is_exact(tmp_path: Path) -> None:
    """On the same grid to the bit, with clipping; with another placement within the order of
    sums."""
    pipeline = {"schedule": "2bw", "activations": "min", **V}
    sections: dict[str, Any] = {
        "model": DROPOUT,
        "optim": {"clip_grad": 0.1},
        "train": {"dtype": "fp64"},
    }
    ways: list[tuple[dict[str, Any], ...]] = [(pipeline, pipeline), ({"schedule": "2bw"}, pipeline)]
    found = []
    for way, orders in enumerate(ways):
        for step, order in zip((2, 4), orders, strict=True):
            results = run_ranks(run, 2, make(order, **sections), tmp_path / str(way), step)
        found.append(state(results))
    again = run_ranks(run, 2, make(pipeline, **sections), tmp_path / "0", 6)
    assert checkpoint.saved_steps(tmp_path / "0")
    assert again[0][0][0].step == 5
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-9, atol=1e-12)
