import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data.blend import Blend
from hybridpar.data.gpt import GPTDataset
from hybridpar.errors import ConfigError


class Counted:
    """Samples are their own numbers, plus `first`."""

    def __init__(self, length, first=0):
        self.length = length
        self.first = first
        self.fingerprint = f"{length} {first}"

    def __len__(self):
        return self.length

    def batch(self, indices, epochs):
        return {"sample": indices + self.first, "both": np.stack([indices, epochs], 1)}

    def num_targets(self, indices, epochs):
        return int((indices + self.first).sum())


shares = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(shares)
def test_shares_hold_at_any_length(weights):
    blend = Blend([Counted(50) for _ in weights], weights, seed=1)
    members = blend.locate(np.arange(3 * sum(weights)))[0]
    counts = np.cumsum(members[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.outer(np.arange(1, len(members) + 1), np.array(weights) / sum(weights))
    assert (counts - ideal < 1).all()  # nobody is a whole sample ahead: see blend.py
    assert (ideal - counts < len(weights)).all()
    np.testing.assert_array_equal(counts[sum(weights) - 1], weights)


@given(shares, st.data())
def test_each_epoch_of_a_member_visits_every_sample_once(weights, data):
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=len(weights), max_size=len(weights)))
    blend = Blend([Counted(n) for n in lengths], weights, seed=7)
    members, epochs, samples = blend.locate(np.arange(4 * sum(weights)))
    for member, length in enumerate(lengths):
        mine = members == member
        for epoch in range(epochs[mine].max() + 1):
            seen = samples[mine & (epochs == epoch)]
            assert len(np.unique(seen)) == len(seen)
            assert len(seen) == length or epoch == epochs[mine].max()


def test_any_position_answers_alone():
    blend = Blend([Counted(10), Counted(7), Counted(3)], (0.5, 0.3, 0.2), seed=1)
    run = np.stack(blend.locate(np.arange(500)), 1)
    for i in (0, 1, 9, 10, 123, 499):
        np.testing.assert_array_equal(np.concatenate(blend.locate([i])), run[i])
    far = blend.locate(np.arange(10**15, 10**15 + 10))[0]
    np.testing.assert_array_equal(np.bincount(far), [5, 3, 2])


def test_a_batch_keeps_its_order_across_members():
    blend = Blend([Counted(10), Counted(10, 100)], (2, 1), seed=1)
    members, epochs, samples = blend.locate(np.arange(40))
    batch = blend.batch(np.arange(40))
    np.testing.assert_array_equal(batch["sample"], samples + 100 * members)
    np.testing.assert_array_equal(batch["both"], np.stack([samples, epochs], 1))
    assert blend.num_targets(np.arange(40)) == batch["sample"].sum()


def test_members_of_equal_size_have_their_own_order():
    blend = Blend([Counted(100), Counted(100)], seed=1)
    members, _, samples = blend.locate(np.arange(200))
    assert (samples[members == 0] != samples[members == 1]).sum() > 80


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.3), (7, 3)),
        ((1, 1), (1, 1)),
        ((0.01, 0.99), (1, 99)),
        ((1, 1, 1), (3334, 3333, 3333)),
        ((), (1, 3)),
    ],
)
def test_weights_become_whole_numbers(weights, expected):
    lengths = (10, 30, 20)[: len(expected)]
    assert Blend([Counted(n) for n in lengths], weights, seed=0).shares == expected


def test_without_weights_the_smallest_still_takes_part():
    assert Blend([Counted(1), Counted(10**6)], seed=0).shares == (1, 4999)


@pytest.mark.parametrize(
    "weights", [(1,), (1, 2, 3), (1, 0), (1, -1), (1, float("nan")), (1, float("inf")), (1, 1e-9)]
)
def test_weights_that_cannot_work(weights):
    with pytest.raises(ConfigError, match=r"data\.weights"):
        Blend([Counted(3), Counted(3)], weights, seed=0)


def test_fingerprint_tells_streams_apart(make_indexed):
    data = GPTDataset(make_indexed([[100]]), 8)
    prints = {
        Blend(d, w, seed=s).fingerprint
        for d, w, s in [
            ([data], (), 0),
            ([data], (), 1),
            ([data, data], (1, 1), 0),
            ([data, data], (1, 2), 0),
        ]
    }
    assert len(prints) == 4
