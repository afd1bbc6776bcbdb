"""Streams of samples: any position, after any other, is the sample of that number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hybridpar import ModelSpec
from hybridpar.data.stream import StreamedSamples
from hybridpar.errors import DataError


@dataclass(frozen=True)
class Model(ModelSpec):
    pass


class Numbers:
    """0, 1, .. 6, from the start at each pass. taken: how many were."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.since(0)

    def since(self, start: int) -> Iterator[dict[str, Any]]:
        for n in range(start, 7):
            self.taken += 1
            yield {"x": np.float32(n)}


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=6), st.integers(1, 9)
)
def test_any_position_after_any_other(requests: list[list[int]], kept: int) -> None:
    iterable = StreamedSamples(Model(), Numbers(), "train", kept)
    function = StreamedSamples(Model(), lambda start: Numbers().since(start % 7), "train", kept)
    alone = StreamedSamples(
        Model(), [{"x": np.float32(0)}], "train", kept
    )  # the first sample, again and again
    assert iterable.fingerprint == function.fingerprint == alone.fingerprint
    for positions in requests:
        for stream in (iterable, function):
            assert stream.batch(np.array(positions))["x"].tolist() == [n % 7 for n in positions]
            assert stream.num_targets(np.array(positions)) == len(positions)
            assert len(stream._kept) <= kept


def test_a_function_begins_where_a_run_goes_on() -> None:
    numbers = Numbers()
    stream = StreamedSamples(Model(), lambda start: numbers.since(start % 7), "train", 8)
    assert stream.batch(np.arange(7004, 7007))["x"].tolist() == [4, 5, 6]
    assert numbers.taken == 1 + 3, "the first, for the fingerprint"


def test_iterators_are_read_once() -> None:
    stream = StreamedSamples(Model(), iter(Numbers()), "train", 2)
    assert stream.batch(np.arange(2, 5))["x"].tolist() == [2, 3, 4]
    with pytest.raises(
        DataError, match=r"dataset\('train'\) of Model, sample 1 was read before.*a function"
    ):
        stream.batch(np.array([1]))
    with pytest.raises(
        DataError, match=r"ends after 7 samples and cannot be iterated again; give a function"
    ):
        StreamedSamples(Model(), iter(Numbers()), "train", 2).batch(np.arange(6, 8))
    with pytest.raises(DataError, match="an empty iterator for position 7; to repeat the samples"):
        StreamedSamples(Model(), Numbers().since, "train", 2).batch(np.arange(6, 8))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([], "ends after 0 samples"),
        ([3], r"sample 0 must be a dict of arrays by name, not a int"),
        (
            DataLoader([{"x": 1.0}] * 4, batch_size=2),
            r"yields batches \(of 2\); must yield samples: use batch_size=None",
        ),
    ],
    ids=["nothing", "no dict", "batches"],
)
def test_sources_without_samples(source: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        StreamedSamples(Model(), source, "train", 4)
    assert StreamedSamples(
        Model(), DataLoader([{"x": 1.0}], batch_size=None), "train", 4
    ).fingerprint
