"""Context parallelism is the same training: tensors equal the single-process oracle's, on every
grid and schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from custom_models import CustomGPT
from documents import Model, alone, documents, row_of
from engines import gpt, samples, start
from ranks import run_ranks
from torch import Tensor

from hybridpar.comm import all_reduce
from hybridpar.config import Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.models.custom_blocks import context_of
from hybridpar.planner.costs.context import context_bytes
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
WIDE_GROUPS = LLAMA | {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 2} | DROPOUT
PACKED = {"packing": "stream"}
MOST_RANKS = 16
GRIDS = [
    dict(zip(("cp", "tp", "pp", "dp"), sizes, strict=True))
    for sizes in product((2, 3, 4), (1, 2), (1, 2), (1, 2))
    if math.prod(sizes) <= MOST_RANKS
]
"""Every cp beside two ranks of other axes, or one."""


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


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("packing", ["none", "stream"])
@pytest.mark.parametrize(
    "model", [DROPOUT, LLAMA, LLAMA | DROPOUT], ids=["gpt", "llama", "llama-dropout"]
)
@pytest.mark.parametrize(
    "grid",
    [*GRIDS, {"cp": 2, "tp": 4, "pp": 2}],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items() if n > 1),
)
def test_models_on_grids(grid: dict[str, int], model: dict[str, Any], packing: str) -> None:
    holds(grid, make(model, data={"packing": packing}))


@pytest.mark.thorough
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("model", [DROPOUT, LLAMA | DROPOUT], ids=["gpt", "llama"])
def test_sequence_parallelism(tp: int, model: dict[str, Any]) -> None:
    """The ranks of tp divide the tokens of their rank of cp."""
    holds({"cp": 2, "tp": tp}, make(model, parallel={"sequence": True}, data=PACKED))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "model", [{"norm_position": "post"}, GEMMA, WIDE_GROUPS], ids=["post", "gemma", "groups of 4"]
)
def test_other_layers(model: dict[str, Any]) -> None:
    holds({"cp": 2}, make(model | {"dropout": 0.1, "logits_chunk": 7}))


@pytest.mark.thorough
def test_sixteen_processes() -> None:
    config = make(WIDE_GROUPS, pipeline={"schedule": "2bw"}, data=PACKED)
    holds({"cp": 2, "tp": 2, "pp": 2, "dp": 2}, config)


@pytest.mark.thorough(keep=1)
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
        {"schedule": "1f1b", "stage_layout": "v", "split_backward": True},
    ],
    ids=str,
)
def test_schedules(pipeline: dict[str, Any]) -> None:
    holds({"cp": 2, "pp": 2}, make(DROPOUT, pipeline=pipeline, data=PACKED), num_batches=3)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("grid", [{"cp": 2}, {"cp": 2, "dp": 2}], ids=str)
def test_sharded_state(zero: int, grid: dict[str, int]) -> None:
    """The ranks of cp are replicas of the parameters, so they shard them, too."""
    holds(grid, make(LLAMA, parallel={"zero": zero}))


@pytest.mark.thorough
@pytest.mark.parametrize("optim", ["lamb", "muon"])
def test_optimizers_that_look_at_whole_parameters(optim: str) -> None:
    holds({"cp": 2, "tp": 2}, make(optim={"name": optim}, parallel={"zero": 1}))


@pytest.mark.thorough
def test_a_run_that_resumes_and_skips_a_batch() -> None:
    config = make(DROPOUT, parallel={"zero": 1}, pipeline={"schedule": "2bw"})
    holds({"cp": 2, "pp": 2}, config, 4, Disturbance(frozenset({1}), resume_at=2))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("comm", ["all_gather", "ring", "ulysses"])
def test_a_custom_model_that_declares_it(comm: str) -> None:
    config = make(
        pipeline={"recompute": "selective", "num_microbatches": 2}, parallel={"cp_comm": comm}
    )
    holds({"cp": 2, "tp": 2}, replace(config, model=CustomGPT()))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("packing", ["stream", "none"])
@pytest.mark.parametrize(
    "model", [LLAMA | DROPOUT, WIDE_GROUPS, GEMMA], ids=["llama", "groups of 4", "gemma"]
)
@pytest.mark.parametrize(
    "grid",
    [
        {"cp": 3, "cp_comm": "ring"},
        {"cp": 2, "cp_comm": "ulysses"},
        {"cp": 2, "cp_comm": "ring", "tp": 2, "sequence": True},
        {"cp": 4, "cp_comm": "ring"},
        {"cp": 2, "cp_comm": "ring", "pp": 2, "dp": 2, "zero": 1},
        {"cp": 3, "cp_comm": "ulysses"},
    ],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
def test_other_ways_to_the_tokens(
    grid: dict[str, Any], model: dict[str, Any], packing: str
) -> None:
    axes = {name: size for name, size in grid.items() if name in ("cp", "tp", "pp", "dp")}
    others = {name: value for name, value in grid.items() if name not in axes}
    if grid["cp"] == 3 and grid["cp_comm"] == "ulysses" and model.get("num_kv_heads") == 2:
        model = model | {"num_kv_heads": 4}
    holds(axes, make(model, parallel=others, data={"packing": packing}))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("comm", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "2bw", "recompute": "all"},
        {"schedule": "1f1b", "split_backward": True, "recompute": "selective"},
        {"schedule": "interleaved", "recompute": "stage"},
        {"schedule": "pipedream"},
    ],
    ids=str,
)
def test_other_ways_on_schedules(pipeline: dict[str, Any], comm: str) -> None:
    config = make(DROPOUT, pipeline=pipeline, data=PACKED, parallel={"cp_comm": comm})
    holds({"cp": 2, "pp": 2}, config, num_batches=3)


def step_traffic(config: Config) -> None:
    """A step receives over cp what the planner counts for its layers and micro-batches, and layers
    that are recomputed receive it once more for the forward."""
    engine, loader = start(config)
    axis = engine.grid.cp
    axis.traffic.clear()
    engine.train(loader, 1, lambda step: None)
    sent = axis.traffic.num_bytes
    others = axis.size - 1
    # the first rank has the most tokens, for which the planner counts
    exchanged = sent["all_to_all"] * others // axis.size
    received = others * sent["all_gather"] + exchanged + sent["recv"]
    parallel = replace(config.parallel, dp=1)
    forward, backward = context_bytes(config.model, parallel, "fp64")["layer"]
    layers = config.transformer.num_layers
    microbatches = config.pipeline.num_microbatches * config.train.micro_batch_size
    again = 1 + (config.pipeline.recompute == "all")
    if axis.is_first:
        assert received == microbatches * layers * (again * forward + backward)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize(
    ("comm", "cp"), [("ring", 3), ("ulysses", 2), ("all_gather", 2), ("ring", 2)]
)
def test_the_traffic_of_a_step_is_what_plans_count(comm: str, cp: int, recompute: str) -> None:
    config = make(
        LLAMA,
        parallel={"cp": cp, "cp_comm": comm, "dp": 1},
        pipeline={"recompute": recompute},
        train={"dtype": "fp64"},
    )
    run_ranks(step_traffic, cp, config)


# -- documents on the ranks of cp


def losses_of_documents(axes: dict[str, int], sections: dict[str, Any]) -> None:
    """A packed row has the loss of its documents alone, in one process, and in any order."""
    grid = ProcessGrid(**axes)
    config = make(sections.get("model"), parallel=sections.get("parallel", {}))
    texts = documents(9, 1, 20, 1, 6)
    single = Model(make(sections.get("model")), ProcessGrid())
    wanted = torch.stack([single.loss(alone(text)) for text in texts]).sum()
    model = Model(config, grid)
    context = context_of(config.model, grid.cp)
    for order in ((0, 1, 2, 3, 4), (3, 2, 4, 0, 1)):
        row = context.cut(row_of([texts[i] for i in order]))
        loss = all_reduce(model.loss(row).detach().clone(), grid.cp)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["learned", "rotary"])
@pytest.mark.parametrize("axes", [{"cp": 3}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_a_row_has_the_loss_of_its_documents(axes: dict[str, int], model: dict[str, Any]) -> None:
    num_ranks = axes["cp"] * axes.get("tp", 1)
    sections = {"model": model, "parallel": {"sequence": "tp" in axes}}
    run_ranks(losses_of_documents, num_ranks, axes, sections)


class Probed:
    """A loader that yields one row, of which the labels of one document count."""

    def __init__(self, row: dict[str, Tensor], document: slice):
        labels = torch.full_like(row["labels"], -100)
        labels[:, document] = row["labels"][:, document]
        self.row = row | {"labels": labels}

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return dict(self.row)

    def first_sample(self, index: int) -> int:
        return index

    def num_targets(self, batch: int) -> int:
        return 1


def probed(config: Config, texts: list[Any], document: slice) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and all gradients of a batch if the labels of one document count."""
    engine, _ = start(config)
    found: dict[str, Tensor] = {}
    losses: list[float] = []

    def keep(batch: int, tensors: Any) -> None:
        found.update((name, tensor.clone()) for name, tensor in tensors.items())

    engine.train(Probed(row_of(texts), document), 1, lambda step: losses.append(step.loss), keep)
    return losses[0], found


def leaks(config: Config) -> None:
    texts = documents(9, 11, 17)
    inside = slice(9, 20)
    loss, gradients = probed(config, texts, inside)
    others = [(texts[0] + 7) % 61, texts[1], (texts[2] + 7) % 61]
    same_loss, same = probed(config, others, inside)
    assert loss == same_loss > 0
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())
    changed, _ = probed(config, [texts[0], (texts[1] + 7) % 61, texts[2]], inside)
    assert changed != loss


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA | {"window": 5}], ids=["learned", "windows"])
@pytest.mark.parametrize(
    "grid",
    [
        {"cp": 2, "pp": 2},
        {"cp": 3},
        {"cp": 2, "tp": 2, "sequence": True},
        {"cp": 2, "dp": 2, "zero": 3},
        {"cp": 2, "tp": 2, "pp": 2, "dp": 2, "sequence": True},
        {"cp": 3, "cp_comm": "ring"},
        {"cp": 2, "cp_comm": "ulysses"},
    ],
    ids=str,
)
def test_other_documents_change_no_bit(grid: dict[str, Any], model: dict[str, Any]) -> None:
    """Bits of the loss of a document, and of its gradients of all parameters."""
    axes = {name: size for name, size in grid.items() if name in ("cp", "tp", "pp", "dp")}
    sections: dict[str, dict[str, Any]] = {
        "parallel": {"dp": 1} | grid,
        "train": {"dtype": "fp64", "micro_batch_size": 1},
        "pipeline": {"num_microbatches": 2, "recompute": "0"},
    }
    run_ranks(leaks, math.prod(axes.values()), from_mapping(sections, make(model, data=PACKED)))


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


@pytest.mark.thorough(keep=1)
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
