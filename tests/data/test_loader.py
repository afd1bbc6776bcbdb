import pytest
import torch

from hybridpar.data.bert import BertDataset
from hybridpar.data.blend import Blend
from hybridpar.data.gpt import GPTDataset
from hybridpar.data.loader import BatchLoader
from hybridpar.data.tokenizer import BertVocabulary

GRIDS = [
    (12, 1, 1),
    (1, 12, 1),
    (1, 1, 12),
    (2, 3, 2),
    (3, 2, 2),
    (1, 4, 3),
    (4, 1, 3),
    (6, 2, 1),
]  # mbs, m, dp


@pytest.fixture(params=["gpt", "bert"])
def blend(request, make_indexed):
    first = make_indexed([[5, 9, 2, 14, 3, 8] * 3] * 7, 100, "first")
    second = make_indexed([[4] * 40] * 3, 100, "second")
    if request.param == "gpt":
        return Blend([GPTDataset(first, 16), GPTDataset(second, 16)], (3, 1), seed=5)
    vocabulary = BertVocabulary(2000, 0, 1, 2, 3, (0, 1, 2, 3))
    return Blend(
        [BertDataset(d, 24, vocabulary, seed=5, head="nsp") for d in (first, second)],
        (3, 1),
        seed=5,
    )


def loaders(blend, mbs, m, dp):
    return [
        BatchLoader(blend, micro_batch_size=mbs, num_microbatches=m, dp_rank=d, dp_size=dp)
        for d in range(dp)
    ]


@pytest.mark.parametrize("batch", [0, 1, 1000])
def test_a_batch_is_the_same_on_every_grid(blend, batch):
    whole = loaders(blend, 12, 1, 1)[0].microbatch(batch, 0)
    for mbs, m, dp in GRIDS:
        seen = 0
        for loader in loaders(blend, mbs, m, dp):
            assert loader.batch_size == 12
            assert loader.fingerprint == blend.fingerprint
            for index in reversed(range(m)):
                part = loader.microbatch(batch, index)
                first = loader.first_sample(index)
                assert part.keys() == whole.keys()
                for name, values in part.items():
                    assert torch.equal(values, whole[name][first : first + mbs]), (mbs, m, dp, name)
                seen += mbs
        assert seen == 12


def test_first_sample(blend):
    loader = loaders(blend, 2, 3, 4)[1]
    assert [loader.first_sample(j) for j in range(3)] == [2, 10, 18]


def test_num_targets_counts_the_whole_batch(blend):
    for mbs, m, dp in GRIDS:
        group = loaders(blend, mbs, m, dp)
        for batch in (0, 3, 0):
            labels = [loader.microbatch(batch, j)["labels"] for loader in group for j in range(m)]
            expected = sum(int((part != -100).sum()) for part in labels)
            assert [loader.num_targets(batch) for loader in group] == [expected] * dp


def test_types(blend):
    batch = loaders(blend, 2, 1, 1)[0].microbatch(0, 0)
    for name, values in batch.items():
        assert values.dtype == (torch.bool if name == "padding_mask" else torch.int64)
        assert values.shape == (
            (2,) if name == "sentence_labels" else (2, batch["tokens"].shape[1])
        )
        assert values.is_contiguous()


def test_batch_size_changes_grouping_and_nothing_else(blend):
    small = loaders(blend, 3, 1, 1)[0]
    large = loaders(blend, 12, 1, 1)[0]
    joined = torch.cat([small.microbatch(4 + i, 0)["tokens"] for i in range(4)])
    assert torch.equal(joined, large.microbatch(1, 0)["tokens"])
