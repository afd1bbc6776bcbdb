from collections.abc import Callable, Sequence

import numpy as np
import pytest
from data.documents import add_document

from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter


@pytest.fixture
def make_indexed(tmp_path) -> Callable[..., IndexedDataset]:
    """Writes documents given as the lengths of their sentences; tokens count upwards from
    `first`, or by `step` from document to document."""

    def make(
        documents: Sequence[Sequence[int]], first: int = 0, name: str = "made", step: int = 0
    ) -> IndexedDataset:
        token = first
        with IndexedWriter(tmp_path / name, "<i4") as writer:
            for sizes in documents:
                add_document(writer, np.arange(token, token + sum(sizes)), sizes)
                token += step or sum(sizes)
        return IndexedDataset(tmp_path / name)

    return make
