"""Context parallelism is the same training: tensors equal the single-process oracle's, on every
grid and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from custom_models import CustomGPT
from engines import gpt, samples, start
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config
from hybridpar.verify.run import CALM, Disturbance, verify

pytestmark = pytest.mark.ranks

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}
LLAMA = {
    "num_kv_heads": 3,
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
GEMMA = LLAMA | {
    "norm_position": "sandwich",
    "qk_norm": "head",
    "window": 9,
    "window_pattern": "110",
    "attention_softcap": 20.0,
    "norm_zero_centered": True,
}
PACKED = {"packing": "stream"}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """3 layers, 6 heads, 37 tokens: nothing divides."""
    own = {
        "model": model or {},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((3, 48, 6, 37, 61), own, sections)


def holds(
    grid: dict[str, int],
    config: Config,
    num_batches: int = 2,
    disturbance: Disturbance = CALM,
) -> None:
    report = verify(config, grid, num_batches, disturbance)
    assert report.ok, report.first_divergence


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("packing", ["none", "stream"])
@pytest.mark.parametrize(
    "model", [DROPOUT, LLAMA, LLAMA | DROPOUT], ids=["gpt", "llama", "llama-dropout"]
)
@pytest.mark.parametrize(
    "grid",
    [
        {"cp": 2},
        {"cp": 3},
        {"cp": 4},
        {"cp": 2, "tp": 2},
        {"cp": 3, "tp": 2},
        {"cp": 2, "pp": 2},
        {"cp": 2, "dp": 2},
        {"cp": 3, "pp": 2, "dp": 2},
        {"cp": 2, "tp": 4, "pp": 2},
    ],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
def test_models_on_grids(grid: dict[str, int], model: dict[str, Any], packing: str) -> None:
    holds(grid, make(model, data={"packing": packing}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("model", [DROPOUT, LLAMA | DROPOUT], ids=["gpt", "llama"])
def test_with_sequence_parallelism(tp: int, model: dict[str, Any]) -> None:
    """The ranks of tp divide the tokens of their rank of cp."""
    holds({"cp": 2, "tp": tp}, make(model, parallel={"sequence": True}, data=PACKED))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [{"norm_position": "post"}, GEMMA], ids=["post", "gemma"])
def test_other_layers(model: dict[str, Any]) -> None:
    holds({"cp": 2}, make(model | {"dropout": 0.1, "logits_chunk": 7}))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "1f1b", "split_backward": True},
        {"schedule": "2bw", "recompute": "all"},
        {"schedule": "2bw", "recompute": "selective"},
        {"schedule": "interleaved", "recompute": "stage"},
        {"schedule": "gpipe", "recompute": "0,2"},
        {"schedule": "pipedream"},
        {"schedule": "naive"},
    ],
    ids=str,
)
def test_schedules(pipeline: dict[str, Any]) -> None:
    holds({"cp": 2, "pp": 2}, make(DROPOUT, pipeline=pipeline, data=PACKED), num_batches=3)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("grid", [{"cp": 2}, {"cp": 2, "dp": 2}], ids=str)
def test_sharded_state(zero: int, grid: dict[str, int]) -> None:
    """The ranks of cp are replicas of the parameters, so they shard them, too."""
    holds(grid, make(LLAMA, parallel={"zero": zero}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("optim", ["lamb", "muon"])
def test_optimizers_that_look_at_whole_parameters(optim: str) -> None:
    holds({"cp": 2, "tp": 2}, make(optim={"name": optim}, parallel={"zero": 1}))


def test_a_run_that_resumes_and_skips_a_batch() -> None:
    config = make(DROPOUT, parallel={"zero": 1}, pipeline={"schedule": "2bw"})
    holds({"cp": 2, "pp": 2}, config, 4, Disturbance(frozenset({1}), resume_at=2))


def test_a_custom_model_that_declares_it() -> None:
    config = make(pipeline={"recompute": "selective", "num_microbatches": 2})
    holds({"cp": 2, "tp": 2}, replace(config, model=CustomGPT()))


# -- labels that count on some ranks alone


class FewLabels:
    """Samples of which a few labels count, all of them among the first tokens."""

    def __init__(self, loader: Any, counting: int):
        self._loader = loader
        self._counting = counting

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        tensors = dict(self._loader.microbatch(batch, index))
        labels = tensors["labels"].clone()
        labels[:, self._counting :] = -100
        return tensors | {"labels": labels}

    def first_sample(self, index: int) -> int:
        return self._loader.first_sample(index)

    def num_targets(self, batch: int) -> int:
        return self._loader.batch_size * self._counting


def losses(config: Config, counting: int) -> list[tuple[float, float]]:
    engine, _ = start(config)
    loader = FewLabels(samples(engine), counting)
    found: list[tuple[float, float]] = []
    engine.train(loader, 3, lambda step: found.append((step.loss, step.grad_norm)))
    return found


@pytest.mark.parametrize("counting", [0, 5])
def test_ranks_whose_labels_are_all_ignored(counting: int) -> None:
    """The first five labels are all rank 0's; without any label losses and gradients are 0."""
    config = make(train={"dtype": "fp64"}, parallel={"dp": 1})
    shared = replace(config, parallel=replace(config.parallel, cp=3))
    expected = losses(config, counting)
    for found in run_ranks(losses, 3, shared, counting):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=1e-12, atol=1e-15
        )
    assert all(loss == 0 for loss, _ in expected) == (counting == 0)
