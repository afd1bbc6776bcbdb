"""Packed documents: training on any grid equals one process, and documents of a row are documents
alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import Model, alone, documents, row_of
from engines import gpt, start
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.data.chat import ChatDataset, Conversations
from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter
from hybridpar.data.loader import BatchLoader
from hybridpar.data.packed_rows import PackedDataset
from hybridpar.data.sample_rules import IGNORED, document_entries
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.grid import ProcessGrid
from hybridpar.verify.run import verify

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}
LLAMA = {
    "num_kv_heads": 3,
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """3 layers, 6 heads, 37 tokens in documents of 1 to about 20: nothing divides."""
    own = {
        "model": model or {},
        "data": {"packing": "stream"},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((3, 48, 6, 37, 61), own, sections)


def holds(grid: dict[str, int], config: Config, num_batches: int = 2) -> None:
    report = verify(config, grid, num_batches)
    assert report.ok, report.first_divergence


@pytest.mark.ranks
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA, LLAMA | DROPOUT], ids=["gpt", "llama", "both"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "grid",
    [{"tp": 3}, {"tp": 4}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}],
    ids=lambda g: "-".join(f"{a}{n}" for a, n in g.items()),
)
def test_models_on_grids(grid: dict[str, int], sequence: bool, model: dict[str, Any]) -> None:
    holds(grid, make(model, parallel={"sequence": sequence and "tp" in grid}))


@pytest.mark.ranks
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
    ],
    ids=str,
)
def test_schedules(pipeline: dict[str, Any]) -> None:
    holds({"tp": 2, "pp": 2}, make(DROPOUT, pipeline=pipeline), num_batches=3)


@pytest.mark.ranks
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_state(zero: int) -> None:
    holds({"dp": 2, "tp": 2}, make(LLAMA, parallel={"zero": zero}))


@pytest.mark.ranks
def test_compressed_messages() -> None:
    """Stages exchange the same with and without documents: activations alone."""
    holds({"pp": 2}, make(compression={"messages": "int8"}, pipeline={"schedule": "2bw"}))


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["learned", "rotary"])
def test_a_row_has_the_losses_and_gradients_of_its_documents(model: dict[str, Any]) -> None:
    made = Model(make(model), ProcessGrid())
    texts = documents(9, 1, 20, 1, 5)
    packed = row_of(texts)
    parts = [alone(text) for text in texts]
    torch.testing.assert_close(
        made.loss(packed),
        torch.stack([made.loss(part) for part in parts]).sum(),
        rtol=1e-12,
        atol=0,
    )
    sums = [torch.stack(each).sum(0) for each in zip(*map(made.gradients, parts), strict=True)]
    for got, want in zip(made.gradients(packed), sums, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12 * want.abs().max().item())
    shuffled = row_of([texts[i] for i in (3, 2, 4, 0, 1)])
    torch.testing.assert_close(made.loss(shuffled), made.loss(packed), rtol=1e-12, atol=0)


def conversations(folder: Path) -> Conversations:
    """Conversations of 1 to 60 tokens, for rows of 37: turns of a person and answers, some of them
    empty."""
    random = np.random.default_rng(5)
    with IndexedWriter(folder / "chat", "int32") as writer:
        for turns in ((3, 4), (1, 1, 5, 2, 1), (20, 40), (2, 5), (0, 7, 3), (40, 9), (6, 3, 0, 4)):
            for length in turns:
                writer.add(random.integers(0, 61, length))
                writer.end_sequence()
            writer.end_document()
    return Conversations(IndexedDataset(folder / "chat"), 37, (0, 7))


@pytest.mark.parametrize("model", [{}, LLAMA | {"window": 4}], ids=["learned", "windows"])
def test_packed_conversations_have_the_losses_and_gradients_of_theirs_alone(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    made = Model(make(model), ProcessGrid())
    found = conversations(tmp_path)
    assert len(found) == 6  # no answer of one is within a row
    losses = []
    gradients = []
    for dataset in (ChatDataset(found, padding=3), PackedDataset(found, 37, "best_fit")):
        rows = np.arange(len(dataset))
        arrays = dataset.batch(rows, rows)
        assert dataset.num_targets(rows, rows) == (arrays["labels"] != IGNORED).sum() > 30
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        losses.append(made.loss(batch))
        gradients.append(made.gradients(batch))
    assert len(rows) == 3
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12 * want.abs().max().item())


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["learned", "rotary"])
def test_a_row_with_one_document_has_the_bits_of_a_plain_row(model: dict[str, Any]) -> None:
    made = Model(make(model), ProcessGrid())
    (text,) = documents(37)
    assert torch.equal(made.loss(row_of([text])), made.loss(alone(text)))
    for got, want in zip(made.gradients(row_of([text])), made.gradients(alone(text)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)  # a table's rows are summed


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["learned", "rotary"])
def test_other_documents_change_no_bit(model: dict[str, Any]) -> None:
    """Bits of the logits of a document, and of the gradient of its embedded tokens."""
    made = Model(make(model), ProcessGrid())
    texts = documents(9, 11, 17)
    inside = slice(9, 20)
    seen = []
    for change in (0, 7):
        others = [(text + change) % 61 for text in texts]
        batch = row_of([others[0], texts[1], others[2]])
        first, *layers, head = made.blocks.values()
        embedded = first(None, batch, None).detach().requires_grad_()
        x = embedded
        for layer in layers:
            x = layer(x, batch, None)
        logits = head.logits(x)
        loss = torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, embedded)
        seen.append((logits[:, inside], gradient[:, inside]))
    assert all(map(torch.equal, *seen))


class SomeAlone(SyntheticSamples):
    """Rows with documents; in some each token is a document, so that no label counts."""

    def __init__(self, config: Config, empty: set[int]):
        super().__init__(config.model, packed=True)
        self.empty = empty

    def _sample(self, number: int) -> dict[str, np.ndarray]:
        sample = super()._sample(number)
        if number in self.empty:
            s = len(sample["tokens"])
            entries = document_entries(np.arange(s)[None])
            sample |= {name: rows[0] for name, rows in entries.items()}
            sample["labels"] = np.full(s, IGNORED)
        return sample


def train_with_empty(
    config: Config, empty: set[int], num_batches: int
) -> tuple[list[float], dict[str, Tensor]]:
    engine, _ = start(config)
    grid = engine.grid
    loader = BatchLoader(
        SomeAlone(config, empty),
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        dp_rank=grid.replica,
        dp_size=grid.num_replicas,
    )
    losses: list[float] = []
    engine.train(loader, num_batches, lambda step: losses.extend((step.loss, step.grad_norm)))
    weights = {name: w.clone() for name, w in engine.state.weights.full_weights().items()}
    return losses, weights


@pytest.mark.ranks
def test_rows_in_which_no_label_counts() -> None:
    """All rows of a rank in batch 0, a whole batch 1: no NaN, and the losses of one process."""
    config = make(DROPOUT, train={"dtype": "fp64"}, pipeline={"num_microbatches": 1})
    size = 4
    empty = {2, 3, *range(size, 2 * size)}
    grid = from_mapping({"parallel": {"dp": 2}}, config)
    one = from_mapping({"parallel": {"dp": 1}, "pipeline": {"num_microbatches": 2}}, config)
    (losses, weights), *_ = run_ranks(train_with_empty, 2, grid, empty, 3)
    wanted, wanted_weights = train_with_empty(one, empty, 3)
    assert all(map(math.isfinite, losses))
    assert losses[2:4] == [0.0, 0.0]
    assert losses == pytest.approx(wanted, rel=1e-9)
    for name, weight in wanted_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-12)
