"""Every flag of every command, and every key of the configuration, has a description; the help
shows the usual ones."""

from __future__ import annotations

import dataclasses

import pytest

from hybridpar.cli.commands import COMMANDS
from hybridpar.cli.entry import flags_of, own_flags, parse
from hybridpar.cli.help import USUAL, descriptions
from hybridpar.config import Config

SECTIONS = {field.name: type(getattr(Config(), field.name)) for field in dataclasses.fields(Config)}


WITH_CONFIG = [
    name for name, command in COMMANDS.items() if "config" in command.__dataclass_fields__
]


def without_description(settings: type) -> set[str]:
    """Names of a dataclass's fields that no docstring follows."""
    return {field.name for field in dataclasses.fields(settings)} - descriptions(settings).keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_a_description(name: str) -> None:
    assert without_description(SECTIONS[name]) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_description(name: str) -> None:
    described_once = {"path", "config"}  # by what ConfigFile and Overrides say
    assert without_description(COMMANDS[name]) - described_once == set()


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Output of a command that ends with 0."""
    with pytest.raises(SystemExit) as ended:
        parse(args)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", WITH_CONFIG)
def test_the_short_help_names_what_people_set(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = shown(capsys, name, "--help").splitlines()
    assert len(lines) < 100
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for flag in own_flags(COMMANDS[name]):
        assert f"  --{flag}" in text
    for key in USUAL:
        assert sum(line.startswith(f"  --{key} ") for line in lines) == 1, key
    assert f"hybridpar {name} --help-all" in text
    assert shown(capsys, name, "some.toml", "-h").splitlines() == lines


def test_settings_of_the_short_help_take_a_line_each_and_exist() -> None:
    assert 20 <= len(USUAL) <= 25
    known = flags_of(COMMANDS["train"], Config())
    for key, text in USUAL.items():
        assert key in known
        assert len(text) <= 46


def test_the_whole_help_has_every_flag_by_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "train", "--help-all")
    for flag in flags_of(COMMANDS["train"], Config()):
        assert f"--{flag} " in text, flag
    for section in SECTIONS:
        assert f"{section} options" in text
    assert "--checkpoint" in shown(capsys, "generate", "--help-all")
