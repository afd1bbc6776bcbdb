"""Sequence parallelism is the same training: tensors equal the single-process oracle's, on every
grid and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from custom_models import CustomGPT
from engines import gpt

from hybridpar.config import Config
from hybridpar.verify.run import verify

pytestmark = pytest.mark.ranks

BERT = {"kind": "bert", "vocab_size": 67, "sentence_head": "nsp", "num_kv_heads": 0}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}
LLAMA = {
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """3 layers, 6 heads in 3 groups, 37 tokens: nothing divides."""
    own = {
        "model": {"num_kv_heads": 3, **(model or {})},
        "parallel": {"sequence": True},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((3, 24, 6, 37, 61), own, sections)


def holds(grid: dict[str, int], config: Config, num_batches: int = 3) -> None:
    report = verify(config, grid, num_batches)
    assert report.ok, report.first_divergence


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA, BERT | DROPOUT], ids=["gpt", "llama", "bert"])
@pytest.mark.parametrize(
    "grid",
    [{"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
def test_models_on_grids(grid: dict[str, int], model: dict[str, Any]) -> None:
    holds(grid, make(model), num_batches=2)


def test_fewer_rows_than_ranks() -> None:
    """Two tokens on three ranks, the last of which has no row at all, and sends empty messages."""
    holds({"tp": 3, "pp": 2}, make({**DROPOUT, "seq_length": 2, "max_positions": 8}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "1f1b", "split_backward": True},
        {"schedule": "2bw", "recompute": "all"},
        {"schedule": "interleaved", "recompute": "stage"},
        {"schedule": "gpipe", "recompute": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 1])
def test_schedules(pipeline: dict[str, Any], zero: int) -> None:
    holds(
        {"tp": 2, "pp": 2, "dp": 1 + zero},
        make(DROPOUT, pipeline=pipeline, parallel={"zero": zero}),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("optim", ["lamb", "muon"])
def test_optimizers_that_look_at_whole_parameters(optim: str) -> None:
    holds({"tp": 3}, make(BERT, optim={"name": optim}))


def test_a_custom_model_has_what_a_gpt_has() -> None:
    """Samples of text, split rows and selective recomputation; 37 rows do not divide by 2."""
    made = make(pipeline={"recompute": "selective", "num_microbatches": 2})
    holds({"tp": 2, "pp": 2}, replace(made, model=CustomGPT()), num_batches=2)
