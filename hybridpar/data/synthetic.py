"""Random micro-batches of the right form, for verify, benchmarks and tests. A sample depends
only on its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import Config, ModelSpec
from hybridpar.data.loader import BatchLoader
from hybridpar.data.mapped import as_arrays
from hybridpar.data.sample_rules import IGNORED, document_entries


class SyntheticLoader(BatchLoader):
    """A loader of SyntheticSamples that end early at random."""

    def __init__(
        self,
        model: ModelSpec,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ):
        super().__init__(
            SyntheticSamples(model, seed),
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )


def synthetic_loader(
    config: Config, replica: int = 0, num_replicas: int = 1, *, seed: int = 0
) -> BatchLoader:
    """Return the random micro-batches of one replica that trains a configuration."""
    return BatchLoader(
        SyntheticSamples(config.model, seed, packed=config.data.is_packed),
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        dp_rank=replica,
        dp_size=num_replicas,
    )


@dataclass
class SyntheticSamples:
    """An endless stream of random samples.

    Shapes: tokens, labels, token_types, padding_mask [b, s]; sentence_labels [b]; packed also
    document_start and positions [b, s].

    Attributes:
        model: The model, which says the form of samples.
        seed: Seed of the samples.
        padding: Whether samples end early at random, so that replicas have different label counts.
        packed: Whether each row holds several documents, of random lengths.
        fingerprint: See Samples.
    """

    model: ModelSpec
    seed: int = 0
    padding: bool = True
    packed: bool = False
    fingerprint: str = "synthetic"

    def batch(self, counter: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        samples = [self._sample(n) for n in counter.tolist()]
        return {name: np.stack([s[name] for s in samples]) for name in samples[0]}

    def num_targets(self, counter: NDArray[np.int64]) -> int:
        if self.model.text_format is None:
            return sum(self.model.num_targets(self._sample(n)) for n in counter.tolist())
        return sum(int((self._sample(n)["labels"] != -100).sum()) for n in counter.tolist())

    def num_repeats(self, count: int) -> int:
        return 0

    def _sample(self, number: int) -> dict[str, np.ndarray]:
        if (text := self.model.text_format) is None:
            return as_arrays(self.model.sample(number, self.seed), "sample")
        sample = text.sample(number, self.seed, padding=self.padding)
        return self._with_documents(sample, number) if self.packed else sample

    def _with_documents(self, sample: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        """Cut a row into documents, each of whose last labels is the first token of the next."""
        s = len(sample["tokens"])
        random = np.random.default_rng([self.seed, number, 1])
        is_first = random.random(s) < min(0.5, 8 / s)
        is_first[0] = True
        starts = np.maximum.accumulate(np.where(is_first, np.arange(s), 0))
        ends = np.append(is_first[1:], False)
        labels = np.where(ends, IGNORED, sample["labels"])
        entries = {name: rows[0] for name, rows in document_entries(starts[None]).items()}
        return sample | {"labels": labels} | entries
