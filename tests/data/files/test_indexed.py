from itertools import chain

import numpy as np
import pytest
import torch
from data.documents import add_document
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter, token_dtype
from hybridpar.errors import DataError

# Two documents, [5 6 7] and [8 9], as Megatron-LM writes them.
BIN = bytes.fromhex("05000600070008000900")
IDX = (
    bytes.fromhex("4d4d49444944580000010000000000000008")
    + bytes.fromhex("020000000000000003000000000000000300000002000000")
    + bytes.fromhex("00000000000000000600000000000000")
    + bytes.fromhex("000000000000000001000000000000000200000000000000")
)


def write(prefix, index=IDX, tokens=BIN):
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(tokens)
    return prefix


def patched(offset, replacement, data=IDX):
    return data[:offset] + replacement + data[offset + len(replacement) :]


def test_writer_gives_the_bytes_of_megatron(tmp_path):
    with IndexedWriter(tmp_path / "x", token_dtype(100)) as writer:
        add_document(writer, [5, 6, 7])
        add_document(writer, np.array([8, 9]))
    assert (tmp_path / "x.bin").read_bytes() == BIN
    assert (tmp_path / "x.idx").read_bytes() == IDX
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_reader_reads_the_bytes_of_megatron(tmp_path):
    data = IndexedDataset(write(tmp_path / "x"))
    assert [data[i].tolist() for i in range(-2, 2)] == [[5, 6, 7], [8, 9]] * 2
    assert (len(data), data.num_documents, data.num_tokens) == (2, 2, 5)
    assert data.sequence_starts.tolist() == data.document_starts.tolist() == [0, 3, 5]
    assert data.largest_token() == 9
    with pytest.raises(IndexError):
        data[2]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(1, "uint16"), (65499, "uint16"), (65500, "int32"), (10**6, "int32")]
)
def test_type_of_ids(vocab_size, name):
    assert token_dtype(vocab_size) == name


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4), max_size=6),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
)
def test_round_trip(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "x.y"  # a prefix may have a dot
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            add_document(writer, list(chain.from_iterable(sequences)), [len(s) for s in sequences])
    data = IndexedDataset(prefix)
    assert [s.tolist() for s in data] == list(chain.from_iterable(documents))
    assert np.diff(data.documents).tolist() == [len(d) for d in documents]
    assert data.tokens.tolist() == [
        token for document in documents for s in document for token in s
    ]
    assert data.dtype == dtype


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4), max_size=6),
    dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]),
)
def test_the_files_of_megatron_core_are_ours_byte_for_byte(tmp_path_factory, documents, dtype):
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = tmp_path_factory.mktemp("pair")
    with IndexedWriter(prefix / "ours", dtype) as writer:
        for sequences in documents:
            add_document(writer, list(chain.from_iterable(sequences)), [len(s) for s in sequences])
    builder = theirs.IndexedDatasetBuilder(str(prefix / "theirs.bin"), dtype=np.dtype(dtype).type)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(prefix / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (prefix / f"ours{suffix}").read_bytes() == (prefix / f"theirs{suffix}").read_bytes()
    assert [s.tolist() for s in IndexedDataset(prefix / "theirs")] == list(
        chain.from_iterable(documents)
    )
    if (prefix / "ours.bin").stat().st_size:  # theirs cannot map an empty file
        read = theirs.IndexedDataset(str(prefix / "ours"))
        assert [read[i].tolist() for i in range(len(read))] == list(chain.from_iterable(documents))
        assert read.document_indices.tolist() == IndexedDataset(prefix / "ours").documents.tolist()


@pytest.mark.parametrize(
    ("dtype", "token"), [("<u2", 65536), ("<u2", -1), ("<i4", 2**31), ("u1", 256)]
)
def test_writer_refuses_ids_that_do_not_fit_and_leaves_nothing(tmp_path, dtype, token):
    with pytest.raises(DataError, match=str(token)), IndexedWriter(tmp_path / "x", dtype) as writer:
        add_document(writer, [1, token])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "has 0 bytes"),
        (IDX[:20], "of its header"),
        (IDX[:-1], "must have 82"),
        (IDX + b"\0", "must have 82"),
        (IDX + b"\0\0", "multimodal"),
        (patched(0, b"X"), "starts with"),
        (patched(9, b"\2"), "version 2"),
        (patched(17, b"\0"), "dtype code 0"),
        (patched(17, b"\7"), "floating-point"),
        (patched(18, b"\xff" * 8), "must have [0-9]{20}"),
        (patched(26, b"\xff" * 8), "must have [0-9]{20}"),
        (patched(26, b"\0" * 8)[: 34 + 24], "no document indices"),
        (patched(34, b"\xff" * 4), "length -1"),
        (patched(34, b"\4"), "offset 6, which does not match the lengths before it: 8"),
        (patched(50, b"\xff" * 8), "offset -1"),
        (patched(58, b"\1"), "document index 0 is 1"),
        (patched(66, b"\3"), "below the one before it, 3"),
        (patched(66, b"\xff" * 8), "is -1"),
        (patched(74, b"\3"), "the last document index is 3"),
    ],
)
def test_damaged_index(tmp_path, index, message):
    prefix = write(tmp_path / "x", index)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(tmp_path / "x.idx") in str(caught.value)


@pytest.mark.parametrize("tokens", [b"", BIN[:-1], BIN[:-2], BIN + b"\0\0"])
def test_bin_of_another_length(tmp_path, tokens):
    prefix = write(tmp_path / "x", tokens=tokens)
    with pytest.raises(
        DataError, match=rf"x\.bin: has {len(tokens)} bytes, which does not match its index: 10"
    ):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(tmp_path, suffix):
    (write(tmp_path / "x").with_suffix(suffix)).unlink()
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "x")


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(IDX) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    length=st.integers(0, len(IDX)) | st.just(len(IDX)),
)
def test_fuzzed_index_is_refused_or_consistent(tmp_path_factory, changes, length):
    index = bytearray(IDX)
    for place, value in changes:
        index[place] = value
    prefix = write(tmp_path_factory.mktemp("pair") / "x", bytes(index[:length]))
    try:
        data = IndexedDataset(prefix)
    except DataError:
        return
    assert sum(len(s) for s in data) == data.num_tokens
    assert np.diff(data.documents).sum() == len(data)


def test_negative_ids_are_found(tmp_path):
    with IndexedWriter(tmp_path / "x", "<i4") as writer:
        add_document(writer, [3, -2])
    with pytest.raises(DataError, match="token 1 is -2"):
        IndexedDataset(tmp_path / "x").largest_token()


def test_fingerprint_tells_contents_apart(tmp_path):
    prints = set()
    for i, (size, value) in enumerate([(10, 1), (10, 2), (11, 1), (10**5, 1)]):
        with IndexedWriter(tmp_path / f"{i}", "<u2") as writer:
            add_document(writer, np.full(size, value))
        prints.add(IndexedDataset(tmp_path / f"{i}").fingerprint)
    assert len(prints) == 4
