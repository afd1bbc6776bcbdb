"""Files that others have made: what is opened, and what messages say of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridpar.checkpoint import read_manifest
from hybridpar.config import from_mapping, load_toml
from hybridpar.data import IndexedDataset, Tokenizer
from hybridpar.errors import CheckpointError, ConfigError, DataError, HybridparError, Problem
from hybridpar.placement import read_document
from hybridpar.reading import nearest_path, open_regular, read_limited, read_text, read_toml
from hybridpar.train.bundle import read_bundle
from hybridpar.train.reporting.run_metrics import read_metrics
from hybridpar.validate import problems


def test_a_path_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("")
    assert nearest_path(tmp_path / "profil.json") == str(tmp_path / "profile.json")
    for path in ("profile.json", "x", "none/profile.json", "p" * 300, "a\0b"):
        assert nearest_path(tmp_path / path) == ""
    (tmp_path / "profile.jso").symlink_to("nowhere")
    assert nearest_path(tmp_path / "profile.jso") == str(tmp_path / "profile.json")  # not itself
    (tmp_path / "profile.json").write_bytes(b"\xef\xbb\xbf\xc3\xa9")
    assert read_text(tmp_path / "profile.json", 10) == "\u00e9"


def test_only_regular_files_of_a_known_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_limited(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes; at most 4 are allowed"):
        read_limited(tmp_path / "a", 4)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_limited(tmp_path / "link", 5) == b"12345"
    assert read_limited(tmp_path / "link", 5, within=tmp_path) == b"12345"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "out").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="a symbolic link that leads out of its folder"):
        open_regular(tmp_path / "inner" / "out", within=tmp_path / "inner")
    with pytest.raises(OSError, match="not a valid file name"):
        open_regular(tmp_path / "a\0b")


def test_a_pipe_or_a_device_hangs_nobody(tmp_path: Path) -> None:
    for name in (
        "x.toml",
        "manifest.json",
        "x.idx",
        "tokenizer.json",
        "graph.json",
        "step_00000001.json",
        "m.jsonl",
    ):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_toml(tmp_path / "x.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_toml("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="not a regular file"):
        IndexedDataset(tmp_path / "x")
    with pytest.raises(DataError, match="not a regular file"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="not a regular file"):
        read_document(tmp_path / "graph.json")
    with pytest.raises(DataError, match="not a regular file"):
        read_bundle(tmp_path / "step_00000001.json")
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_a_checkpoint_holds_no_links_to_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "manifest.json").symlink_to(tmp_path / "secret")
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: cannot be read \(a symbolic link that leads"
    ):
        read_manifest(tmp_path / "step")


@pytest.mark.parametrize("name", ["../other", "/tmp/run", "a/../../b", "", "a\nb"])
def test_a_run_stays_in_its_folder(name: str) -> None:
    assert [p.field for p in problems(from_mapping({"run": {"name": name}}), 1)] == ["run.name"]


def test_numbers_that_no_machine_has_are_refused_at_once() -> None:
    wild = {
        "model": {"hidden_size": 2**62, "num_layers": 10**12, "rotary_base": 0},
        "optim": {"lr": float("inf")},
        "train": {"timeout_s": 1e300, "threads": 2000},
        "data": {"weights": [float("nan")], "cache": "a\0b"},
    }
    assert {p.field for p in problems(from_mapping(wild), 1)} == {
        "model.hidden_size",
        "model.num_layers",
        "model.rotary_base",
        "optim.lr",
        "train.timeout_s",
        "train.threads",
        "data.weights",
        "data.cache",
    }


def test_messages_are_short_and_printable() -> None:
    assert str(HybridparError("a\x1b[2Jb\ud800\nc")) == "a\\x1b[2Jb\\ud800\nc"
    assert len(str(HybridparError("x" * 10**6))) < 30_000
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    assert len(str(Problem("a", deep, "is wrong"))) < 200
    assert str(Problem("a", 1 << 20_000, "is wrong")) == "a = <int>: is wrong"


DEEP = [
    "a." * 16 + "a = 1",
    f"[{'a.' * 50_000}b]",
    '\'x\' . "y.\\"z"\t.' * 9 + "a = 1",
    "x = { " + "a." * 16 + "b = 1 }",
]


@pytest.mark.parametrize("key", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize(
    "before", ["", "# it's\na = 'b\"'\n", 'a = """\n\\"""\'\n"""\n', "b = '''\"\n'''\n"]
)
def test_a_key_of_many_parts_is_refused_before_it_is_read(
    tmp_path: Path, before: str, key: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"{before}{key}\n")
    with pytest.raises(
        ValueError, match=rf"^the key at line {before.count(chr(10)) + 1} has more than 16 parts"
    ):
        read_toml(path, 1 << 20)


@pytest.mark.parametrize(
    "value",
    [
        f"'{'a.' * 50_000}'",
        f'"{"a." * 50_000}"',
        f'"""\n{"a." * 50_000}"""',
        f"1 # {'a.' * 50_000}b",
        str([f"{i}.txt" for i in range(999)]),
        "1979-05-27T07:32:00.999",
        str([i / 7 for i in range(999)]),
    ],
)
def test_dots_elsewhere_are_no_keys(tmp_path: Path, value: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"{'a.' * 15}a = {value}\n")
    assert read_toml(path, 1 << 20)


@pytest.mark.parametrize(
    "text",
    ['\\"' * 250_000, '"""' + '\\"""' * 125_000, "'" * 500_001, "a" * 500_000, "a." * 250_000],
)
def test_text_that_is_no_toml_is_left_to_the_parser(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"line 1, column |at end of document|has more than"):
        read_toml(path, 1 << 20)
