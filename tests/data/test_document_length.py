"""The length of equal documents that take attention as long as a corpus's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hybridpar.config import Config, DataConfig, ModelConfig
from hybridpar.data.document_length import with_document_length
from hybridpar.data.files.indexed import IndexedWriter


def written(folder: Path, name: str, lengths: Sequence[int]) -> str:
    with IndexedWriter(folder / name, "int32") as writer:
        for length in lengths:
            writer.add(np.ones(length, np.int32))
            writer.end_sequence()
            writer.end_document()
    return str(folder / name)


def length_of(corpus: Sequence[str], packing: str, **data: object) -> float:
    config = Config(
        model=ModelConfig(seq_length=8, vocab_size=50),
        data=DataConfig(corpus=tuple(corpus), packing=packing, **data),  # type: ignore[arg-type]
    )
    return with_document_length(config).data.document_length


def test_stream_cuts_documents_where_rows_end(tmp_path: Path) -> None:
    """Rows of 8 tokens: 3 and 5, 8, 8, 4."""
    corpus = written(tmp_path, "a", [3, 5, 20])
    assert length_of([corpus], "stream") == round((9 + 25 + 64 + 64 + 16) / 28, 1)
    assert length_of([f"{corpus}.bin"], "stream") == length_of([corpus], "stream")


def test_best_fit_cuts_only_what_is_longer_than_a_row(tmp_path: Path) -> None:
    """The last token of a document is a label alone: 2, 4, and 8, 8 and 3."""
    corpus = written(tmp_path, "a", [3, 5, 20])
    assert length_of([corpus], "best_fit") == round((4 + 16 + 64 + 64 + 9) / 25, 1)


def test_corpora_count_by_their_tokens_or_weights(tmp_path: Path) -> None:
    corpora = [written(tmp_path, "a", [8, 8]), written(tmp_path, "b", [2] * 24)]
    assert length_of(corpora, "stream") == (16 * 8 + 48 * 2) / 64
    assert length_of(corpora, "stream", weights=(1.0, 1.0)) == 5.0


@pytest.mark.parametrize(
    ("packing", "data", "expected"),
    [("none", {}, 0.0), ("stream", {"document_length": 3.5}, 3.5)],
    ids=["not packed", "set"],
)
def test_a_setting_stays(
    tmp_path: Path, packing: str, data: dict[str, float], expected: float
) -> None:
    assert length_of([written(tmp_path, "a", [3, 5, 20])], packing, **data) == expected


def test_lengths_of_texts_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n')
    corpora = [written(tmp_path, "a", [3, 5, 20]), str(tmp_path / "text.jsonl")]
    assert length_of(corpora, "stream") == 0.0
