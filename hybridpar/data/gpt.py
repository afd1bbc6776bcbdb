"""GPT samples: every stretch of seq_length + 1 tokens of the concatenated documents.

        tokens of the part    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...       seq_length = 4
        sample 0              [t0 t1 t2 t3] -> [t1 t2 t3 t4]
        sample 1                          [t4 t5 t6 t7] -> [t5 t6 t7 t8]

Neighbours share one token, so every token but the first is a label once. What is left at the end (fewer than seq_length
tokens) is not used. Documents end with an end-of-text token, put there when the corpus was prepared.
Source: Radford et al., "Language models are unsupervised multitask learners", 2019; sample layout as in Megatron-LM.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from hybridpar.data.indexed import IndexedDataset
from hybridpar.errors import DataError


class GPTDataset:
    """Samples of `seq_length` tokens from a part of a token file (default: all of it).

    `tokens`: the part, as positions (start, stop) in `indexed.tokens`.

    Raises: DataError if there are too few tokens for one sample.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, tokens: tuple[int, int] | None = None):
        start, stop = tokens if tokens is not None else (0, indexed.num_tokens)
        assert 0 <= start <= stop <= indexed.num_tokens, (start, stop, indexed.num_tokens)
        if stop - start < seq_length + 1:
            raise DataError(f"{indexed.prefix}: a part of {stop - start} tokens has no sample of {seq_length} tokens "
                            f"and their successors; at least {seq_length + 1} are needed")
        self.seq_length = seq_length
        self._tokens = indexed.tokens[start:stop]
        text = f"gpt {indexed.fingerprint} {start} {stop} {seq_length}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Number of samples."""
        return (len(self._tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> dict[str, NDArray[np.int64]]:
        """Sample i. Shapes: `tokens`, `labels` [s]."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        index = np.array([i % len(self)])
        return {name: values[0] for name, values in self.batch(index, np.zeros_like(index)).items()}

    def batch(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Several samples; they are the same in every epoch.

        Shapes: `indices`, `epochs` [b]; returns `tokens`, `labels` [b, s].
        """
        stretch = np.arange(self.seq_length + 1)
        ids = self._tokens[indices[:, None] * self.seq_length + stretch].astype(np.int64)
        return {"tokens": np.ascontiguousarray(ids[:, :-1]), "labels": np.ascontiguousarray(ids[:, 1:])}

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int:
        """How many labels of these samples count: all of them."""
        return len(indices) * self.seq_length
