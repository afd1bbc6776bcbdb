"""Arguments, names of files and the environment may hold bytes that are not UTF-8: one clear line,
or they work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train.runs import metrics, tiny, write_corpus

from hybridpar.cli import main
from hybridpar.cli.values import as_utf8
from hybridpar.config import Launch, from_mapping, load_toml, to_toml
from hybridpar.errors import ConfigError, not_utf8
from hybridpar.train.folder import begin
from hybridpar.train.inference.generate import check_prompts
from hybridpar.train.job import train
from hybridpar.validate import problems

NAME = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("café \U0001f600 \0", ""),
        (NAME, "byte 0xe9 behind 'caf' is not"),
        ("ab\ud800", "character 2 is half of a surrogate pair"),
    ],
)
def test_bytes_that_are_not_utf8_are_found(text: str, flaw: str) -> None:
    assert not_utf8(text) == flaw


def test_a_prompt_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["generate", "--checkpoint", str(tmp_path), "--prompt", "fine", "--prompt", NAME]) == 1
    )
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(
        r"hybridpar: prompt = 'caf\udce9': must be UTF-8 text; byte 0xe9 behind 'caf' is not; try "
    )
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        check_prompts(["\ud800"])
    assert as_utf8("café") == "café"
    assert as_utf8(NAME) == NAME


@pytest.mark.parametrize(
    "section",
    [
        {"data": {"corpus": ["fine", NAME]}},
        {"data": {"cache": NAME}},
        {"run": {"project": NAME}},
        {"run": {"dir": NAME}},
        {"data": {"tokenizer": NAME}},
        {"data": {"text_key": NAME}},
        {"train": {"start_from": NAME}},
    ],
)
def test_a_setting_is_refused_as_it_could_not_be_kept(
    tmp_path: Path, section: dict[str, dict[str, object]]
) -> None:
    config = from_mapping(section, tiny(tmp_path))
    (found,) = problems(config, 1)
    ((name, keys),) = section.items()
    assert found.field == f"{name}.{next(iter(keys))}"
    assert (
        "must be UTF-8 text, since config.toml stores it; byte 0xe9 behind 'caf' is not"
        in found.rule
    )


@pytest.mark.parametrize("name", ["MASTER_ADDR", "GLOO_SOCKET_IFNAME"])
def test_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, NAME)
    with pytest.raises(
        ConfigError, match=rf"{name} = .*this environment variable must be UTF-8 text; byte 0xe9"
    ):
        Launch.from_environment()


def test_a_run_trains_in_a_folder_of_any_name_from_files_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / NAME
    (folder / "texts").mkdir(parents=True)
    write_corpus(folder / "texts" / f"{NAME}.txt")
    here = from_mapping(
        {"data": {"corpus": ["texts"]}, "run": {"dir": "runs"}, "train": {"num_steps": 2}},
        tiny(tmp_path),
    )
    path = folder / "tiny.toml"
    path.write_text(to_toml(here))
    monkeypatch.chdir(folder)
    run = train(load_toml(path), Launch(0, 0, 1, 1)).folder
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2]


def test_the_folder_of_a_model_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "rule_of_bytes.py").write_text(
        "import hybridpar\nclass Rule(hybridpar.UpdateRule):\n    def update(self, *given):\n      "
        "  pass\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    config = from_mapping({"optim": {"name": "own", "spec": "rule_of_bytes:Rule"}}, tiny(tmp_path))
    __import__("rule_of_bytes")
    for _ in range(2):
        begin(config, None)
    assert (config.run.folder / "model_folder").read_bytes() == os.fsencode(folder) + b"\n"
    assert load_toml(config.run.folder / "config.toml").optim.spec == "rule_of_bytes:Rule"


def test_text_that_stdout_cannot_hold_is_escaped(tmp_path: Path) -> None:
    """A prompt, in a locale of ASCII alone, where Python takes its bytes for those of no text."""
    script = (
        "import sys\nfrom hybridpar.cli.entry import _print_anything\nfrom hybridpar.cli.values "
        "import as_utf8\n"
        "_print_anything()\nprint(as_utf8(sys.argv[1]))"
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for settings in (ascii_only, {"PYTHONIOENCODING": "ascii:strict"}):
        done = subprocess.run(
            [sys.executable, "-c", script, "café"],
            capture_output=True,
            env=clean | settings,
            check=True,
        )
        assert done.stdout == rb"caf\xe9" + b"\n"
