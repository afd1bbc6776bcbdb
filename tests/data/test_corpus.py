import json
from pathlib import Path

import pytest

from hybridpar.data.corpus import corpus_files, corpus_key, read_parts, source_files
from hybridpar.errors import DataError


def read(*sources, text_key="text", max_bytes=None):
    texts = [""]
    for text, ends in read_parts(corpus_files(sources, text_key), max_bytes):
        texts[-1] += text
        if ends:
            texts.append("")
    assert texts.pop() == ""
    return texts


def test_standard_library():
    texts = read("stdlib", max_bytes=300_000)
    assert texts == read("stdlib", max_bytes=300_000)
    assert 200_000 < sum(len(t.encode()) for t in texts) <= 300_000
    files = source_files("stdlib")
    assert len(files) > 300
    folders = {part for f in files for part in f.name.split("/")[:-1]}
    assert not folders & {"encodings", "pydoc_data", "test", "tests", "idle_test"}
    assert not any("site-packages" in f.name or "dist-packages" in f.name for f in files)
    assert [f.name for f in files] != sorted(f.name for f in files)  # the end is a fair sample


def test_files_folders_patterns_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("twö", encoding="utf-8")
    (tmp_path / "sub" / "empty.txt").touch()
    (tmp_path / "sub" / "c.jsonl").write_text(
        '{"text": "three"}\n\n{"text": "", "id": 1}\n{"text": "four"}'
    )
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden.txt").write_bytes(b"\xff")
    assert sorted(read(tmp_path)) == ["four", "one\r\n", "three", "twö"]
    assert read(tmp_path / "a.txt", tmp_path / "sub" / "c.jsonl") == ["one\r\n", "three", "four"]
    assert sorted(read(f"{tmp_path}/**/*.md")) == ["twö"]
    assert read(tmp_path / "sub" / "c.jsonl", max_bytes=20) == ["three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ok\nfine\n\xff\xfe", r"a\.txt, line 3 of plain text: byte 0xff is not UTF-8"),
        ("a.txt", b"caf\xe9", r"line 1 of plain text: byte 0xe9"),
        ("a.txt", b"ok\n\0\0", r"line 2 of plain text: contains a zero byte"),
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"\n \n", r"a\.jsonl: no text in it \(JSON lines\); name a file or folder"),
        ("a.jsonl", b'{"text": ""}', r"no text in it \(JSON lines\)"),
    ],
)
def test_unreadable_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing-here", "does not exist"),
        ("*.nothing", "matches no file"),
        (".", "contains no files ending in .txt"),
    ],
)
def test_sources_without_files(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        read(source)


def test_a_file_that_vanishes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    files = corpus_files([path])
    path.unlink()
    for use in (corpus_key, lambda f: list(read_parts(f))):
        with pytest.raises(DataError, match="cannot be read"):
            use(files)


def test_key_changes_with_the_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    first = corpus_key(corpus_files([tmp_path]))
    assert first == corpus_key(corpus_files([tmp_path]))
    path.write_text(json.dumps({"text": "ab"}))
    assert first != corpus_key(corpus_files([tmp_path]))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.txt",
            b"",
            "a.txt: is empty; name a file or folder that has text or conversations, or stdlib",
        ),
        (
            "a.txt",
            b"fine\ncaf\xe9\n",
            "line 2 of plain text: byte 0xe9 is not UTF-8 (column 4); a corpus must be UTF-8 text",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b"\n',
            "line 2 of JSON lines: is not JSON (Expecting ',' delimiter, at ",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n {"text": }]',
            "element 2 of JSON: is not JSON (Expecting value, at line 2, col",
        ),
        (
            "a.json",
            b'[{"text": "a"},' + b"\n" * 2**21 + b'{"text": }]',
            "at line 2097153, column 10)",
        ),
    ],
)
def test_damage_is_named_with_its_place(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_parts(corpus_files([tmp_path / name])))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("txt.a", "name a file or folder that has text or conversations, or stdlib"),
        ("folder/B.TXT", "try folder/b.txt"),
        ("foldr/b.txt", "try folder/b.txt"),
        ("stdlb", "try stdlib"),
        ("-", "is not a regular file; a corpus is read more"),
        (
            "/dev/null",
            "is not a regular file; a corpus is read more than once, so save the text in a file",
        ),
    ],
)
def test_a_source_that_is_none_names_one_that_is(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        source_files(source)
    assert says in str(caught.value)
