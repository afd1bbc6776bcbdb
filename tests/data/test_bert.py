import random
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from data.documents import add_document
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data import bert
from hybridpar.data.bert import BertDataset
from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter
from hybridpar.data.tokenizer import BertVocabulary, Tokenizer
from hybridpar.errors import ConfigError, DataError

PAD, CLS, SEP, MASK = range(4)
FIRST = 100  # of the corpus' tokens, which count upwards, so a token tells its place
VOCABULARY = BertVocabulary(9000, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK, 4))
DOCUMENTS = [
    [7, 3, 12, 0, 1, 9, 25, 4, 4, 30] * 3,
    [2],
    [200],
    [5] * 60,
    [1, 1],
    [11, 0, 17] * 9,
] * 4


@pytest.fixture(params=["nsp", "sop", "none"])
def data(request, make_indexed):
    return BertDataset(make_indexed(DOCUMENTS, FIRST), 64, VOCABULARY, seed=3, head=request.param)


def epoch_of(data, epoch):
    return data.batch(np.arange(len(data)), np.full(len(data), epoch))


def restored(batch):
    """Tokens without the masking."""
    return np.where(batch["labels"] == -100, batch["tokens"], batch["labels"])


def segments(batch, row):
    """A and B of one sample, unmasked."""
    tokens = restored(batch)[row]
    ends = np.flatnonzero(tokens == SEP)
    assert tokens[0] == CLS
    assert (tokens[ends[-1] + 1 :] == PAD).all()
    return [tokens[1 : ends[0]], *(tokens[a + 1 : b] for a, b in pairwise(ends))]


def document_of(tokens):
    ends = np.cumsum([sum(d) for d in DOCUMENTS]) + FIRST
    found = np.unique(np.searchsorted(ends, tokens, side="right"))
    assert len(found) == 1
    return int(found[0])


def test_form(data):
    batch = epoch_of(data, 0)
    real = batch["padding_mask"]
    assert (batch["tokens"][~real] == PAD).all()
    assert (batch["labels"][~real] == -100).all()
    assert (np.diff(real.astype(int), axis=1) <= 0).all()  # real tokens come first
    assert len(np.unique(real.sum(axis=1))) > 5  # lengths vary
    for row in range(len(data)):
        parts = segments(batch, row)
        assert len(parts) == (1 if data.head == "none" else 2)
        for part in parts:
            assert len(part) > 0
            np.testing.assert_array_equal(np.diff(part), 1)  # a stretch of the corpus
            document_of(part)
        assert batch["token_types"][row].sum() == (0 if data.head == "none" else len(parts[1]) + 1)
        if data.head != "none":
            assert (batch["token_types"][row, len(parts[0]) + 2 : real[row].sum()] == 1).all()


def test_sentence_labels_say_what_the_segments_are(data):
    labels = []
    for epoch in range(20):
        batch = epoch_of(data, epoch)
        for row, label in enumerate(batch["sentence_labels"]):
            if data.head == "none":
                assert label == -100
                continue
            a, b = segments(batch, row)
            if data.head == "nsp":
                assert label == (document_of(a) != document_of(b))
                assert label or a[-1] < b[0]
            else:
                assert document_of(a) == document_of(b)
                assert label == (b[0] < a[0])
            labels.append(label)
    if data.head == "sop":
        assert (
            abs(np.mean(labels) - 0.5) < 5 * 0.5 / len(labels) ** 0.5
        )  # five standard deviations of a fair coin
    if data.head == "nsp":
        assert (
            0.45 < np.mean(labels) < 0.75
        )  # windows of one sentence always take the second from elsewhere


def test_an_epoch_visits_every_document_long_enough(data):
    batch = epoch_of(data, 1)
    seen = {document_of(segments(batch, row)[0]) for row in range(len(data))}
    if data.head != "nsp":
        assert seen == set(range(len(DOCUMENTS)))
    assert len(data) >= sum(max(1, sum(d) // 80) for d in DOCUMENTS)


def test_masking_statistics(make_indexed):
    documents = [[13] * 100] * 6
    data = BertDataset(make_indexed(documents, FIRST), 128, VOCABULARY, seed=3)
    batches = [epoch_of(data, epoch) for epoch in range(40)]
    tokens, labels = (np.concatenate([b[name] for b in batches]) for name in ("tokens", "labels"))
    real = np.concatenate([b["padding_mask"] for b in batches])
    chosen = labels != -100
    ordinary = real & ~np.isin(np.where(chosen, labels, tokens), VOCABULARY.special)
    assert not (chosen & ~ordinary).any()
    count = ordinary.sum(axis=1)
    np.testing.assert_array_equal(chosen.sum(axis=1), np.maximum(np.floor(count * 0.15 + 0.5), 1))
    total = chosen.sum()
    assert total > 30_000
    masked = tokens[chosen] == MASK
    kept = tokens[chosen] == labels[chosen]
    changed = ~masked & ~kept
    # Five standard deviations of a share p among `total` draws.
    for share, p in ((masked.mean(), 0.8), (kept.mean(), 0.1), (changed.mean(), 0.1)):
        assert abs(share - p) < 5 * (p * (1 - p) / total) ** 0.5
    drawn = tokens[chosen][changed]
    assert not np.isin(drawn, VOCABULARY.special).any()
    assert (drawn.min() < 200, drawn.max() > 8800) == (True, True)  # from all of the vocabulary
    # Every place is as likely: chosen / ordinary per place, five standard deviations again.
    share = chosen.sum(axis=0)[1:-1] / np.maximum(ordinary.sum(axis=0)[1:-1], 1)
    tried = ordinary.sum(axis=0)[1:-1]
    enough = tried > 500
    assert (np.abs(share - 0.152)[enough] < 0.01 + 5 * (0.15 * 0.85 / tried[enough]) ** 0.5).all()


def test_a_tenth_of_the_samples_is_short(make_indexed):
    vocabulary = BertVocabulary(20_000, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK))
    data = BertDataset(
        make_indexed([[1] * 125 * 24] * 4, FIRST), 128, vocabulary, seed=3
    )  # 24 full windows each
    within = (
        np.arange(len(data)) % 24 < 23
    )  # the last window of a document has what moving it has left
    lengths = np.concatenate(
        [epoch_of(data, e)["padding_mask"].sum(axis=1)[within] for e in range(40)]
    )
    # Five standard deviations of a share of 0.1; a "short" length is the full one once in 124.
    assert abs((lengths < 128).mean() - 0.1 * 123 / 124) < 5 * (0.1 * 0.9 / len(lengths)) ** 0.5
    assert lengths.min() < 10


def test_epochs_differ_and_nothing_else_does(data):
    first = epoch_of(data, 0)
    again = epoch_of(data, 0)
    later = epoch_of(data, 1)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert (first["labels"] != later["labels"]).any(axis=1).mean() > 0.8
    rows = np.array([5, 2, 5])
    some = data.batch(rows, np.array([0, 1, 1]))
    for name in first:
        np.testing.assert_array_equal(
            some[name], np.stack([first[name][5], later[name][2], later[name][5]])
        )


def test_windows_begin_elsewhere_in_each_epoch(make_indexed):
    data = BertDataset(
        make_indexed([[5] * 60, [3, 4], [2, 7] * 40], FIRST), 64, VOCABULARY, seed=3, head="none"
    )
    cuts = set()
    covered = np.zeros(300 + 7 + 360, int)
    for epoch in range(40):
        tokens = np.concatenate(
            [segments(epoch_of(data, epoch), row)[0] for row in range(len(data))]
        )
        assert len(np.unique(tokens)) == len(tokens)  # at most once
        covered[tokens - FIRST] += 1
        cuts.add(int(segments(epoch_of(data, epoch), 1)[0][0]))
    assert len(cuts) > 5
    assert covered.min() > 5
    assert (
        covered[300:307].min() == covered[300:307].max() >= 36
    )  # a document of one window has nothing to move


def test_num_targets_is_what_a_batch_has(data):
    indices = np.arange(len(data))
    epochs = np.arange(len(data)) % 3
    assert (
        data.num_targets(indices, epochs) == (data.batch(indices, epochs)["labels"] != -100).sum()
    )


def test_special_tokens_within_the_text_are_not_masked(make_indexed):
    data = BertDataset(
        make_indexed([[6] * 30], 0),
        32,
        BertVocabulary(200, 180, 181, 182, 183, tuple(range(20, 200))),
        seed=1,
        head="sop",
    )
    for epoch in range(5):
        batch = epoch_of(data, epoch)
        assert batch["labels"].max() < 20
        assert (
            data.num_targets(np.arange(len(data)), np.full(len(data), epoch))
            == (batch["labels"] != -100).sum()
        )


def test_no_stand_in_is_an_id_that_the_tokenizer_lacks(make_indexed):
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | {
        f"w{i}": i for i in range(100, 900, 2)
    }
    vocabulary = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w100"))).bert()
    indexed = make_indexed(
        [[8] * 10] * 9, 100
    )  # 100 to 819: odd ones are of another tokenizer, but that is not seen
    data = BertDataset(indexed, 64, vocabulary, seed=3)
    for epoch in range(20):
        batch = epoch_of(data, epoch)
        drawn = batch["tokens"][(batch["labels"] != -100) & (batch["tokens"] != batch["labels"])]
        assert set(drawn.tolist()) <= set(words.values())
        assert (batch["labels"] % 2 == 0).all(), "nor is one to be restored"


def reference_truncation(a, b, limit, rng):
    """create_pretraining_data.py of BERT, in its own words: one token at a time."""
    while len(a) + len(b) > limit:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 2**32))
def test_truncation_leaves_what_the_paper_leaves(a, b, seed):
    data = object.__new__(BertDataset)
    data._capacity = 61
    pair = bert._Pairs(*(np.array([n]) for n in (1000, a, 5000, b, 0)))
    cut = data._truncate(pair, np.array([seed], np.uint64))
    one = list(range(a))
    two = list(range(b))
    reference_truncation(one, two, 61, random.Random(seed))
    assert (cut.length_a[0], cut.length_b[0]) == (len(one), len(two))
    assert 1000 <= cut.start_a[0] <= 1000 + a - len(one)
    assert 5000 <= cut.start_b[0] <= 5000 + b - len(two)


def test_parts_do_not_leave_their_tokens(make_indexed):
    indexed = make_indexed(DOCUMENTS, FIRST)
    # inside sentences
    start = 150
    stop = 1001
    for head in ("nsp", "sop", "none"):
        data = BertDataset(indexed, 64, VOCABULARY, seed=3, head=head, tokens=(start, stop))
        batches = [epoch_of(data, epoch) for epoch in range(3)]
        text = np.concatenate(
            [part for batch in batches for row in range(len(data)) for part in segments(batch, row)]
        )
        assert text.min() >= FIRST + start
        assert text.max() < FIRST + stop


@given(
    documents=st.lists(
        st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    seq_length=st.integers(5, 70),
    head=st.sampled_from(["nsp", "sop", "none"]),
)
def test_any_corpus_works_or_is_refused(tmp_path_factory, documents, seq_length, head):
    prefix = tmp_path_factory.mktemp("pair") / "x"
    with IndexedWriter(prefix, "<u2") as writer:
        for sizes in documents:
            add_document(writer, np.arange(100, 100 + sum(sizes)), sizes)
    try:
        data = BertDataset(IndexedDataset(prefix), seq_length, VOCABULARY, seed=1, head=head)
    except DataError:
        assert max(sum(d) for d in documents) < 2 or (
            head == "nsp" and sum(sum(d) > 0 for d in documents) < 2
        )
        return
    for epoch in range(3):
        batch = epoch_of(data, epoch)
        for row in range(len(data)):
            assert all(len(part) for part in segments(batch, row))
            assert (batch["labels"][row] != -100).any()


def test_impossible_settings(make_indexed):
    with pytest.raises(ConfigError, match=r"model\.seq_length = 4"):
        BertDataset(make_indexed([[9]]), 4, VOCABULARY, seed=0)
    with pytest.raises(DataError, match="two documents"):
        BertDataset(make_indexed([[9, 9]]), 16, VOCABULARY, seed=0, head="nsp")
    with pytest.raises(DataError, match="no two tokens"):
        BertDataset(make_indexed([[1], [1]]), 16, VOCABULARY, seed=0)
    data = BertDataset(make_indexed([[9, 9]], 8990), 16, VOCABULARY, seed=0)
    with pytest.raises(DataError, match=r"has token ids from .* for the tokenizer's 9000"):
        epoch_of(data, 0)
