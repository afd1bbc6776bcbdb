"""Folders that Hugging Face's `datasets` has saved: with indices, with parts, and beside other
files.

The files are those that its older versions write for a dataset after select, shuffle, filter or
train_test_split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from data.files.test_readers import _arrow
from data.test_corpus import read

from hybridpar.config import DataConfig
from hybridpar.data import prepare
from hybridpar.data.corpus import corpus_files, corpus_key, num_bytes, read_parts
from hybridpar.data.datasets import absent_sources
from hybridpar.data.files.bad_records import BadRecords
from hybridpar.errors import DataError

TEXTS = [f"text {i}" for i in range(10)]
KEY = "_indices_data_files"


def save(
    folder: Path,
    indices: Sequence[int | None] | None,
    *,
    texts: Sequence[str | None] = TEXTS,
    key: str = KEY,
    num_files: int = 2,
) -> Path:
    """A dataset of these texts, of whose rows the indices count (None: all)."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{num_files:05}.arrow" for i in range(num_files)]
    each = -(-len(texts) // num_files)
    for i, name in enumerate(names):
        table = pa.table({"id": range(len(texts)), "text": texts}).slice(i * each, each)
        (folder / name).write_bytes(_arrow(table))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "af08",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    if indices is not None:
        table = pa.table({"indices": pa.array(indices, pa.uint64())})
        (folder / "indices.arrow").write_bytes(_arrow(table))
        state[key] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    features = {"text": {"dtype": "string", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


@pytest.mark.parametrize("key", [KEY, "_indices_files"])
@pytest.mark.parametrize("num_files", [1, 2, 3])
@pytest.mark.parametrize("indices", [[3, 9, 0], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [4, 4, 4], [0]])
def test_its_rows_come_as_the_indices_say(
    tmp_path: Path, key: str, num_files: int, indices: list[int]
) -> None:
    folder = save(tmp_path / "saved", indices, key=key, num_files=num_files)
    assert read(folder) == [TEXTS[i] for i in indices]
    made = prepare(folder, tmp_path / "out", 300, quiet=True)
    assert made.num_documents == len(indices)


def test_without_indices_all_rows_count(tmp_path: Path) -> None:
    assert read(save(tmp_path / "saved", None)) == TEXTS
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    for nothing in (None, []):  # as other versions say it
        (tmp_path / "saved" / "state.json").write_text(json.dumps(state | {KEY: nothing}))
        assert read(tmp_path / "saved") == TEXTS


def test_several_files_of_indices_follow_each_other(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [1, 2])
    (folder / "more.arrow").write_bytes(
        _arrow(pa.table({"indices": pa.array([9, 0], pa.uint64())}), pa.ipc.new_file)
    )
    state = json.loads((folder / "state.json").read_text())
    state[KEY] += [{"filename": "more.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    assert read(folder) == [TEXTS[i] for i in (1, 2, 9, 0)]


def test_parts_have_their_own_indices(tmp_path: Path) -> None:
    for part, indices in (("train", [7, 1]), ("test", [0])):
        save(tmp_path / "parts" / part, indices)
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(tmp_path / "parts") == ["text 7", "text 1"]
    assert read(tmp_path / "parts" / "test") == ["text 0"]


def test_a_dataset_below_a_folder_gives_what_it_would_give_alone(tmp_path: Path) -> None:
    save(tmp_path / "all" / "one", [5])
    (tmp_path / "all" / "one" / "cache-0123.arrow").write_bytes(b"another program's")
    for part in ("train", "test"):
        save(tmp_path / "all" / "two" / part, [1, 0])
    (tmp_path / "all" / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "all" / "three.txt").write_text("plain")
    (tmp_path / "all" / "state.json").write_text('[{"text": "of another program"}]')
    assert sorted(read(tmp_path / "all")) == [
        "of another program",
        "plain",
        "text 0",
        "text 1",
        "text 5",
    ]


def test_a_file_of_it_is_not_read_without_the_others(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [5])
    for source in (
        folder / "data-00000-of-00002.arrow",
        folder / "indices.arrow",
        folder / "*.arrow",
    ):
        with pytest.raises(
            DataError, match=r"of which 'indices.arrow' selects rows; name the folder .*saved"
        ):
            read(source)
    assert read(save(tmp_path / "whole", None) / "data-00000-of-00002.arrow") == TEXTS[:5]


def test_other_indices_make_another_corpus(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [5, 6])
    first = corpus_key(corpus_files([folder]))
    assert num_bytes(corpus_files([folder])) > sum(p.stat().st_size for p in folder.glob("data-*"))
    (folder / "indices.arrow").write_bytes(
        _arrow(pa.table({"indices": pa.array([7, 5, 6], pa.uint64())}))
    )
    second = corpus_key(corpus_files([folder]))
    data = folder / "data-00000-of-00002.arrow"
    data.write_bytes(_arrow(pa.table({"id": [1], "text": ["x"]})))
    assert len({first, second, corpus_key(corpus_files([folder]))}) == 3
    assert absent_sources(DataConfig((str(folder),))) == []
    data.unlink()
    assert "cannot be read" in absent_sources(DataConfig((str(folder),)))[0]


def test_a_bad_row_is_named_by_its_number_in_the_dataset(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [0, 2, 1], texts=["a", "b", None])
    with pytest.raises(DataError, match=r"saved, row 3 of Arrow: is null"):
        read(folder)
    bad = BadRecords(skips=True)
    assert "".join(part.text for part in read_parts(corpus_files([folder]), bad=bad)) == "ab"
    assert bad.count == 1


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (
            pa.table({"indices": pa.array([10], pa.uint64())}),
            r"indices\.arrow: selects row 11, but the data set has 10; save the dataset again",
        ),
        (
            pa.table({"indices": pa.array([2**64 - 1], pa.uint64())}),
            r"selects row 18446744073709551616; save",
        ),
        (pa.table({"indices": pa.array([-1], pa.int64())}), r"selects row 0; save"),
        (pa.table({"indices": pa.array([1, None], pa.uint64())}), "has a null entry; save"),
        (
            pa.table({"indices": pa.array([1.0])}),
            r"has the columns \['indices'\]; must have one column",
        ),
        (
            pa.table({"other": pa.array([1], pa.uint64())}),
            r"has the columns \['other'\]; must have one column",
        ),
    ],
)
def test_indices_that_are_none_are_refused(tmp_path: Path, indices: pa.Table, message: str) -> None:
    folder = save(tmp_path / "saved", [0])
    (folder / "indices.arrow").write_bytes(_arrow(indices))
    with pytest.raises(DataError, match=message):
        read(folder)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [0, 9])
    for name in ("indices.arrow", "data-00001-of-00002.arrow"):
        content = (folder / name).read_bytes()
        for damaged in (b"", content[:40], b"x" * 100):
            (folder / name).write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{name}: is damaged Arrow"):
                read(folder)
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"{name}: cannot be read"):
            read(folder)
        (folder / name).write_bytes(content)
    state = json.loads((folder / "state.json").read_text())
    for broken in ({KEY: [{"filename": "../x.arrow"}]}, {KEY: "x"}, {"_data_files": [3]}):
        (folder / "state.json").write_text(json.dumps(state | broken))
        with pytest.raises(DataError, match="damaged Hugging Face dataset"):
            read(folder)
    (folder / "state.json").write_text(json.dumps(state | {"_data_files": []}))
    with pytest.raises(DataError, match="without files"):
        read(folder)
