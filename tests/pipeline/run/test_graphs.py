"""Micro-batches as CUDA graphs: the same losses and weights, to the bit, as run kernel by kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.dp.accumulate import GradientAccumulator
from hybridpar.grid import ProcessGrid
from hybridpar.nn.layout import FlatLayout
from hybridpar.pipeline.run.graphs import recorder, unsupported
from hybridpar.pipeline.run.stage import Stage
from hybridpar.train.engine import Engine

CUDA = torch.device("cuda", 0)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def make(**sections: dict[str, Any]) -> Config:
    return from_mapping({
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 40, "vocab_size": 97,
                  **sections.get("model", {})},
        "parallel": {"dp": 1, **sections.get("parallel", {})},
        "pipeline": {"num_microbatches": 3, **sections.get("pipeline", {})},
        "train": {"micro_batch_size": 2, "num_steps": 20, **sections.get("train", {})},
        "optim": {"lr": 1e-2, "clip_grad": 1.0, **sections.get("optim", {})},
        "kernels": {"attention": "triton"},  # of the two that are fast, the one without atomic additions
    })


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"train": {"dtype": "bf16"}},
    "fp32": {"train": {"dtype": "fp32"}},
    "fp16, the scale backs off": {"train": {"dtype": "fp16"}, "optim": {"loss_scale": 2.0**24}},
    "one micro-batch": {"pipeline": {"num_microbatches": 1}, "train": {"dtype": "bf16"}},
    "2bw": {"pipeline": {"schedule": "2bw"}, "train": {"dtype": "bf16"}},
    "gpipe": {"pipeline": {"schedule": "gpipe"}, "train": {"dtype": "bf16"}},
    "recomputation": {"pipeline": {"recompute": "all"}, "train": {"dtype": "bf16"}},
    "llama-like": {"model": {"norm": "rms_norm", "activation": "swiglu", "position": "rotary", "tie_embeddings": False,
                             "num_kv_heads": 2, "logits_chunk": 32}, "train": {"dtype": "bf16"}},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpu) for name in SETTINGS])
def test_replayed_steps_are_those_run_kernel_by_kernel(name: str) -> None:
    sections = SETTINGS[name]
    expected_losses, expected = train(make(**sections | {"train": {**sections["train"], "cuda_graphs": False}}))
    losses, weights = train(make(**sections))
    assert losses == expected_losses
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key


def train(config: Config, num_batches: int = 7) -> tuple[list[float], dict[str, Tensor]]:
    """In two stretches, with an evaluation between them; the losses and what training has made."""
    engine = Engine(config, ProcessGrid(), CUDA)
    loader = SyntheticLoader(config.model, 2, config.pipeline.num_microbatches)
    losses: list[float] = []
    engine.train(loader, 4, lambda step: losses.append(step.loss))
    losses.append(sum(engine.evaluate(loader, 1).values()))
    engine.train(loader, num_batches - 4, lambda step: losses.append(step.loss))
    if (graphs := engine.executor.graphs) is not None:
        assert graphs.num_replayed > 0
    assert (graphs is not None) == config.train.cuda_graphs
    return losses, {name: tensor.cpu() for name, tensor in engine.state_tensors().items()}


@pytest.mark.parametrize(("sections", "reason"), [
    ({"parallel": {"pp": 2}}, "stages wait"), ({"parallel": {"tp": 2}}, "tensor parallelism"),
    ({"model": {"kind": "bert"}}, "labelled"), ({"model": {"dropout": 0.1}}, "dropout"),
    ({"model": {"attention_dropout": 0.1}}, "dropout"), ({}, None),
])
def test_what_cannot_be_recorded(sections: dict[str, dict[str, Any]], reason: str | None) -> None:
    found = unsupported(make(**sections))
    assert found is None if reason is None else reason in str(found)


def test_says_why_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    no_gradients = GradientAccumulator(FlatLayout([], [], torch.float32))
    with caplog.at_level("INFO"):
        assert recorder(make(model={"dropout": 0.1}), Stage({}), no_gradients, CUDA, eager_last=False) is None
    assert "without CUDA graphs: dropout" in caplog.text
