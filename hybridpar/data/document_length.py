"""Length of the documents that share a row, which decides how long attention takes.

Attention within documents of n tokens has about n^2 / 2 pairs of a query and a key, so documents of
lengths n_1, n_2, .. take as long as equal ones of length

    L = (n_1^2 + n_2^2 + ..) / (n_1 + n_2 + ..)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import Config
from hybridpar.data.chat import CHAT, Conversations
from hybridpar.data.files.indexed import IndexedDataset, indexed_prefix, is_indexed
from hybridpar.data.gpt import TokenDocuments, boundaries
from hybridpar.data.packed_rows import stream_layout


def with_document_length(config: Config) -> Config:
    """Return the configuration with `data.document_length` of its token files.

    Nothing changes if it is set, if nothing is packed, or if a corpus is no .bin/.idx pair: the
    lengths of texts are known once they are tokenized.

    Raises:
        DataError: A file is damaged, or has no document that can be packed.
        ConfigError: No conversation has an answer within a row.
    """
    data = config.data
    prefixes = [indexed_prefix(name) for name in data.corpus]
    if not data.is_packed or data.document_length or not all(map(is_indexed, prefixes)):
        return config
    found = [_pieces(config, IndexedDataset(prefix)) for prefix in prefixes]
    weights = data.weights or tuple(float(lengths.sum()) for lengths in found)
    means = [float(np.average(lengths, weights=lengths)) for lengths in found]
    length = float(np.average(means, weights=weights))
    return replace(config, data=replace(data, document_length=round(length, 1)))


def _pieces(config: Config, indexed: IndexedDataset) -> NDArray[np.int64]:
    """Return the lengths of all documents, cut where rows end."""
    seq_length = config.model.tokens_per_sample
    if config.data.packing == "stream":
        layout = stream_layout(np.diff(boundaries(indexed, 0, indexed.num_tokens)), seq_length)
        return layout.stop - layout.start
    if config.data.format == CHAT:
        every = (0, len(indexed.document_starts) - 1)
        return Conversations(indexed, seq_length, every).lengths
    lengths = TokenDocuments(indexed, (0, indexed.num_tokens)).lengths
    full = np.repeat(seq_length, (lengths // seq_length).sum())
    rest = lengths % seq_length
    return np.concatenate([full, rest[rest > 0]])
