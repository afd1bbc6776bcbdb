import numpy as np
import pytest

from hybridpar.data import gpt
from hybridpar.data.gpt import GPTDataset
from hybridpar.errors import DataError


def test_samples_are_stretches_of_the_concatenated_documents(make_indexed):
    data = GPTDataset(make_indexed([[7], [3], [11], [1]]), 4)  # 22 tokens: 0 .. 21
    assert len(data) == 5
    batch = _stretches(data, 0)
    for i in range(5):
        np.testing.assert_array_equal(batch["tokens"][i], np.arange(4 * i, 4 * i + 4))
        np.testing.assert_array_equal(batch["labels"][i], np.arange(4 * i + 1, 4 * i + 5))


def test_batch_gives_the_same_samples(make_indexed):
    data = GPTDataset(make_indexed([[50], [53]]), 8)
    order = np.array([3, 0, 11, 3])
    batch = data.batch(order, np.zeros(4, np.int64))
    assert {v.dtype for v in batch.values()} == {np.dtype(np.int64)}
    for row, i in enumerate(order):
        for name in ("tokens", "labels"):
            np.testing.assert_array_equal(batch[name][row], _stretches(data, 0)[name][i])
    assert data.num_targets(order, order) == 32


def _stretches(data, epoch):
    indices = np.arange(len(data))
    return data.batch(indices, np.full_like(indices, epoch))


@pytest.mark.parametrize("documents", [[3, 1, 25, 8, 2, 40] * 20, [777], [300, 301], [1] * 100])
@pytest.mark.parametrize("part", [(0, None), (7, 90)])
def test_each_epoch_cuts_other_stretches_of_documents_in_another_order(
    make_indexed, documents, part
):
    ends = np.cumsum(documents)
    start = part[0]
    stop = part[1] or int(ends[-1])
    data = GPTDataset(make_indexed([[n] for n in documents]), 8, (start, stop), seed=3)
    seen = []
    neighbours = []
    for epoch in range(4):
        batch = _stretches(data, epoch)
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        labels = batch["labels"].reshape(-1)
        assert (
            len(np.unique(labels)) == len(labels) == (stop - start - 1) // 8 * 8
        )  # each token at most once
        assert start <= labels.min() <= labels.max() < stop
        inside = ~np.isin(
            batch["tokens"] + 1, [*ends, stop, start]
        )  # a document goes on until it ends
        np.testing.assert_array_equal(batch["labels"][inside], batch["tokens"][inside] + 1)
        seen.append(set(batch["tokens"][:, 0].tolist()))
        neighbours.append(set(batch["labels"][~inside].tolist()))
    for i in range(1, 4):
        assert len(seen[0] & seen[i]) < 0.6 * len(seen[0])
    if len(documents) == 120 and part[1] is None:
        assert neighbours[0] == neighbours[0] & {0, *ends.tolist()}


def test_documents_get_other_neighbours_in_each_epoch(make_indexed):
    documents = [9] * 200
    data = GPTDataset(make_indexed([[n] for n in documents]), 16, seed=3)
    pairs = []
    for epoch in range(2):
        batch = _stretches(data, epoch)
        at_end = batch["tokens"] % 9 == 8
        pairs.append(
            set(
                zip(batch["tokens"][at_end].tolist(), batch["labels"][at_end].tolist(), strict=True)
            )
        )
        followed = sum(b == a + 1 for a, b in pairs[-1])
        assert followed < 10  # of about 200: as they lay
    assert len(pairs[0] & pairs[1]) < 10


def test_a_batch_of_two_epochs_and_an_epoch_long_gone(make_indexed):
    data = GPTDataset(make_indexed([[5]] * 60), 8, seed=3)
    whole = [_stretches(data, epoch)["tokens"] for epoch in range(5)]
    indices = np.array([3, 0, 3, 36, 1])
    epochs = np.array([0, 4, 3, 3, 0])
    fresh = GPTDataset(make_indexed([[5]] * 60), 8, seed=3)
    for one in (data, fresh):
        for _ in range(2):
            tokens = one.batch(indices, epochs)["tokens"]
            np.testing.assert_array_equal(
                tokens, [whole[e][i] for i, e in zip(indices, epochs, strict=True)]
            )


def test_so_many_documents_that_neighbours_stay_together(make_indexed, monkeypatch):
    monkeypatch.setattr(gpt, "_MAX_DOCUMENTS", 16)
    data = GPTDataset(make_indexed([[5]] * 100), 8, seed=3)
    assert len(data._epoch(0).order) == 15  # of seven documents each, but the last
    labels = _stretches(data, 0)["labels"].reshape(-1)
    assert len(np.unique(labels)) == len(labels) == 62 * 8


def test_without_a_seed_documents_stay_as_they_lie(make_indexed):
    data = GPTDataset(make_indexed([[5]] * 60), 8)
    for epoch in range(3):
        np.testing.assert_array_equal(
            _stretches(data, epoch)["tokens"].reshape(-1), np.arange(37 * 8)
        )


@pytest.mark.parametrize(("num_tokens", "samples"), [(9, 1), (16, 1), (17, 2)])
def test_smallest_corpus(make_indexed, num_tokens, samples):
    assert len(GPTDataset(make_indexed([[num_tokens]]), 8)) == samples


def test_too_few_tokens(make_indexed):
    with pytest.raises(
        DataError, match="8 tokens is too short for one sample; seq_length = 8 requires at least 9"
    ):
        GPTDataset(make_indexed([[8]]), 8)


def test_fingerprint_tells_data_sets_apart(make_indexed):
    indexed = make_indexed([[100]])
    prints = [
        GPTDataset(i, s, t, seed=seed).fingerprint
        for i, s, t, seed in [
            (indexed, 8, None, None),
            (indexed, 9, None, None),
            (indexed, 8, (0, 50), None),
            (make_indexed([[100]], 1, "other"), 8, None, None),
            (indexed, 8, None, 0),
            (indexed, 8, None, 1),
        ]
    ]
    assert len(set(prints)) == 6
    assert GPTDataset(indexed, 8).fingerprint == prints[0]
