"""Samples of a custom map-style dataset, `len(d)` and `d[i]`, whose items are dicts of arrays.

Order, epochs, replicas and resuming work as for text: by the sample's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridpar.config import ModelConfig, ModelSpec
from hybridpar.data.sample_rules import IGNORED, Arrays, TokenRules, rules_of
from hybridpar.errors import DataError, shown

Form = dict[str, tuple[str, tuple[int, ...]]]


def as_arrays(sample: Any, what: str) -> Arrays:
    """Return a sample as arrays by name. Raises: DataError if it cannot be converted."""
    if not isinstance(sample, Mapping) or not sample:
        raise DataError(
            f"{what} must be a dict of arrays by name, not a {type(sample).__name__}, such as "
            '{"image": image, "label": 3}'
        )
    arrays = {
        str(name): _as_array(value, f"{what}: {shown(name)}") for name, value in sample.items()
    }
    if odd := next(
        (name for name, array in arrays.items() if array.dtype.kind not in "biuf"), None
    ):
        raise DataError(
            f"{what}: {odd!r} has the type {arrays[odd].dtype}; must be numbers or booleans"
        )
    return arrays


def _as_array(value: Any, what: str) -> NDArray[Any]:
    """Convert a value to an array. Raises: DataError if it cannot be converted."""
    try:
        return np.asarray(value)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # of lists of several lengths, of tensors on a GPU
        raise DataError(f"{what} cannot be converted to an array ({error})") from None


def stacked(samples: Iterable[tuple[str, Arrays]], like: Form | None = None) -> Arrays:
    """Return a batch of samples, each given with its name. Shapes: [..] each -> [b, ..].

    Args:
        like: Form of the data's first sample. None: the form of the batch's first sample.

    Raises:
        DataError: A sample has another form.
    """
    named = list(samples)
    form = form_of(named[0][1]) if like is None else like
    for name, arrays in named:
        if (other := form_of(arrays)) != form:
            raise DataError(f"{name} has {other}, which does not match the first sample's {form}")
    return {key: np.stack([arrays[key] for _, arrays in named]) for key in form}


def form_of(arrays: Arrays) -> Form:
    """Return the type and shape of each array."""
    return {name: (str(array.dtype), array.shape) for name, array in arrays.items()}


class MappedDataset:
    """A map-style dataset as a member of a Blend. `part`: its name in errors.

    The first and the last sample and some in between are checked at once, all others when they
    are drawn.

    Raises:
        DataError: It is empty, or its items are not dicts of arrays or break the model's rules.
    """

    def __init__(self, model: ModelSpec, dataset: Any, part: str):
        self._model = model
        self._dataset = dataset
        self._part = part
        self._rules = rules_of(model)
        if not len(self):
            raise DataError(f"{self._where()} is empty")
        ends = [self._sample(i) for i in sorted({0, len(self) // 2, len(self) - 1})]
        self._form = form_of(ends[0])
        number = self._rules.num_checked
        for index in sorted({i * len(self) // number for i in range(number)}):
            self._sample(index)
        digest = hashlib.sha256(f"{len(self)}".encode())
        for name, array in (item for sample in ends for item in sorted(sample.items())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> Arrays:
        """Return the samples at these positions. Shapes: [b] -> [b, ..] by name."""
        samples = ((self._where(i), self._sample(i)) for i in indices.tolist())
        return self._rules.as_input(stacked(samples, self._form))

    def num_targets(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> int:
        """Return how many labels count in the samples at these positions."""
        if not self._model.counts_targets:
            return len(indices)
        return sum(self._model.num_targets(self._sample(i)) for i in indices.tolist())

    def _sample(self, index: int) -> Arrays:
        sample = as_arrays(self._dataset[index], self._where(index))
        self._rules.check(sample, self._where(index))
        return sample

    def _where(self, index: int | None = None) -> str:
        return f"dataset({self._part!r}) of {self._model.kind}" + (
            "" if index is None else f"[{index}]"
        )


class MappedDocuments:
    """The samples of a map-style dataset as documents to pack into rows.

    All samples are read once, to learn their lengths.

    Raises:
        DataError: It is empty, or a sample breaks the model's rules.
    """

    def __init__(self, model: ModelConfig, dataset: Any, part: str):
        self._dataset = dataset
        self._where = f"dataset({part!r}) of {model.kind}"
        self._rules = TokenRules(model, packed=True)
        if not len(dataset):
            raise DataError(f"{self._where} is empty")
        digest = hashlib.sha256()
        lengths = []
        for index in range(len(dataset)):
            sample = self._sample(index)
            lengths.append(len(sample["tokens"]))
            for name in ("tokens", "labels"):
                digest.update(sample[name].tobytes())
        self.lengths = np.array(lengths, np.int64)
        digest.update(self.lengths.tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def read(
        self, document: int, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens of a sample, and their labels."""
        sample = self._sample(document)
        return sample["tokens"][start:stop], sample["labels"][start:stop]

    def num_labels(self, document: int, start: int, stop: int) -> int:
        """Return how many of these labels count."""
        return int((self.read(document, start, stop)[1] != IGNORED).sum())

    def _sample(self, index: int) -> Arrays:
        where = f"{self._where}[{index}]"
        sample = as_arrays(self._dataset[index], where)
        self._rules.check(sample, where)
        return self._rules.as_input(sample)


def rehearsal(model: ModelSpec, num_samples: int) -> dict[str, torch.Tensor]:
    """Return a random micro-batch with the form of the model's data, and the counts that losses
    divide by."""
    arrays = stacked(
        (f"sample({n}, 0) of {model.kind}", as_arrays(model.sample(n, 0), f"sample({n}, 0)"))
        for n in range(num_samples)
    )
    counts = {name: torch.ones((), dtype=torch.float64) for name in ("num_targets", "num_samples")}
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | counts
