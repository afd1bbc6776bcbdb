"""The format of a file: by its content, and by its name if the content leaves it open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridpar.data.files.formats import HEAD, format_of
from hybridpar.errors import DataError

LINES = b'{"text": "a", "id": 1}\n{"id": 2, "text": "b"}\n'
OTHER = b'{"body": "a"}\n{"body": "b"}\n'
LONG = b'{"id": 1, "text": "' + b"x" * HEAD


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.txt", b"A text.\n", "plain text"),
        ("a", b"", "plain text"),
        ("a.txt", b"[Intro]\nA song.\n", "plain text"),
        ("a.txt", b'{"text": "a"} is how a record begins\n', "plain text"),
        ("a.txt", b"{ braces }\n", "plain text"),
        ("a.txt", LINES + b"and then prose\n", "plain text"),
        ("a.txt", OTHER, "plain text"),
        ("a.txt", b'[{"title": "no text"}, 3]\n', "plain text"),
        ("a.py", b'{"a": 1}\n', "plain text"),
        ("a.txt", b"text, image\nsound, film\n", "plain text"),
        ("a.txt", b"the text,of it\n", "plain text"),
        ("a.txt", b"text,image\nHe said, no, and left.\n", "plain text"),
        ("a.txt", b"text\nmore text\n", "plain text"),
        ("a.txt", b"id\ttext\n1\tone\n", "TSV"),
        ("a.txt", b'id,text\n1,"a, b"\n', "CSV"),
        ("a", b"text;id\na;1\n", "CSV"),
        ("a.txt", LINES, "JSON lines"),
        ("a.dat", LINES, "JSON lines"),
        ("a.dat", OTHER, "JSON lines"),
        ("a.json", LINES, "JSON lines"),
        ("a.json", OTHER, "JSON lines"),
        ("a.csv", LINES, "JSON lines"),
        ("a.jsonl", b"not JSON at all", "JSON lines"),
        ("a.ndjson.gz", b"", "JSON lines"),
        ("a.jsonl.zst", LINES, "JSON lines"),
        ("a.txt", LONG, "JSON lines"),
        ("a.txt", LONG.replace(b"text", b"body"), "plain text"),
        ("a.txt", b"\xef\xbb\xbf" + LINES, "JSON lines"),
        ("a.txt", b"\n\n" + LINES, "JSON lines"),
        ("a.json", b'[\n {"text": "a"}\n]', "JSON"),
        ("a.txt", b'[\n {"text": "a"}\n]', "JSON"),
        ("a.json", b"{\n", "JSON"),
        ("a.txt", b"[" + LONG, "JSON"),
        ("a.json", b"prose", "JSON"),
        ("a.csv", b"id,text\n1,x\n", "CSV"),
        ("a.csv", b"text\nx\n", "CSV"),
        ("a.csv", b"id;text\n", "CSV"),
        ("A.CSV", b"id\ttext\n", "TSV"),
        ("a.tsv", b"id\tbody\n", "TSV"),
        ("a.tsv.gz", b"text\tid\n", "TSV"),
        ("a.txt", b"PAR1" + b"\0" * 20, "parquet"),
        ("a.arrow", b"ARROW1\0\0", "Arrow"),
        ("a.txt", b"ORC shamans, BZh and %PDF- are words here\n", "plain text"),
    ],
)
def test_format_of_a_file(name: str, head: bytes, kind: str) -> None:
    assert str(format_of(Path(name), head, "text")) == kind


def test_another_key_makes_other_records_of_it() -> None:
    assert format_of(Path("a.txt"), OTHER, "body").kind == "JSON lines"
    assert format_of(Path("a.txt"), LINES, "body").kind == "plain text"
    quoted = json.dumps({'a "key"': "x"}).encode()
    assert format_of(Path("a.txt"), quoted, 'a "key"').kind == "JSON lines"


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0", "a.txt: is a PNG image; a corpus must be"),
        ("a.jsonl", b"PK\x03\x04\0\xff", "is a ZIP archive"),
        ("a.txt", b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", "is PDF"),
        ("a.txt", b"\xff\xfeh\0i\0", "is UTF-16 text"),
        ("a.idx", b"MMIDIDX\0\0\1", "the index of a Megatron token file"),
        ("a.txt.bz2", b"BZh91AY&SY\xff", "is bzip2"),
        ("a.parquet", b"prose", "is plain text, not parquet as its name says"),
        ("a.arrow", LINES, "is JSON lines, not Arrow as its name says"),
    ],
)
def test_refused_files(name: str, head: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        format_of(Path(name), head, "text")


def test_contents_of_a_compressed_file_are_named_too() -> None:
    assert str(format_of(Path("a.csv.gz"), b"text,id\na,1\n", "text", "gzip")) == "gzip of CSV"
    with pytest.raises(DataError, match="is zstandard of parquet; decompress it"):
        format_of(Path("a"), b"PAR1", "text", "zstandard")
