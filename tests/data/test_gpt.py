import numpy as np
import pytest

from hybridpar.data.gpt import GPTDataset
from hybridpar.errors import DataError


def test_samples_are_stretches_of_the_concatenated_documents(make_indexed):
    data = GPTDataset(make_indexed([[7], [3], [11], [1]]), 4)  # 22 tokens: 0 .. 21
    assert len(data) == 5
    for i in range(5):
        np.testing.assert_array_equal(data[i]["tokens"], np.arange(4 * i, 4 * i + 4))
        np.testing.assert_array_equal(data[i]["labels"], np.arange(4 * i + 1, 4 * i + 5))
    np.testing.assert_array_equal(data[-1]["tokens"], data[4]["tokens"])
    with pytest.raises(IndexError, match="sample 5 of 5"):
        data[5]


def test_batch_gives_the_same_samples(make_indexed):
    data = GPTDataset(make_indexed([[50], [53]]), 8)
    order = np.array([3, 0, 11, 3])
    batch = data.batch(order, np.zeros(4, np.int64))
    assert {v.dtype for v in batch.values()} == {np.dtype(np.int64)}
    for row, i in enumerate(order):
        for name in ("tokens", "labels"):
            np.testing.assert_array_equal(batch[name][row], data[i][name])
    assert data.num_targets(order, order) == 32


def test_every_token_of_a_part_but_the_first_is_a_label_once(make_indexed):
    data = GPTDataset(make_indexed([[10], [30]]), 3, (10, 35))
    labels = np.concatenate([data[i]["labels"] for i in range(len(data))])
    np.testing.assert_array_equal(labels, np.arange(11, 35))


@pytest.mark.parametrize(("num_tokens", "samples"), [(9, 1), (16, 1), (17, 2)])
def test_smallest_corpus(make_indexed, num_tokens, samples):
    assert len(GPTDataset(make_indexed([[num_tokens]]), 8)) == samples


def test_too_few_tokens(make_indexed):
    with pytest.raises(DataError, match="8 tokens has no sample of 8 tokens and their successors; at least 9"):
        GPTDataset(make_indexed([[8]]), 8)


def test_fingerprint_tells_data_sets_apart(make_indexed):
    indexed = make_indexed([[100]])
    prints = [GPTDataset(i, s, t).fingerprint for i, s, t in [
        (indexed, 8, None), (indexed, 9, None), (indexed, 8, (0, 50)), (make_indexed([[100]], 1, "other"), 8, None)]]
    assert len(set(prints)) == 4
    assert GPTDataset(indexed, 8).fingerprint == prints[0]
