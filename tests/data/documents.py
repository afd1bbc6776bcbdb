"""Documents for token files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hybridpar.data.files.indexed import IndexedWriter


def add_document(
    writer: IndexedWriter, tokens: ArrayLike, sizes: Sequence[int] | None = None
) -> None:
    """Writes a document. `sizes`: the lengths of its sequences (default: the document is one
    sequence)."""
    ids = np.asarray(tokens)
    start = 0
    for length in [ids.size] if sizes is None else sizes:
        writer.add(ids[start : start + length])
        writer.end_sequence()
        start += length
    writer.end_document()
