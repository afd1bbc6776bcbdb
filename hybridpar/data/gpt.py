"""GPT samples: stretches of seq_length + 1 tokens of the concatenated documents, whose order is
another in each epoch.

    documents of the part      D0 D1 D2 D3 D4 ..
    epoch 0, a permutation     D3 D0 D4 D2 D1 ..      and after the last one the first again: a ring
    its tokens, from an        t0 t1 t2 t3 t4 t5 t6 t7 t8 ..       seq_length = 4
    offset of that epoch on
    sample 0                  [t0 t1 t2 t3] -> [t1 t2 t3 t4]
    sample 1                              [t4 t5 t6 t7] -> [t5 t6 t7 t8]

Neighbours share one token, so every token is a label at most once in an epoch; fewer than
seq_length + 1 are none. The permutation and the offset are functions of (seed, epoch), so the state
of a run stays one number; a table of the documents' places is made when an epoch is first asked
for. The offset cuts a part of few long documents differently in each epoch. Without a seed
(validation) the documents stay as they lie. They end with an end-of-text token, put there when the
corpus was prepared.

Packed ("stream"), the same stretches also say where each token's document begins in the row: tokens
attend within their document, positions count from its start, and a label that is the first token of
another document does not count.
Source: Radford et al., "Language models are unsupervised multitask learners", 2019; sample layout
    as in Megatron-LM.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridpar.data.bits import derive, root_key
from hybridpar.data.files.indexed import IndexedDataset
from hybridpar.data.order import SampleOrder
from hybridpar.data.sample_rules import IGNORED, document_entries
from hybridpar.errors import DataError

_MAX_DOCUMENTS = 1 << 24
"""Most documents that are permuted one by one, at 16 bytes each; if there are more, groups of
neighbours are permuted."""
_CHUNK = 1 << 18
_KEPT_EPOCHS = 2  # a batch may span two epochs


class _Epoch(NamedTuple):
    """Order and positions of the documents in an epoch. Shapes: [D], [D + 1]."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    offset: int


class GPTDataset:
    """Samples of `seq_length` tokens from a split of a token file.

    Args:
        tokens: The split, as positions (start, stop) in `indexed.tokens`. Default: all.
        seed: Seed of the order of documents, which differs in each epoch. None: the order of the
            file.
        packed: Whether samples say where documents begin.

    Raises:
        DataError: There are too few tokens for one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        seq_length: int,
        tokens: tuple[int, int] | None = None,
        *,
        seed: int | None = None,
        packed: bool = False,
    ):
        start, stop = tokens if tokens is not None else (0, indexed.num_tokens)
        assert 0 <= start <= stop <= indexed.num_tokens, (start, stop, indexed.num_tokens)
        if stop - start < seq_length + 1:
            raise DataError(
                f"{indexed.prefix}: a split of {stop - start} tokens is too short for one "
                f"sample; seq_length = {seq_length} requires at least {seq_length + 1} tokens"
            )
        self.seq_length = seq_length
        self._tokens = indexed.tokens[start:stop]
        self._documents = _document_starts(indexed, start, stop)
        self._first_tokens = boundaries(indexed, start, stop) if packed else None
        self._order = (
            None if seed is None else SampleOrder(len(self._documents) - 1, seed, "data.documents")
        )
        self._offset_key = root_key(seed or 0, "data.offset")
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        text = f"gpt {indexed.fingerprint} {start} {stop} {seq_length}" + (
            "" if seed is None else f" permuted {seed}"
        )
        if packed:
            text += " packed"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of samples."""
        return (len(self._tokens) - 1) // self.seq_length

    def batch(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> dict[str, NDArray[np.int64]]:
        """Return samples by number, each in its epoch.

        Shapes: `indices`, `epochs` [b]; returns `tokens`, `labels` [b, s]; packed also the entries
        of `document_entries`.
        """
        places = self._places(indices, epochs)
        ids = self._tokens[places].astype(np.int64)
        tokens = np.ascontiguousarray(ids[:, :-1])
        labels = np.ascontiguousarray(ids[:, 1:])
        if self._first_tokens is None:
            return {"tokens": tokens, "labels": labels}
        offsets = self._offsets(places)
        # not in place: with one row, tokens and labels are views of the same memory
        labels = np.where(offsets[:, 1:] == 0, IGNORED, labels)
        starts = np.maximum(np.arange(self.seq_length) - offsets[:, :-1], 0)
        return {"tokens": tokens, "labels": labels, **document_entries(starts)}

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int:
        """Return how many labels count in these samples: all, or all but the first tokens of packed
        documents."""
        number = len(indices) * self.seq_length
        if self._first_tokens is not None:
            next_tokens = self._offsets(self._places(indices, epochs)[:, 1:])
            number -= int((next_tokens == 0).sum())
        return number

    def _places(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the split of the tokens of samples. Shapes: [b] -> [b, s + 1]."""
        places = indices[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        if self._order is not None:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                places[mine] = self._permuted(places[mine], self._epoch(int(epoch)))
        return places

    def _offsets(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of its document come before each token. Shapes: unchanged."""
        assert self._first_tokens is not None
        documents = np.searchsorted(self._first_tokens, places, side="right") - 1
        return places - self._first_tokens[documents]

    def _permuted(self, places: NDArray[np.int64], epoch: _Epoch) -> NDArray[np.int64]:
        """Return the positions in the split for positions in an epoch. Shapes: [b, s + 1] both."""
        places = (places + epoch.offset) % len(self._tokens)
        documents = np.searchsorted(epoch.starts, places, side="right") - 1
        return self._documents[epoch.order[documents]] + places - epoch.starts[documents]

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            assert self._order is not None
            number = self._order.num_samples
            order = np.empty(number, np.int64)
            first = epoch * number
            for start in range(0, number, _CHUNK):
                stop = min(start + _CHUNK, number)
                order[start:stop] = self._order.index(np.arange(first + start, first + stop))
            starts = np.zeros(number + 1, np.int64)
            np.cumsum(np.diff(self._documents)[order], out=starts[1:])
            offset = int(derive(self._offset_key, epoch)[0]) % len(self._tokens)
            self._epochs[epoch] = _Epoch(order, starts, offset)
            while len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]


class TokenDocuments:
    """The documents of a split of a token file, to pack into rows. The last token of each is a
    label only; a document of one token has no label and is left out.

    Raises:
        DataError: No document has two tokens.
    """

    def __init__(self, indexed: IndexedDataset, tokens: tuple[int, int]):
        start, stop = tokens
        places = boundaries(indexed, start, stop)
        lengths = np.diff(places) - 1
        kept = lengths > 0
        if not kept.any():
            raise DataError(
                f"{indexed.prefix}: no document of the split has two tokens; a document needs a "
                "token to predict"
            )
        self._tokens = indexed.tokens[start:stop]
        self._starts = places[:-1][kept]
        self.lengths = lengths[kept]
        text = f"documents {indexed.fingerprint} {start} {stop}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def read(
        self, document: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens of a document, and the tokens that follow each as labels."""
        first = self._starts[document]
        ids = self._tokens[first + start : first + stop + 1].astype(np.int64)
        return ids[:-1], ids[1:]

    def num_labels(self, document: int, start: int, stop: int) -> int:
        """Return how many of these labels count: all."""
        return stop - start


def boundaries(indexed: IndexedDataset, start: int, stop: int) -> NDArray[np.int64]:
    """Return where documents begin in tokens[start:stop], and its end. Shapes: [D + 1]."""
    places = np.unique(np.clip(indexed.document_starts, start, stop)) - start
    return places.astype(np.int64, copy=False)


def _document_starts(indexed: IndexedDataset, start: int, stop: int) -> NDArray[np.int64]:
    """Return the starts of the groups of documents that are permuted, and the end of
    tokens[start:stop]. Shapes: [D + 1]."""
    starts = boundaries(indexed, start, stop)
    step = -(-len(starts) // _MAX_DOCUMENTS)
    return np.append(starts[:-1:step], starts[-1])
