"""Random micro-batches of the right form: for verify, benchmarks and tests. A sample depends on its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hybridpar.config import ModelConfig


@dataclass(frozen=True)
class SyntheticLoader:
    """Same interface as BatchLoader. `padding`: samples end early, at random, so replicas differ in what counts.

    Shapes: tokens, labels, token_types, padding_mask [b, s]; sentence_labels [b].
    """

    model: ModelConfig
    micro_batch_size: int
    num_microbatches: int
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 0
    padding: bool = True

    def first_sample(self, index: int) -> int:
        return (index * self.dp_size + self.dp_rank) * self.micro_batch_size

    @property
    def _batch_size(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.dp_size

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        first = batch * self._batch_size + self.first_sample(index)
        samples = [self._sample(n) for n in range(first, first + self.micro_batch_size)]
        return {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}

    @lru_cache(maxsize=64)  # noqa: B019 (frozen, lives as long as the run)
    def num_targets(self, batch: int) -> int:
        first = batch * self._batch_size
        return sum(int((self._sample(n)["labels"] != -100).sum()) for n in range(first, first + self._batch_size))

    def _sample(self, number: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([self.seed, number])
        s, v = self.model.seq_length, self.model.vocab_size
        tokens = random.integers(0, v, s + 1)
        length = int(random.integers(max(1, s // 2), s + 1)) if self.padding else s
        real = np.arange(s) < length
        if self.model.kind == "gpt":
            return {"tokens": tokens[:-1], "labels": np.where(real, tokens[1:], -100)}
        masked = real & (random.random(s) < 0.15)
        masked[0] = True
        return {
            "tokens": np.where(real, tokens[:-1], 0),
            "labels": np.where(masked, tokens[1:], -100),
            "token_types": (np.arange(s) >= length // 2).astype(np.int64),
            "padding_mask": real,
            "sentence_labels": np.asarray(random.integers(0, 2)),
        }
