"""Rows of several documents: from token files, text and datasets, in both layouts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import Config, DataConfig, ModelConfig, TrainConfig
from hybridpar.data import BatchLoader, GPTDataset, open_data
from hybridpar.data.gpt import TokenDocuments
from hybridpar.data.packed_rows import (
    PackedDataset,
    best_fit_decreasing,
    best_fit_layout,
    mean_visible_share,
    stream_layout,
)
from hybridpar.data.sample_rules import IGNORED
from hybridpar.errors import ConfigError, DataError
from hybridpar.models.cost import visible_share
from hybridpar.validate import resolve

LAYOUTS = {"stream": stream_layout, "best_fit": best_fit_layout}


def rows_of(dataset: Any, epoch: int = 0) -> dict[str, np.ndarray]:
    indices = np.arange(len(dataset))
    return dataset.batch(indices, np.full_like(indices, epoch))


def documents_of(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Return the tokens of each document of each row, padding included."""
    found = []
    for tokens, starts in zip(batch["tokens"], batch["document_start"], strict=True):
        firsts = np.unique(starts)
        found += [tuple(part.tolist()) for part in np.split(tokens, firsts[1:])]
    return found


def check_entries(batch: dict[str, np.ndarray]) -> None:
    """Starts name the first token of each document, and positions count from there."""
    starts = batch["document_start"]
    places = np.arange(starts.shape[1])
    assert starts.dtype == np.int32
    assert batch["positions"].dtype == np.int64
    assert (starts <= places).all()
    assert (np.diff(starts, axis=1) >= 0).all()
    np.testing.assert_array_equal(np.take_along_axis(starts, starts.astype(np.int64), 1), starts)
    np.testing.assert_array_equal(batch["positions"], places - starts)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(1, 16),
    st.sampled_from(sorted(LAYOUTS)),
)
def test_each_token_is_in_one_row(lengths, seq_length, name):
    layout = LAYOUTS[name](np.array(lengths), seq_length)
    seen: Counter[tuple[int, int]] = Counter()
    for row in range(len(layout)):
        segments = range(layout.rows[row], layout.rows[row + 1])
        sizes = [layout.stop[i] - layout.start[i] for i in segments]
        assert sizes
        assert min(sizes) > 0
        assert sum(sizes) <= seq_length
        for i in segments:
            seen.update(
                (int(layout.document[i]), at) for at in range(layout.start[i], layout.stop[i])
            )
    assert seen == Counter((d, at) for d, length in enumerate(lengths) for at in range(length))
    if name == "stream":
        assert len(layout) == -(-sum(lengths) // seq_length)
    else:  # a document is cut only if it is longer than a row, and then into full rows
        short = [n for n in lengths if n <= seq_length]
        pieces = sum(-(-n // seq_length) for n in lengths)
        assert len(layout.document) == pieces
        assert len(layout) <= 1 + 2 * sum(lengths) // seq_length
        assert len(layout) <= len(short) + sum(-(-n // seq_length) for n in lengths)


def test_the_fullest_row_with_room_is_taken():
    assert best_fit_decreasing([7, 6, 3, 3, 2, 1], 10).tolist() == [0, 1, 0, 1, 2, 1]
    assert best_fit_decreasing([4, 4, 4], 4).tolist() == [0, 1, 2]


def test_a_row_is_almost_as_full_as_can_be():
    """Best-fit decreasing needs at most 11 / 9 of the fewest rows, and few more for many short
    documents."""
    lengths = np.random.default_rng(1).integers(1, 300, 5000)
    assert len(best_fit_layout(lengths, 512)) <= 1.01 * lengths.sum() / 512


@pytest.mark.parametrize("seed", [None, 3])
def test_a_stream_says_where_documents_begin(make_indexed, seed):
    """Token i of document d is 100 d + i, so that a document shows its own boundaries."""
    sizes = [3, 1, 25, 8, 1, 1, 40, 2]
    indexed = make_indexed([[n] for n in sizes], step=100)
    plain = GPTDataset(indexed, 9, seed=seed)
    packed = GPTDataset(indexed, 9, seed=seed, packed=True)
    assert packed.fingerprint != plain.fingerprint
    assert len(packed) == len(plain)
    for epoch in range(3):
        batch = rows_of(packed, epoch)
        check_entries(batch)
        tokens = batch["tokens"]
        np.testing.assert_array_equal(tokens, rows_of(plain, epoch)["tokens"])
        known = np.where(
            rows_of(plain, epoch)["labels"] % 100 == 0, IGNORED, rows_of(plain, epoch)["labels"]
        )
        np.testing.assert_array_equal(batch["labels"], known)
        # inside a row a document goes on from its first token there
        np.testing.assert_array_equal(
            tokens - np.take_along_axis(tokens, batch["document_start"].astype(np.int64), 1),
            batch["positions"],
        )
        begins = (batch["positions"] == 0)[:, 1:]
        np.testing.assert_array_equal(begins, (tokens % 100 == 0)[:, 1:])
        indices = np.arange(len(packed))
        for i in indices.tolist():  # a row alone is the row among others
            alone = packed.batch(indices[i : i + 1], np.full(1, epoch))
            for name, rows in alone.items():
                np.testing.assert_array_equal(rows[0], batch[name][i])
        number = int((batch["labels"] != IGNORED).sum())
        assert packed.num_targets(indices, np.full_like(indices, epoch)) == number


def test_documents_of_a_token_file_in_rows(make_indexed):
    sizes = [3, 1, 25, 8, 1, 40, 2, 10]
    values = [100 * d + i for d, n in enumerate(sizes) for i in range(n)]
    indexed = make_indexed([[n] for n in sizes], step=100)
    rows = PackedDataset(TokenDocuments(indexed, (0, sum(sizes))), 9, "best_fit")
    batch = rows_of(rows)
    check_entries(batch)
    real = batch["labels"] != IGNORED
    np.testing.assert_array_equal(batch["labels"][real], batch["tokens"][real] + 1)
    labels = sorted(batch["labels"][real].tolist())
    assert labels == [v for v in values if v % 100], "each token but the first of a document"
    assert (batch["tokens"][~real] == 0).all()
    assert (batch["positions"][~real] == 0).all(), "a padding token is alone"
    assert rows.num_targets(np.arange(len(rows)), np.zeros(len(rows), np.int64)) == len(labels)
    with pytest.raises(DataError, match="no document of the split has two tokens"):
        TokenDocuments(make_indexed([[1]] * 30), (0, 30))


def samples(*sizes: int) -> list[dict[str, Any]]:
    """Token 10 d + i of sample d, whose first label does not count."""
    found = []
    for d, n in enumerate(sizes):
        tokens = 20 * d + np.arange(n)
        found.append({"tokens": tokens, "labels": [IGNORED, *(tokens[1:] + 1)]})
    return found


def opened(train: Any, folder: Path, packing: str, **model: Any) -> Any:
    config = Config(
        ModelConfig(**{"vocab_size": 400, "seq_length": 12} | model),
        data=DataConfig(cache=str(folder), packing=packing),
        train=TrainConfig(seed=1),
    )
    return open_data(config, quiet=True, datasets={"train": train, "valid": None}).train


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_samples_of_a_dataset_share_rows(tmp_path, packing):
    """All tokens once, each with its label, on every grid and from every sample on."""
    sizes = (5, 12, 1, 1, 19, 7, 3, 3)
    given = samples(*sizes)
    stream = opened(given, tmp_path, packing)
    number = len(stream.datasets[0])
    assert number == {"stream": 5, "best_fit": 5}[packing]
    batch = stream.batch(np.arange(number))
    check_entries(batch)
    rows = Counter(zip(batch["tokens"].flat, batch["labels"].flat, strict=True))
    wanted = Counter(
        pair for sample in given for pair in zip(sample["tokens"], sample["labels"], strict=True)
    )
    padding = number * 12 - sum(sizes)
    wanted[0, IGNORED] += padding
    assert rows == wanted
    whole = {tuple(sample["tokens"].tolist()) for sample in given if len(sample["tokens"]) <= 12}
    if packing == "best_fit":
        assert whole <= set(documents_of(batch))
    assert stream.num_targets(np.arange(number)) == int((batch["labels"] != IGNORED).sum())
    loaders = [
        BatchLoader(stream, micro_batch_size=1, num_microbatches=2, dp_rank=r, dp_size=2)
        for r in range(2)
    ]
    whole_batch = BatchLoader(stream, micro_batch_size=4, num_microbatches=1).microbatch(3, 0)
    for r, loader in enumerate(loaders):
        for index in range(2):
            part = loader.microbatch(3, index)
            for name, rows_of_part in part.items():
                assert rows_of_part[0].equal(whole_batch[name][2 * index + r])


def test_text_in_rows(tmp_path):
    text = tmp_path / "some.jsonl"
    lines = [f'{{"text": "Document {i}. {"word " * (i % 23)}"}}' for i in range(80)]
    text.write_text("\n".join(lines))
    config = Config(
        ModelConfig(vocab_size=300, seq_length=32),
        data=DataConfig((str(text),), cache=str(tmp_path / "c"), packing="best_fit", split=0.1),
        train=TrainConfig(seed=1, eval_interval=1),
    )
    data = open_data(config, quiet=True)
    for part in (data.train, data.valid[""]):
        (rows,) = part.datasets
        batch = part.batch(np.arange(len(rows)))
        check_entries(batch)
        assert part.num_targets(np.arange(len(rows))) == int((batch["labels"] != IGNORED).sum())
    prepared = data.prepared[0]
    kept = sum(
        int((part.batch(np.arange(len(part.datasets[0])))["labels"] != IGNORED).sum())
        for part in (data.train, data.valid[""])
    )
    assert kept == prepared.num_tokens - prepared.num_documents


@pytest.mark.parametrize(
    ("train", "packing", "model", "message"),
    [
        ([{"tokens": [1, 2], "labels": [2]}], "best_fit", {}, "2 tokens and 1 labels"),
        ([{"tokens": [], "labels": []}], "stream", {}, r"tokens has shape \[0\]; must have one"),
        ([{"tokens": [[1]], "labels": [1]}], "stream", {}, r"tokens has shape \[1, 1\]"),
        ([{"tokens": [1, 400], "labels": [1, 2]}], "stream", {}, "is 400, out of range"),
        ([{"tokens": [1], "labels": [1], "positions": [0]}], "best_fit", {}, "unknown key"),
        ([], "best_fit", {}, "is empty"),
        (
            [{"tokens": range(12), "labels": range(12), "document_start": [*range(11), 12]}],
            "none",
            {"seq_length": 12},
            r"document_start\[11\] is 12, out of range: 0 to 11",
        ),
        (
            [{"tokens": range(12), "labels": range(12), "document_start": [0, 0, 3, *[3] * 9]}],
            "none",
            {},
            r"document_start\[2\] is 3, out of range: 0 to 2",
        ),
    ],
)
def test_samples_that_cannot_be(tmp_path, train, packing, model, message):
    with pytest.raises(DataError, match=message):
        opened(train, tmp_path, packing, **model)


def test_data_that_cannot_be_packed(tmp_path):
    with pytest.raises(ConfigError, match="requires a map-style dataset"):
        opened(iter(samples(3)), tmp_path, "best_fit")
    with pytest.raises(ConfigError, match=r"data\.packing = 'stream': requires model\.kind = gpt"):
        resolve(Config(ModelConfig(kind="bert"), data=DataConfig(packing="stream")), 1)


def test_rows_that_a_user_packed(tmp_path):
    """Positions follow from document_start, unless they are given."""
    row = {"tokens": np.arange(12), "labels": np.arange(12), "document_start": [0] * 5 + [5] * 7}
    batch = opened([row, row], tmp_path, "none").batch(np.arange(2))
    check_entries(batch)
    given = [row | {"positions": np.zeros(12, int)}]
    assert (opened(given, tmp_path, "none").batch(np.arange(1))["positions"] == 0).all()


class _Rows:
    """Rows with documents of 5, 1 and 6 tokens."""

    fingerprint = ""

    def batch(self, counter: np.ndarray) -> dict[str, np.ndarray]:
        starts = np.repeat([0, 5, 6], [5, 1, 6]).astype(np.int32)
        return {"document_start": np.tile(starts, (len(counter), 1))}


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({}, (None,) * 3),
        ({"window": 3}, (3, 3, 3)),
        ({"window": 4, "window_pattern": "110"}, (4, 4, None)),
    ],
)
def test_documents_leave_a_share_of_what_windows_show(
    settings: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    model = ModelConfig(num_layers=3, seq_length=12, **settings)
    packed, alone = (
        sum(visible_share(12, documents, window) for window in windows)
        for documents in ((5, 1, 6), (12,))
    )
    rows: Any = _Rows()
    assert mean_visible_share(rows, model) == pytest.approx(packed / alone)
