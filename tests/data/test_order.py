import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data.bits import below, count_heads, derive, root_key
from hybridpar.data.order import SampleOrder
from hybridpar.errors import DataError


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    epochs, samples = SampleOrder(n, seed).locate(np.arange(n) + epoch * n)
    assert (epochs == epoch).all()
    np.testing.assert_array_equal(np.sort(samples), np.arange(n))


def test_small_sizes_are_permuted_too():
    for n in range(1, 64):
        samples = SampleOrder(n, 3).index(np.arange(5 * n)).reshape(5, n)
        np.testing.assert_array_equal(np.sort(samples, axis=1), np.tile(np.arange(n), (5, 1)))


def test_epochs_seeds_and_names_differ():
    n = 1000
    orders = [
        SampleOrder(n, 1).index(np.arange(n)),
        SampleOrder(n, 1).index(np.arange(n, 2 * n)),
        SampleOrder(n, 2).index(np.arange(n)),
        SampleOrder(n, 1, "other").index(np.arange(n)),
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (
                one == other
            ).sum() < 10  # one place in n agrees on average: Poisson(1), above 9 once in 10 million


def test_a_position_answers_alone():
    order = SampleOrder(777, 5)
    run = order.index(np.arange(3000))
    assert [int(order.index(i)) for i in (0, 776, 777, 2999)] == [
        run[i] for i in (0, 776, 777, 2999)
    ]
    np.testing.assert_array_equal(
        order.index(np.array([[5, 2000], [1, 0]])), run[[[5, 2000], [1, 0]]]
    )


def test_huge_data_sets_need_no_memory():
    order = SampleOrder(2**62, 1)
    samples = order.index([0, 1, 2**62 - 1])
    assert len(set(samples.tolist())) == 3
    assert all(0 <= s < 2**62 for s in samples.tolist())


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_out_of_range(n):
    with pytest.raises(DataError, match="from 1 to"):
        SampleOrder(n, 0)


def test_each_sample_is_equally_likely_everywhere():
    # 24 samples, 4800 epochs: each (position, sample) is expected 200 times. Chi-squared with 23 *
    # 23 = 529 degrees of freedom has standard deviation sqrt(2 * 529) = 33; 5 of them are the
    # bound.
    n = 24
    epochs = 4800
    samples = SampleOrder(n, 11).index(np.arange(n * epochs)).reshape(epochs, n)
    counts = np.array([np.bincount(samples[:, i], minlength=n) for i in range(n)])
    expected = epochs / n
    assert abs(((counts - expected) ** 2 / expected).sum() - 529) < 5 * 33


def test_neighbours_are_not_related():
    # Differences of neighbouring samples modulo n are uniform if the order is random: 64 bins,
    # chi-squared with 63 degrees of freedom, standard deviation 11.2.
    n = 1 << 16
    steps = np.diff(SampleOrder(n, 4).index(np.arange(n))) % n
    counts = np.bincount(steps * 64 // n, minlength=64)
    assert abs(((counts - (n - 1) / 64) ** 2 / ((n - 1) / 64)).sum() - 63) < 5 * 11.2


def test_bits_are_uniform():
    key = root_key(1, "test")
    assert root_key(1, "test") != root_key(2, "test")
    draws = derive(key, np.arange(100_000))
    assert len(np.unique(draws)) == 100_000
    # Each of 64 bits is 1 half the time, +- 0.5 / sqrt(100000) = 0.0016; 5 of these are the bound.
    ones = np.unpackbits(draws.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.0016
    assert (
        np.bincount(below(draws, 7), minlength=7).min() > 100_000 / 7 - 5 * 111
    )  # sqrt(100000 * 6 / 49) = 111
    assert below(draws, 1).max() == 0


def test_heads_are_counted():
    keys = derive(root_key(1, "test"), np.arange(20_000))
    heads = count_heads(keys, np.tile([0, 1, 64, 130], 5000)).reshape(-1, 4)
    assert heads[:, 0].max() == 0
    assert set(heads[:, 1].tolist()) == {0, 1}
    assert (heads <= [0, 1, 64, 130]).all()
    # Mean t / 2 of 5000 draws, each with standard deviation sqrt(t) / 2; 5 standard deviations.
    np.testing.assert_allclose(
        heads.mean(axis=0), [0, 0.5, 32, 65], atol=5 * 130**0.5 / 2 / 5000**0.5
    )
    assert count_heads(keys[:0], np.zeros(0, np.int64)).shape == (0,)
