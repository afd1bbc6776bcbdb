"""Pieces of a micro-batch that take turns: one process's training, and to the bit that of smaller
micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import gpt, start
from ranks import run_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.verify.run import run_grid, verify

pytestmark = pytest.mark.ranks

BERT = {"kind": "bert", "vocab_size": 67, "sentence_head": "nsp", "num_kv_heads": 0}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """3 layers, 6 heads in 3 groups, 13 tokens, dropout: nothing divides but samples."""
    own = {
        "model": {"num_kv_heads": 3, "dropout": 0.1, "attention_dropout": 0.2, **(model or {})},
        "parallel": {"tp": 2, "dp": 1, "tp_pieces": 2},
        "train": {"micro_batch_size": 4, "dtype": "fp64"},
    }
    return gpt((3, 24, 6, 13, 61), own, sections)


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ({"tp": 3}, {"model": BERT, "parallel": {"tp_pieces": 4}}),
        (
            {"tp": 2, "pp": 2},
            {
                "pipeline": {"schedule": "1f1b", "split_backward": True},
                "parallel": {"sequence": True},
            },
        ),
        (
            {"tp": 2, "pp": 2},
            {"pipeline": {"schedule": "2bw", "recompute": "stage", "num_microbatches": 4}},
        ),
        (
            {"tp": 2, "dp": 2},
            {
                "pipeline": {"recompute": "selective"},
                "parallel": {"zero": 2},
                "train": {"micro_batch_size": 2},
            },
        ),
    ],
    ids=str,
)
def test_is_the_training_of_one_process(grid: dict[str, int], settings: dict[str, Any]) -> None:
    report = verify(
        make(**settings), grid, 3 if "num_microbatches" in settings.get("pipeline", {}) else 2
    )
    assert report.ok, report.first_divergence


def test_weights_are_those_of_smaller_microbatches_to_the_bit() -> None:
    """But for the sums of losses, which nothing else depends on; embeddings that are tied have two
    parts."""
    config = make({"tie_embeddings": False}, pipeline={"schedule": "2bw", "split_backward": True})
    smaller = from_mapping(
        {
            "pipeline": {"num_microbatches": 6},
            "train": {"micro_batch_size": 2},
            "parallel": {"tp_pieces": 1},
        },
        config,
    )
    pieces, whole = (run_grid(one, 3) for one in (config, smaller))
    for batch in range(3):
        for name, gradient in whole.gradients[batch].items():
            assert torch.equal(gradient, pieces.gradients[batch][name]), name


def evaluated(config: Config) -> tuple[float, int]:
    """Loss after a step, and the number of sums over tp."""
    engine, loader = start(config)
    engine.train(loader, 1, lambda step: None)
    return engine.evaluate(loader, 2)["lm"], engine.grid.tp.traffic.calls["all_reduce"]


def test_evaluation_is_in_pieces_and_each_sums_for_itself() -> None:
    """A piece's forward has 10 sums (embedding, 2 in each of 3 layers, 3 in the head), its backward
    7."""
    ((pieces, more), _), ((whole, sums), _) = (
        run_ranks(evaluated, 2, make(parallel={"tp_pieces": number})) for number in (2, 1)
    )
    assert pieces == pytest.approx(whole, rel=1e-12)
    assert more - sums == 3 * 17 + 2 * 3 * 10


def test_what_pieces_do_not_go_with_is_said() -> None:
    wrong = make(train={"micro_batch_size": 3, "record_memory": 2, "device": "cuda"})
    rules = [problem.rule for problem in wrong.conflicts() if problem.field == "parallel.tp_pieces"]
    assert len(rules) == 3
    assert not [
        *replace(wrong, parallel=replace(wrong.parallel, tp_pieces=1)).parallel.conflicts(wrong)
    ]
