"""Rows of seq_length tokens that hold several documents, which do not see each other.

    packing      a row                                          documents
    stream       the next seq_length tokens of all documents    cut where rows end
    best_fit     documents that fit, the longest first          whole, unless longer than a row

Both layouts are fixed when the data are opened, so that a row is a sample like any other: its
number says what is in it, on every grid and after every restart, and the order of rows is another
in each epoch. It does not matter which documents share a row, as none sees another.

    row          [a a a a a b b c c c . .]       . padding: its labels do not count
    labels       [a a a a - b - c c - - -]       - does not count
    starts       [0 0 0 0 0 5 5 7 7 7 10 11]     `document_start`: the first token that a token sees
    positions    [0 1 2 3 4 0 1 0 1 2 0 0]

Source: best-fit decreasing, arXiv 2404.10830.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import ModelConfig
from hybridpar.data.loader import Samples
from hybridpar.data.sample_rules import IGNORED, document_entries

Layout = Literal["stream", "best_fit"]


class Documents(Protocol):
    """Documents to pack, each of some tokens with a label for each.

    Attributes:
        lengths: Number of tokens of each document, at least 1. Shapes: [D].
        fingerprint: Identity of the documents.
    """

    lengths: NDArray[np.int64]
    fingerprint: str

    def read(
        self, document: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens from `start` to `stop` of a document, and their labels."""

    def num_labels(self, document: int, start: int, stop: int) -> int:
        """Return how many of these labels count."""


@dataclass(frozen=True)
class RowLayout:
    """Segments of documents, row by row.

    Attributes:
        document, start, stop: The tokens of each segment. Shapes: [segments].
        rows: The first segment of each row, and the end. Shapes: [rows + 1].
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows) - 1


def stream_layout(lengths: NDArray[np.int64], seq_length: int) -> RowLayout:
    """Cut all documents, one after the other, into rows of seq_length tokens; the last is
    shorter."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    cuts = np.unique(np.concatenate([np.arange(0, total, seq_length), ends - lengths, [total]]))
    first = cuts[:-1]
    document = np.searchsorted(ends, first, side="right")
    begin = (ends - lengths)[document]
    rows = np.searchsorted(first, np.arange(0, total, seq_length))
    return RowLayout(document, first - begin, cuts[1:] - begin, np.append(rows, len(first)))


def best_fit_layout(lengths: NDArray[np.int64], seq_length: int) -> RowLayout:
    """Put each document into the fullest row that has room for it, the longest documents first.

    A document longer than a row is first cut into pieces of seq_length tokens.
    """
    pieces = -(-lengths // seq_length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * seq_length
    stop = np.minimum(start + seq_length, lengths[document])
    sizes = stop - start
    order = np.argsort(-sizes, kind="stable")
    row = best_fit_decreasing(sizes[order].tolist(), seq_length)
    by_row = order[np.argsort(row, kind="stable")]
    counts = np.bincount(row)
    rows = np.concatenate([[0], np.cumsum(counts)])
    return RowLayout(document[by_row], start[by_row], stop[by_row], rows)


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> NDArray[np.int64]:
    """Return the row of each item, given the items from the largest to the smallest.

    Each goes to a row whose free space is the least that suffices, of these the newest, or to a new
    row. Takes O(items * log(capacity)).
    """
    rows = np.empty(len(sizes), np.int64)
    waiting: dict[int, list[int]] = {}
    """Rows by their free space."""
    spaces: list[int] = []
    """Free spaces that some row has, ascending."""
    count = 0
    for item, size in enumerate(sizes):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            row = count
            space = capacity
            count += 1
        else:
            space = spaces[at]
            row = waiting[space].pop()
            if not waiting[space]:
                del waiting[space]
                del spaces[at]
        rows[item] = row
        left = space - size
        if left:
            if left not in waiting:
                waiting[left] = []
                insort(spaces, left)
            waiting[left].append(row)
    return rows


class PackedDataset:
    """Rows of packed documents, as a member of a Blend.

    Args:
        documents: The documents.
        seq_length: Tokens of a row.
        layout: How documents are put into rows.
    """

    def __init__(self, documents: Documents, seq_length: int, layout: Layout):
        make = {"stream": stream_layout, "best_fit": best_fit_layout}[layout]
        self._documents = documents
        self._layout = make(documents.lengths, seq_length)
        self.seq_length = seq_length
        text = f"packed {layout} {seq_length} {documents.fingerprint}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._layout)

    def batch(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Return rows by number. Shapes: [b] -> `tokens`, `labels` [b, s], and the entries of
        `document_entries`."""
        shape = len(indices), self.seq_length
        tokens = np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        # padding: each token is alone
        starts = np.broadcast_to(np.arange(self.seq_length), shape).copy()
        for i, row in enumerate(indices.tolist()):
            at = 0
            for document, start, stop in self._segments(row):
                end = at + stop - start
                tokens[i, at:end], labels[i, at:end] = self._documents.read(document, start, stop)
                starts[i, at:end] = at
                at = end
        return {"tokens": tokens, "labels": labels, **document_entries(starts)}

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int:
        """Return how many labels count in these rows."""
        return sum(
            self._documents.num_labels(*segment)
            for row in indices.tolist()
            for segment in self._segments(row)
        )

    def _segments(self, row: int) -> list[tuple[int, int, int]]:
        layout = self._layout
        inside = slice(layout.rows[row], layout.rows[row + 1])
        return list(
            zip(
                layout.document[inside].tolist(),
                layout.start[inside].tolist(),
                layout.stop[inside].tolist(),
                strict=True,
            )
        )


_MEASURED_ROWS = 64
"""Rows of which the mean share of causal attention is taken."""


def mean_visible_share(samples: Samples, model: ModelConfig) -> float:
    """Return the pairs of a query and a visible key over those in rows of one document, in all
    layers with their windows, from the first rows of packed samples."""
    starts = samples.batch(np.arange(_MEASURED_ROWS))["document_start"]
    alone = np.arange(starts.shape[1]) + 1
    packed = alone - starts
    limits = [model.layer_window(layer) or model.seq_length for layer in range(model.num_layers)]
    visible, all_keys = (
        sum(float(np.minimum(keys, limit).mean()) for limit in limits) for keys in (packed, alone)
    )
    return visible / all_keys
