"""Recomputation: the gradients are those of a stage that keeps everything, to the bit, and only its
input is kept."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.config import ModelConfig, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.blocks import MicroBatch
from hybridpar.models.build import Recomputation, build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.random import RandomKey
from hybridpar.runtime.stage import Stage
from hybridpar.train.engine import Engine

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    seq_length=12,
    vocab_size=37,
    dropout=0.1,
    attention_dropout=0.2,
)
KEY = RandomKey.of(3, 5, 0)


def make_stage(blocks: range, recompute: Recomputation, model: ModelConfig = MODEL) -> Stage:
    stage = Stage(build_blocks(model, Axis("tp"), blocks, device="cpu"), recompute)
    initialize(named_placements(stage), seed=1)
    return stage


def make_batch(model: ModelConfig = MODEL) -> dict[str, Tensor]:
    batch = SyntheticLoader(model, 2, 1).microbatch(0, 0)
    scalars = {"num_targets": 20.0, "num_samples": 2.0}
    return batch | {
        name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()
    }


def gradients(stage: Stage, x: Tensor | None, batch: MicroBatch) -> dict[str, Tensor]:
    out = stage(x, batch, KEY)
    weights = torch.linspace(-1, 1, 2 * 12 * 32).view(2, 12, 32)
    (sum(out.values()) if isinstance(out, dict) else (out * weights).sum()).backward()
    found = {name: p.grad for name, p in stage.named_parameters()}
    if x is not None:
        found["x"] = x.grad
    return found


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"kind": "bert"},
        {"norm": "rms_norm", "activation": "swiglu"},
        {"parallel_residual": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks", [range(0, 5), range(0, 2), range(1, 3), range(2, 5)], ids=str)
@pytest.mark.parametrize("what", ["whole", "blocks", "selective"])
def test_gradients_are_the_same_to_the_bit(kind: dict[str, Any], blocks: range, what: str) -> None:
    model = replace(MODEL, **kind)
    again = (
        Recomputation(selective=frozenset(blocks) & {1, 2, 3})
        if what == "selective"
        else Recomputation(frozenset(blocks), whole=what == "whole")
    )
    batch = make_batch(model)
    results = []
    for recompute in (Recomputation(), again):
        x = (
            None
            if 0 in blocks
            else torch.linspace(-1, 1, 2 * 12 * 32).view(2, 12, 32).requires_grad_()
        )
        results.append(gradients(make_stage(blocks, recompute, model), x, batch))
    plain, recomputed = results
    assert plain.keys() == recomputed.keys()
    for name in plain:
        assert torch.equal(plain[name], recomputed[name]), name


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe"])
@pytest.mark.parametrize("recompute", ["all", "stage", "selective"])
def test_training_is_the_same_to_the_bit(schedule: str, recompute: str) -> None:
    runs = []
    for text in ("none", recompute):
        config = from_mapping(
            {
                "model": {
                    "num_layers": 3,
                    "hidden_size": 32,
                    "num_heads": 4,
                    "seq_length": 12,
                    "vocab_size": 37,
                    "dropout": 0.1,
                    "attention_dropout": 0.1,
                },
                "parallel": {"dp": 1},
                "train": {"micro_batch_size": 2},
                "pipeline": {"schedule": schedule, "num_microbatches": 2, "recompute": text},
            }
        )
        steps: list[Any] = []
        Engine(JobPlan(config), ProcessGrid(), torch.device("cpu")).train(
            SyntheticLoader(config.model, 2, 2), 3, steps.append
        )
        runs.append([(step.loss, step.grad_norm) for step in steps])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("blocks", [range(0, 3), range(1, 4), range(2, 5)], ids=str)
def test_a_stage_recomputed_as_a_whole_keeps_its_input_only(blocks: range) -> None:
    """Every tensor that a module has returned is gone after the forward, but the stage's own
    output."""
    stage = make_stage(blocks, Recomputation(frozenset(blocks), whole=True))
    made: list[weakref.ref[Tensor]] = []
    for module in stage.modules():
        module.register_forward_hook(
            lambda module, args, out: made.extend(
                weakref.ref(t.untyped_storage())
                for t in (out.values() if isinstance(out, dict) else [out])
            )
        )
    x = None if 0 in blocks else torch.zeros(2, 12, 32, requires_grad=True)
    out = stage(x, make_batch(), KEY)
    outputs = out.values() if isinstance(out, dict) else [out]
    weights = {
        p.untyped_storage().data_ptr() for p in stage.parameters()
    }  # position embeddings are a view of theirs
    alive = {storage.data_ptr() for ref in made if (storage := ref()) is not None} - weights
    assert len(made) > 6
    assert alive == {t.untyped_storage().data_ptr() for t in outputs}


def test_evaluation_is_not_checkpointed() -> None:
    stage = make_stage(range(0, 5), Recomputation(frozenset(range(5)), whole=True))
    with torch.no_grad():
        losses = stage(None, make_batch(), None)
    assert not losses["lm"].requires_grad
