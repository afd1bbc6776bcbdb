"""Records that cannot be read: an error that names them, or left out, counted and named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from data.files.test_readers import _arrow, _csv, _parquet, _zstd
from train.runs import tiny

from hybridpar.cli import main
from hybridpar.config import Config, DataConfig, Launch, ModelConfig, from_mapping
from hybridpar.data import CorpusOptions, open_data, prepare, prepare_tokenizer
from hybridpar.data.corpus import corpus_files, read_parts
from hybridpar.data.files import readers
from hybridpar.data.files.bad_records import NUM_NAMED, BadRecords
from hybridpar.data.prepared import BAD_RECORDS, open_prepared
from hybridpar.errors import DataError
from hybridpar.train.job import train

SKIP = CorpusOptions(on_bad_record="skip")
FINE = '{"text": "fine"}'
LINES = [
    (b'{"text": "\\ud800x"}', "character 0 of the text is half of a surrogate pair"),
    (
        b'{"text": null}',
        'is not an object with text under "text", such as {"text": "..."}; it has null there',
    ),
    (b'{"body": "a"}', "set data.text_key to one of ['body']"),
    (b'{"text": 3.5}', "it has 3.5 there"),
    (b'{"text": ["a"]}', "it has ['a'] there"),
    (b"[1]", "is not an object"),
    (b'{"text": ', "is not JSON (Expecting value"),
    (b"[" * 100_000, "is not JSON (maximum recursion depth"),
    (b'{"text": "\xff"}', "byte 0xff is not UTF-8"),
    (b'{"text": "\0"}', "contains a zero byte"),
    (b'{"text": "' + b"x" * 2**21 + b'"}', "has more than 1048576 bytes"),
]


def taken(*sources: Path | str) -> tuple[list[str], BadRecords]:
    """The documents that are read where bad records are left out, and the bad ones."""
    texts = [""]
    bad = BadRecords(skips=True)
    for text, ends in read_parts(corpus_files(sources), bad=bad):
        texts[-1] += text
        if ends:
            texts.append("")
    assert texts.pop() == ""
    return texts, bad


def refused(path: Path) -> str:
    with pytest.raises(DataError) as found:
        list(read_parts(corpus_files([path])))
    return str(found.value)


@pytest.mark.parametrize(("line", "message"), LINES, ids=[message[:30] for _, message in LINES])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_bad_line_among_others(
    tmp_path: Path, name: str, line: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_MAX_RECORD", 2**20)
    content = b"\n".join([FINE.encode(), line, FINE.encode(), line])
    path = tmp_path / name
    path.write_bytes({".gz": gzip.compress, ".zst": _zstd}.get(path.suffix, bytes)(content))
    texts, bad = taken(path)
    assert texts == ["fine", "fine"]
    assert bad.count == 2
    assert [
        text.startswith(f"{path}, line {n} of ") and message in text
        for n, text in zip((2, 4), bad.first, strict=True)
    ] == [True, True], bad.first
    said = refused(path)
    assert said == f'{bad.first[0]}; data.on_bad_record = "skip" leaves bad records out'


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (b'{"text": null}', "it has null there"),
        (b"3", "is not an object with text"),
        (b'{"text": "\\udfff"}', "character 0 of the text is half of a surrogate pair"),
        (b'{"text": "ab\xe9"}', "byte 0xe9 of the text is not UTF-8"),
    ],
)
def test_a_bad_element_of_json(tmp_path: Path, element: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[\n" + b",\n".join([FINE.encode(), element, FINE.encode()]) + b"]")
    texts, bad = taken(path)
    assert texts == ["fine", "fine"]
    assert bad.count == 1
    assert bad.first[0].startswith(f"{path}, element 2 of JSON: ")
    assert message in bad.first[0]
    refused(path)
    path.write_bytes(b'[{"text": "a"}, {"text": ]')  # what follows cannot be told apart
    with pytest.raises(DataError, match="element 2 of JSON: is not JSON"):
        taken(path)


@pytest.mark.parametrize(
    ("row", "place", "message"),
    [
        (b"2", "line 3 of CSV", "has only 1 cells"),
        (b"2,caf\xe9", "line 3 of CSV", "byte 0xe9 is not UTF-8"),
        (b'2,"a"b', "line 3 of CSV", "is damaged ("),
        (b"2,a\0b", "line 3 of CSV", "zero byte"),
        (b'2,"a\nb\xff"', "line 3 of CSV", "which continues to line 4, byte 0xff is not UTF-8"),
    ],
)
def test_a_bad_row_of_csv(tmp_path: Path, row: bytes, place: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,fine\n" + row + b"\n3,fine\n")
    texts, bad = taken(path)
    assert texts == ["fine", "fine"]
    assert bad.count == 1
    assert f"{path}, {place}: " in bad.first[0]
    assert message in bad.first[0]
    assert bad.first[0] in refused(path)


def test_a_row_without_its_end_is_named_with_all_that_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,fine\n2,"open\n3,lost\n4,lost\n')
    texts, bad = taken(path)
    assert texts == ["fine"]
    assert (
        "line 3 of CSV: which continues to line 5, is damaged (unexpected end of data)"
        in bad.first[0]
    )


def test_a_line_of_csv_without_end_is_an_error_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_MAX_RECORD", 2**10)
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,fine\n2," + b"x" * 2**11 + b"\n3,fine\n")
    with pytest.raises(DataError, match="line 3 of CSV: has more than 1024 bytes"):
        taken(tmp_path / "a.csv")


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("a.parquet", "a.arrow", "b.arrow")
        for kind in KINDS[: 3 if name == "a.parquet" else 4]
    ],
)
def test_bad_rows_of_columns(tmp_path: Path, name: str, kind: pa.DataType) -> None:
    dictionary = pa.types.is_dictionary(kind)
    plain = kind.value_type if dictionary else kind
    raw = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }[plain]
    values = pa.array([b"fine", b"caf\xe9", b"\xed\xa0\x80"], raw).view(plain)
    indices = pa.array([0, None, 1, 0, 2], pa.int8())
    texts = (
        pa.DictionaryArray.from_arrays(indices, values, safe=False)
        if dictionary
        else pa.array([b"fine", None, b"caf\xe9", b"fine", b"\xed\xa0\x80"], raw).view(plain)
    )
    write = {
        "a.parquet": _parquet,
        "a.arrow": _arrow,
        "b.arrow": lambda t: _arrow(t, pa.ipc.new_file),
    }[name]
    path = tmp_path / name
    path.write_bytes(write(pa.table({"text": texts})))
    found, bad = taken(path)
    assert found == ["fine", "fine"]
    what = [text.partition(": ")[2] for text in bad.first]
    assert [
        ", row 2 of " in bad.first[0],
        ", row 3 of " in bad.first[1],
        ", row 5 of " in bad.first[2],
    ] == [True] * 3
    assert what == [
        "is null, not text",
        "byte 0xe9 is not UTF-8; a corpus must be UTF-8 text",
        "byte 0xed is not UTF-8; a corpus must be UTF-8 text",
    ]
    assert "row 2" in refused(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.txt", b"ok\n" * 2**20 + b"\xff", "line 1048577 of plain text: byte 0xff"),
        ("b.md", b"ok\n\0", "line 2 of plain text: contains a zero byte"),
        (
            "b.txt.gz",
            gzip.compress(b"ok\n\xff", mtime=0),
            "line 2 of gzip of plain text: byte 0xff",
        ),
        ("b.txt.zst", _zstd(b"ok\n\xff"), "line 2 of zstandard of plain text: byte 0xff"),
    ],
)
def test_a_file_of_plain_text_is_left_out_as_a_whole(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / name).write_bytes(content)
    texts, bad = taken(tmp_path)
    assert texts == ["fine"]
    assert bad.count == 1
    assert message in bad.first[0]
    refused(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.jsonl.gz", gzip.compress(FINE.encode() * 999, mtime=0)[:-9], "is damaged gzip"),
        ("b.txt", b"\x89PNG\r\n\0", "is a PNG image"),
        ("b.csv", b"id,body\n", "has no column 'text'"),
    ],
)
def test_damage_of_a_whole_file_is_always_an_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        taken(tmp_path)


def test_number_of_records_is_said_if_all_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "a"}\n' * 7)
    with pytest.raises(
        DataError,
        match=r"no text in it \(JSON lines\); 7 bad records were left out, such as .*a."
        r"jsonl, line 1 of JSON lines: .*set data\.text_key to one of \['body'\]",
    ):
        taken(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"Stone {i} and river {i}. " * 9}) for i in range(40)]
    path.write_text("\n".join([*lines[:20], *['{"text": null}'] * 9, *lines[20:]]))
    return path


def test_they_are_kept_with_the_prepared_corpus(corpus: Path, tmp_path: Path) -> None:
    made = prepare(corpus, tmp_path / "out", 300, options=SKIP, quiet=True)
    assert made.num_documents == 40
    assert (made.num_bad, len(made.first_bad)) == (9, NUM_NAMED)
    journal = made.prefix.with_name(BAD_RECORDS).read_text().splitlines()
    assert [line.partition(" of ")[0] for line in journal] == [
        f"{corpus}, line {n}" for n in range(21, 30)
    ]
    lines = made.notes()
    assert (
        lines[0]
        == f"{made.prefix}: 9 bad records were left out ({made.prefix.with_name(BAD_RECORDS)})"
    )
    assert lines[1:] == [*journal[:NUM_NAMED], "..."]
    assert open_prepared(made.prefix) == made
    manifest = made.prefix.with_name("manifest.json")
    older = json.loads(manifest.read_text())
    del older["num_bad"], older["first_bad"]
    manifest.write_text(json.dumps(older))
    assert open_prepared(made.prefix).notes() == []
    manifest.write_text(json.dumps(older | {"num_bad": "many"}))
    with pytest.raises(DataError, match="its num_bad must be a number"):
        open_prepared(made.prefix)


def test_a_policy_has_a_corpus_of_its_own(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", 300, options=SKIP, quiet=True)
    prepare_tokenizer([corpus, corpus], tmp_path / "out", 300, options=SKIP, quiet=True)
    for call in (
        lambda: prepare(corpus, tmp_path / "out", 300, quiet=True),
        lambda: prepare_tokenizer([corpus, corpus], tmp_path / "out", 300, quiet=True),
    ):
        with pytest.raises(DataError, match="line 21 of JSON lines"):
            call()
    corpus.write_text(
        "\n".join(line for line in corpus.read_text().splitlines() if "null" not in line)
    )
    made = [
        prepare(corpus, tmp_path / "out", 300, options=options, quiet=True)
        for options in (CorpusOptions(), SKIP)
    ]
    assert made[0].prefix != made[1].prefix
    assert made[0].fingerprint == made[1].fingerprint
    assert not made[1].prefix.with_name(BAD_RECORDS).exists()


def test_preprocess_and_later_runs_say_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["preprocess", str(corpus), "--output", str(tmp_path / "out"), "--vocab_size", "300"]
    assert main(flags) == 1
    assert "line 21 of JSON lines" in capsys.readouterr().err
    for _ in range(2):  # made, and found again
        assert main([*flags, "--on_bad_record", "skip"]) == 0
        out, err = capsys.readouterr()
        assert out.endswith("vocabulary 300, 9 bad records left out\n")
        assert "corpus: 9 bad records were left out" in err
        assert f"{corpus}, line 21 of JSON lines: is not an object" in err
    assert main([*flags, "--on_bad_record", "skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bad_records"] == 9
    config = from_mapping(
        {"data": {"corpus": [str(corpus)], "on_bad_record": "skip"}, "train": {"num_steps": 1}},
        tiny(tmp_path),
    )
    train(config, Launch(0, 0, 1, 1))
    assert "corpus: 9 bad records were left out" in capsys.readouterr().err


def test_bad_records_of_validation_are_said_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "fine.jsonl").write_text(
        "\n".join(json.dumps({"text": f"Stone {i}. " * 9}) for i in range(40))
    )
    data = DataConfig(
        (str(tmp_path / "fine.jsonl"),),
        valid_corpus=(str(corpus),),
        on_bad_record="skip",
        cache=str(tmp_path / "out"),
    )
    config = Config(ModelConfig(seq_length=8, vocab_size=300), data=data)
    opened = open_data(config, quiet=True)
    assert "9 bad records were left out" in opened.notes[0]
    assert Config().data.on_bad_record == "error"


def test_csv_of_the_other_tests_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(_csv(","))
    assert taken(tmp_path / "a.csv")[1].count == 0
