"""Documents out of every format, and one clear message for what cannot be read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.test_corpus import read

from hybridpar.config import DataConfig
from hybridpar.data import CorpusOptions, prepare
from hybridpar.data.datasets import absent_sources
from hybridpar.data.files import readers
from hybridpar.data.files.pieces import PART
from hybridpar.errors import DataError

TEXTS = [
    "One text, of one line.",
    'Zwei "Zeilen"\nmit Größe\t;|',
    "x y " * 75_000,
    "漢字" * 1000,
    " ",
]


def _lines(key: str = "text") -> bytes:
    return b"\n".join(json.dumps({"id": i, key: text}).encode() for i, text in enumerate(TEXTS))


def _csv(delimiter: str, key: str = "text") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([["id", key], *enumerate(TEXTS), [9, ""]])
    return file.getvalue().encode()


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def _table(key: str = "text", kind: pa.DataType | None = None) -> pa.Table:
    texts = pa.array(TEXTS, kind or pa.string())
    return pa.table({"id": range(len(texts)), key: texts})


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def _arrow(
    table: pa.Table, make: Callable[..., pa.RecordBatchStreamWriter] = pa.ipc.new_stream
) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": _lines,
    "b.json": _lines,
    "c.txt": _lines,
    "d": _lines,
    "e.json": lambda: json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "f.json": lambda: json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False).encode(),
    "g.json": lambda: "\n".join(json.dumps({"text": text}, indent=1) for text in TEXTS).encode(),
    "h.csv": lambda: _csv(","),
    "i.csv": lambda: _csv(";"),
    "j.tsv": lambda: _csv("\t"),
    "k.txt": lambda: _csv(","),
    "l.jsonl.gz": lambda: gzip.compress(_lines()),
    "m.bin": lambda: gzip.compress(_csv(",")),
    "n.jsonl.zst": lambda: _zstd(_lines()),
    "o.json": lambda: _zstd(_lines()[:400_000]) + _zstd(_lines()[400_000:]),
    "p.parquet": lambda: _parquet(_table()),
    "q": lambda: _parquet(_table(kind=pa.large_string())),
    "r.arrow": lambda: _arrow(_table()),
    "s.arrow": lambda: _arrow(_table(), pa.ipc.new_file),
    "t.arrow": lambda: _arrow(_table(kind=pa.dictionary(pa.int32(), pa.string()))),
}


@pytest.mark.parametrize("name", FILES)
def test_documents_come_back(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    assert read(tmp_path / name) == TEXTS


def _skippable(num_bytes: int, number: int = 0) -> bytes:
    """A frame that zstandard passes over, as pzstd and t2sz write them."""
    return struct.pack("<II", 0x184D2A50 + number, num_bytes) + b"x" * num_bytes


@pytest.mark.parametrize(
    "frames",
    [
        [_skippable(4), _lines()],
        [_skippable(0), _skippable(3, 15), _lines()],
        [_skippable(3 << 20, 7), _lines()],
        [_lines()[:99], _skippable(5), b"", _lines()[99:]],
        [b"", _lines(), _skippable(9), b""],
    ],
    ids=["first", "two first", "long", "within", "last"],
)
def test_frames_of_zstandard_that_hold_no_text_are_passed_over(
    tmp_path: Path, frames: list[bytes]
) -> None:
    parts = [frame if frame[1:4] == b"\x2a\x4d\x18" else _zstd(frame) for frame in frames]
    (tmp_path / "a").write_bytes(b"".join(parts))
    assert read(tmp_path / "a") == TEXTS


def test_members_of_gzip_that_hold_no_text_are_passed_over(tmp_path: Path) -> None:
    data = _lines()
    parts = [gzip.compress(part) for part in (b"", data[:99], b"", data[99:], b"")]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(parts) + b"\0" * 512)
    assert read(tmp_path / "a.jsonl.gz") == TEXTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.txt.zst", _zstd(b"")),
        ("a", _skippable(4)),
        ("a.txt.zst", _skippable(0) + _zstd(b"") + _skippable(2)),
    ],
    ids=["gzip", "zstandard", "a frame", "three frames"],
)
def test_a_file_that_expands_to_nothing_is_empty(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"a.*: is empty"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_skippable(4) + b"\x04\x22\x4d\x18\x40\xff", "is LZ4"),
        (_skippable(4) + b"prose", "is damaged zstandard"),
        (_skippable(4)[:-1], "is damaged zstandard"),
        (_skippable(4)[:6], "is damaged zstandard"),
        (_zstd(b"ok") + _skippable(4)[:-1], "is damaged zstandard"),
        (_zstd(b"ok") + b"prose", "is damaged zstandard"),
        (_skippable(4) + _zstd(b"\x89PNG\r\n\xff"), "is zstandard of a PNG image"),
    ],
    ids=["lz4", "prose", "cut", "cut header", "cut behind", "prose behind", "png"],
)
def test_data_behind_a_skippable_frame_are_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a")


def test_a_folder_has_them_all(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        "e.json",
        "h.csv",
        "j.tsv",
        "l.jsonl.gz",
        "n.jsonl.zst",
        "p.parquet",
        "r.arrow",
    ):
        (tmp_path / name).write_bytes(FILES[name]())
    (tmp_path / "ignored.png").write_bytes(b"\x89PNG\0")
    assert sorted(read(tmp_path)) == sorted(TEXTS * 8)


def test_another_key(tmp_path: Path) -> None:
    for name, data in (
        ("a.json", _lines("body")),
        ("b.csv", _csv(",", "body")),
        ("d.txt", _lines("body")),
        ("c.parquet", _parquet(_table("body"))),
    ):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name, text_key="body") == TEXTS
    made = prepare(
        tmp_path / "c.parquet",
        tmp_path / "out",
        300,
        options=CorpusOptions(text_key="body"),
        quiet=True,
    )
    assert made.num_documents == len(TEXTS)
    with pytest.raises(
        DataError,
        match=r"a\.json, line 1 of JSON lines: .* under \"text\".*to one of \['body'\]",
    ):
        read(tmp_path / "a.json")
    with pytest.raises(
        DataError,
        match=r"line 1 of CSV: has no column 'text'; set data.text_key to one of "
        r"\['id', 'body'\]",
    ):
        read(tmp_path / "b.csv")
    with pytest.raises(
        DataError, match=r"is parquet and has no text column 'text'; .* to one of \['body'\]"
    ):
        read(tmp_path / "c.parquet")


def _saved(folder: Path, table: pa.Table) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        (folder / name).write_bytes(_arrow(part))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    (folder / "dataset_info.json").write_text("{}")


def test_a_hugging_face_dataset(tmp_path: Path) -> None:
    _saved(tmp_path / "one", _table())
    assert read(tmp_path / "one") == TEXTS
    for part in ("train", "test"):
        _saved(tmp_path / "parts" / part, _table())
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(tmp_path / "parts") == read(tmp_path / "parts" / "test") == TEXTS
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(
        DataError, match=r"a Hugging Face dataset with the splits \['test'\]; name the"
    ):
        read(tmp_path / "parts")
    for names in ('[{"filename": "../one/data-00000-of-00002.arrow"}]', "[3]", '{"a": 1}'):
        (tmp_path / "one" / "state.json").write_text(f'{{"_data_files": {names}}}')
        with pytest.raises(DataError, match="damaged Hugging Face dataset"):
            read(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl, line 2 of JSON lines: is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]', "line 2 of JSON lines: is not an object with text"),
        ("a.jsonl", b'{"text": 3}', "line 1 of JSON lines: is not an object with text"),
        (
            "a.jsonl",
            b'{"text": "\\ud800"}',
            "line 1 of JSON lines: character 0 of the text is half",
        ),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 of JSON lines: byte 0xff"),
        ("a.jsonl", b"[" * 100_000, "line 1 of JSON lines: is not JSON"),
        (
            "a.json",
            b'{"version": 3,\n "items": []}',
            "element 1 of JSON: is not an object with text",
        ),
        (
            "a.json",
            b'[{"text": "a"}, {"text": "b"}',
            "element 2 of JSON: is the last one, but the array is not closed",
        ),
        (
            "a.json",
            b'[{"text": "a"} {"text": "b"}]',
            "element 1 of JSON: is followed by '{', not by a comma",
        ),
        (
            "a.json",
            b'[{"text": "a"}] x',
            "element 1 of JSON: ends the array, which must not be followed by 'x'",
        ),
        ("a.json", b'[{"text": "a"}, {"text": ]', "element 2 of JSON: is not JSON"),
        ("a.json", b"[" * 100_000, "element 1 of JSON: is not JSON"),
        ("a.json", b"prose", "element 1 of JSON: is not JSON"),
        ("a.csv", b"id,text\n1,a\n2\n", "line 3 of CSV: has only 1 cells, but 'text' is column 2"),
        ("a.csv", b'id,text\n1,"a\n', "line 2 of CSV: is damaged"),
        ("a.csv", b"id,text\n1,\xff\n", "line 2 of CSV: byte 0xff"),
        ("a.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-9], r"a\.txt\.gz: is damaged gzip"),
        (
            "a.txt.gz",
            gzip.compress(b"ok\n\xff", mtime=0),
            "line 2 of gzip of plain text: byte 0xff",
        ),
        ("a.jsonl.zst", _zstd(_lines())[:-30], r"is damaged zstandard"),
        ("a.bz2", bz2.compress(b"text"), r"is bzip2"),
        ("a.parquet", _parquet(_table())[:-30], "is damaged parquet"),
        ("a.parquet", b"PAR1", "is damaged parquet"),
        (
            "a.parquet",
            _parquet(_table(kind=pa.binary())),
            "is parquet and has no text column; its columns are",
        ),
        ("a.arrow", _arrow(_table())[:2000], "is damaged Arrow stream"),
        ("a.arrow", _arrow(_table(), pa.ipc.new_file)[:-30], "is damaged Arrow"),
    ],
)
def test_unreadable_data_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, what in (
        ("p.parquet", "parquet"),
        ("r.arrow", "Arrow stream"),
        ("n.jsonl.zst", "zstandard"),
    ):
        (tmp_path / name).write_bytes(FILES[name]())
        with pytest.raises(
            DataError,
            match=rf"is {what}, which requires pyarrow: pip install 'hybridpar\[data\]'",
        ):
            read(tmp_path / name)
        assert "hybridpar[data]" in absent_sources(DataConfig((str(tmp_path / name),)))[0]


def test_a_record_is_not_read_to_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MAX_RECORD", 1 << 18)
    for name, message in (
        ("a.jsonl", "line 3 of JSON lines: has more than 262144 bytes"),
        ("h.csv", "line 5 of CSV"),
        ("l.jsonl.gz", "line 3 of gzip of JSON lines"),
        ("e.json", "element 1 of JSON: has more"),
    ):
        data = FILES[name]() if name != "e.json" else b'[{"text": "' + b"x" * 2 * PART + b'"}]'
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)


_DRAIN = """
import pathlib, sys
from hybridpar.data.corpus import corpus_files, read_parts
for path in sys.argv[1:]:
    print(sum(len(part.text) for part in read_parts(corpus_files([path]))))
    print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak of its memory there"
)
def test_expanding_a_small_file_takes_no_memory(tmp_path: Path) -> None:
    for compress in (gzip.compress, _zstd):
        paths = [tmp_path / name for name in ("small", "large")]
        for path, repeats in zip(paths, (1000, 10_000_000), strict=True):
            path.write_bytes(compress(b"word " * repeats))
        done = subprocess.run(
            [sys.executable, "-c", _DRAIN, *map(str, paths)], check=True, capture_output=True
        )
        _, small, length, large = map(int, done.stdout.split())
        assert length == 50_000_000
        assert large - small < 30_000  # KiB: blocks of a MiB
