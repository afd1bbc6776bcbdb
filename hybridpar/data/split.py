"""Which part of a corpus is trained on and which is held out."""

from __future__ import annotations

import math

import numpy as np

from hybridpar.data.indexed import IndexedDataset
from hybridpar.errors import config_error

Part = tuple[int, int]


def split_tokens(indexed: IndexedDataset, fraction: float, min_tokens: int) -> tuple[Part, Part | None]:
    """Positions (start, stop) of the training part, and of the last `fraction` of the tokens (None if 0), to hold out.

    The cut is between documents if that can make the held-out part half to twice as long as asked for, else between
    sequences, else (a corpus that is one long text) anywhere. It depends on nothing but the index.

    Raises: ConfigError if either part would have fewer than `min_tokens`.
    """
    total = indexed.num_tokens
    if not 0 <= fraction < 1:
        raise config_error("data.split", fraction, "must be a share of the corpus, from 0 to below 1", "0.02")
    if fraction == 0:
        return (0, total), None
    wanted = fraction * total
    cut = round(total - wanted)
    for places in (indexed.document_starts, indexed.sequence_starts):
        right = int(np.searchsorted(places, cut))
        near = min((int(p) for p in places[max(right - 1, 0):right + 1]), key=lambda p: abs(p - cut))
        if wanted / 2 <= total - near <= 2 * wanted and 0 < near < total:
            cut = near
            break
    if min(cut, total - cut) < min_tokens:
        works = math.ceil(min_tokens / total * 2e4) / 1e4
        rule = f"parts {indexed.prefix} into {cut} and {total - cut} tokens, but a sample needs {min_tokens}"
        better = str(works) if works < 0.5 else "0 (no validation), or more text"
        if total < min_tokens:  # not even as one part
            better = "more text, or a smaller model.seq_length"
        raise config_error("data.split", fraction, rule, better)
    return (0, cut), (cut, total)
