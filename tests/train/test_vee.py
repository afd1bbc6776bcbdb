"""Two stages on each rank, there and back: the same training, its memory and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # recomputation imports it: here once, else in every rank of every test
from ranks import run_ranks

from hybridpar.checkpoint import Saver, load
from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.state.audit import bit_hash
from hybridpar.train.engine import Engine, StepResult
from hybridpar.verify.run import verify

pytestmark = pytest.mark.ranks

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
V = {"placement": "v", "split_backward": True}


def make(pipeline: dict[str, Any], pp: int = 2, **sections: dict[str, Any]) -> Config:
    return from_mapping({
        "model": {"num_layers": 6, "hidden_size": 24, "num_heads": 2, "seq_length": 10, "vocab_size": 37,
                  **sections.get("model", {})},
        "parallel": {"pp": pp, **sections.get("parallel", {})},
        "pipeline": {"num_microbatches": 5, **pipeline},
        "train": {"micro_batch_size": 2, "num_steps": 20, **sections.get("train", {})},
        "optim": {"lr": 1e-2, **sections.get("optim", {})},
    })


@pytest.mark.parametrize(("pp", "more", "pipeline", "sections"), [
    (2, {}, {"activations": "full"}, {"model": DROPOUT}),
    (4, {}, {"activations": "full", "num_microbatches": 3, "recompute": "stage:1,4"}, {}),
    (3, {}, {"activations": "min", "recompute": "0,2-4"}, {"model": DROPOUT}),
    (2, {"dp": 2}, {"activations": "half"}, {"parallel": {"zero": 1}}),
    (2, {"tp": 2}, {"activations": "half", "schedule": "2bw", "sync_steps": 1}, {"model": DROPOUT}),
    (4, {}, {"activations": "half", "schedule": "2bw"}, {"model": {"tie_embeddings": False}}),
    (3, {}, {"activations": "min", "schedule": "2bw", "num_microbatches": 3}, {}),
], ids=str)
def test_verify(pp: int, more: dict[str, int], pipeline: dict[str, Any], sections: dict[str, Any]) -> None:
    """Loss, gradients, norm and weights are those of one process, to 1e-9 in float64."""
    report = verify(make(V | pipeline, pp, **sections), {"pp": pp, **more}, 4)
    assert report.ok, report.first_divergence
