"""Words of a command line that cannot be used: each is refused in one line, with what to write
instead."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

import hybridpar
from hybridpar.cli import main
from hybridpar.cli.arguments import complaint, config_arguments
from hybridpar.cli.commands import COMMANDS
from hybridpar.cli.entry import parse
from hybridpar.config import Config, load_toml
from hybridpar.config.typed import Within, hints_of
from hybridpar.errors import ConfigError
from hybridpar.validate import problems


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.toml").write_text("[train]\nnum_steps = 3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "train my.toml --pipeline.schedule 1f2b",
            "pipedream, own, auto; did you mean --pipeline.schedule 1f1b?",
        ),
        ("train my.toml --pipeline.schedule zzz", "must be one of naive, gpipe, 1f1b,"),
        ("train my.toml --pipeline.schedule", "auto; try --pipeline.schedule 1f1b"),
        (
            "train my.toml --pipeline.early_switch of",
            "must be a whole number or one of off, auto; did you mean --pipelin",
        ),
        (
            "train my.toml --run.trackers wandb x",
            "must be one of wandb, mlflow; try --run.trackers wandb",
        ),
        ("train my.toml --model.bias yes", "must be true or false; try --model.bias true"),
        (
            "train my.toml --optim.decay_steps 1e3",
            "must be a whole number; try --optim.decay_steps 1000",
        ),
        ("train my.toml --optim.lr 0,001", "must be a number; try --optim.lr 0.001"),
        ("train my.toml --pipeline.split [2,4]", "try --pipeline.split 2 4"),
        (
            "train my.toml --optim.betas 0.9 0.9 0.9",
            "--optim.betas takes 2 values; remove '0.9'",
        ),
        (
            "train my.toml stray",
            "'stray' is one argument too many: the command takes CONFIG.toml; remove it",
        ),
        (
            "train my.toml --train.num_steps 3 4",
            "--train.num_steps takes one value; remove '4'",
        ),
        (
            "train my.toml --run.name my run",
            "put a value with spaces in quotation marks: --run.name 'my run'",
        ),
        (
            "train my.toml --json true",
            "--json takes no value, but is followed by 'true'; write --json alone",
        ),
        ("train my.toml --json=true", "--json=true: takes no value; write --json alone"),
        (
            "train my.toml train.num_steps=3",
            "'train.num_steps=3' is not a flag; did you mean --train.num_steps 3?",
        ),
        ("train my.toml -ranks 2", "unknown flag -ranks; did you mean --ranks?"),
        ("train my.toml --learning_rate 1", "did you mean --optim.lr?"),
        ("train my.toml --pipelin.schedule 1f1b", "did you mean --pipeline.schedule?"),
        (
            "train my.toml --memory.colour 1",
            "unknown flag --memory.colour; there are --memory.budget, ",
        ),
        (
            "train --ranks 2 my.toml",
            "must be a configuration file; try hybridpar train my.toml --ranks 2",
        ),
        ("train", "must be a configuration file; try hybridpar train my.toml"),
        ("my.toml", "the first word must be a command; did you mean hybridpar train my.toml?"),
        ("resume my.toml", "resume is not a command; did you mean train?"),
        ("colour", "colour is not a command; there are train, verify, "),
        ("generate", "--checkpoint is missing; try hybridpar generate --checkpoint runs/run"),
        ("generate runs/a", "'runs/a' has no flag before it; did you mean --checkpoint runs/a?"),
        ("watch", "RUN is missing; try hybridpar watch RUN"),
        (
            "export",
            "RUN_OR_CHECKPOINT and OUTPUT are missing; try hybridpar export RUN_OR_CHECKPOINT "
            "OUTPUT",
        ),
        ("plan my.toml --cluster", "--cluster: needs a value; --help describes it"),
        ("preprocess a.txt --kind gtp", "must be one of gpt, bert; did you mean --kind gpt?"),
        ("train my.toml --train.device gpu", "did you mean --train.device cuda?"),
        ("check my.toml --memory.limit 8Gi", "with a unit, such as 40MiB; try --memory.limit 8GiB"),
        ("check my.toml --memory.limit 1.5G", "try --memory.limit 1.5GiB"),
        ("check my.toml --memory.limit 0.5B", "must be a number of bytes"),
        (
            "check my.toml --memory.limit 8 GiB",
            "takes one value; write --memory.limit 8GiB, without a space",
        ),
        ("check my.toml --memory.limit 8 9", "--memory.limit takes one value; remove '9'"),
        ("doctor now", "'now' is one argument too many: the command takes flags alone"),
    ],
)
def test_each_is_refused_with_what_to_write(
    line: str, says: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in said
    assert said.count("\n") == 1, "one line, and no box"


def wrong_words(kind: Any) -> list[list[str]]:
    """Words that a flag of a type cannot take."""
    if typing.get_origin(kind) is Literal or kind is bool:
        return [["zzz"], []]
    inner = (*typing.get_args(kind), kind)[0] if typing.get_origin(kind) is tuple else kind
    return [["zzz"], ["1.5.2"]] if inner in (int, float) else []


def test_advice_of_a_refusal_is_accepted(inside: Path) -> None:
    known = list(config_arguments(Config()))
    accepted: dict[str, list[str]] = {}
    for flag in known:
        for words in wrong_words(flag.kind):
            said = complaint(known, [flag.name, *words])
            works = (
                said.rstrip("?")
                .partition("try " if "; try " in said else "did you mean ")[2]
                .split()
            )
            assert works[:1] == [flag.name], said
            assert not complaint(known, works)
            accepted[flag.name] = works
    parse(["train", "my.toml", *(word for words in accepted.values() for word in words)])


def test_ranges_suggest_the_default() -> None:
    usual = Config()
    for section in dataclasses.fields(usual):
        settings = getattr(usual, section.name)
        for key, (kind, rule) in hints_of(type(settings)).items():
            if not isinstance(rule, Within) or kind not in (int, float):
                continue
            default = getattr(settings, key)
            for value in (rule.least - 1, rule.above - 1, rule.most + 1, rule.below + 1):
                if not -1e15 < value < 1e15:
                    continue
                changed = dataclasses.replace(settings, **{key: kind(value)})
                found = problems(dataclasses.replace(usual, **{section.name: changed}), 1)
                share = rule.below == 1 and not default and value >= 1
                assert [problem.suggestion for problem in found] == [
                    "0.1" if share and value < 2 else "0.02" if share else str(default)
                ], found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty; try the line [model]"),
        ("# nothing\n", "the file is empty"),
        (
            "[model\n",
            "line 1, column 7: Expected ']' at the end of a table declaration: [model; try [model]",
        ),
        ("[model]\nkind = gpt\n", 'line 2, column 8: Invalid value: kind = gpt; try kind = "gpt"'),
        ("[model]\nnum_layers: 2\n", "num_layers: 2; try num_layers = 2"),
        ("[model]\nnum_layers =\n", "num_layers needs a value after ="),
        (
            "[model]\nnum_layers = 2\nnum_layers = 3\n",
            "line 3, column 15: Cannot overwrite a value: num_layers = 3; ",
        ),
        (
            "[model]\n[train]\n[model]\n",
            "the section appears twice; write all its keys below one heading",
        ),
        ("[model]\nbias = True\n", "try bias = true"),
        ("[model]\nkind = \u201cgpt\u201d\n", 'try kind = "gpt"'),
        ("[optim]\nlr = .1\n", "try lr = 0.1"),
        ("[optim]\nlr = 1,5\n", "try lr = 1.5"),
        ("[optim]\nspec = None\n", "spec has no value; remove the line"),
        ("[optim]\nbetas = (0.9, 0.99)\n", "try betas = [0.9, 0.99]"),
        ("[train]\nnum_steps = 010\n", "try num_steps = 10"),
        ('[run]\ndir = "C:\\my runs"\n', "try dir = 'C:\\my runs'"),
        ('{"model": {}}', "this is JSON; write [section] on one line"),
        ("model:\n  num_layers: 2\n", "model:; try [model]"),
        (b"\xff\xfe[\0m\0", "it is UTF-16 text; save it as UTF-8"),
        (b"\x89PNG\0\0\xff", "it is a binary file, not text"),
        (
            b'[run]\nname = "caf\xe9"\n',
            "line 2, column 12: byte 0xe9 is not UTF-8; save the file as UTF-8",
        ),
    ],
)
def test_a_file_that_is_no_configuration(text: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("my.tml", "my.toml"),
        ("MY.toml", "my.toml"),
        ("my", "my.toml"),
        ("folder", "folder/config.toml"),
        ("foldr/config.toml", "folder/config.toml"),
        ("colour.toml", "my.toml"),
    ],
)
def test_the_path_of_a_configuration_that_is_none(name: str, works: str, inside: Path) -> None:
    (inside / "folder").mkdir()
    (inside / "folder" / "config.toml").write_text("[train]\n")
    with pytest.raises(ConfigError) as caught:
        load_toml(name)
    assert caught.value.problems[0].suggestion == works


def test_a_home_folder_is_written_out(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError, match=r"try /home/me/my\.toml"):
        load_toml("~/my.toml")
    (found,) = problems(parse(["train", "my.toml", "--run.dir=~/runs"]).config, 1)
    assert (found.field, found.suggestion) == ("run.dir", '"/home/me/runs"')


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: hybridpar.Trainer(m, optm={"lr": 1}), "did you mean optim?"),
        (lambda m: hybridpar.Trainer(m, lr=0.1), "try optim={'lr': 0.1}"),
        (lambda m: hybridpar.Trainer(m, epochs=3), "try train={'num_steps': 3}"),
        (
            lambda m: hybridpar.Trainer(m, optim="adamw"),
            "must be a dict of the section's keys; try optim={'name': 'adamw'}",
        ),
        (
            lambda m: hybridpar.Trainer(m, optim=None),
            "must be a dict of the section's keys; try optim={'name': 'adamw'}",
        ),
        (
            lambda m: hybridpar.Trainer(m, datasets=[{"x": 1}]),
            "datasets = 'a list': must be a dict with the keys",
        ),
        (lambda m: hybridpar.Trainer(m, dataset={"train": []}), "did you mean datasets?"),
        (
            lambda m: hybridpar.Trainer(model=m),
            "the model is the first argument, without a keyword; try Trainer(model, ..)",
        ),
        (
            lambda m: hybridpar.Trainer(m, {"optim": {"lr": 1}}),
            'try sections as keywords: Trainer(model, optim={"lr"',
        ),
        (lambda m: hybridpar.Trainer(m, pipeline={"schedule": "1f2b"}), 'did you mean "1f1b"?'),
        (
            lambda m: hybridpar.Trainer(m, pipeline={"scheduel": "1f1b"}),
            "did you mean pipeline.schedule?",
        ),
        (lambda m: hybridpar.ModelConfig(num_layer=2), "did you mean num_layers?"),
        (
            lambda m: hybridpar.ModelConfig(colour=2),
            "colour = 2: unknown setting of ModelConfig. Settings: kind, num_layers,",
        ),
    ],
)
def test_keywords_of_a_program(make: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(hybridpar.ModelConfig())
    assert says in str(caught.value)


def test_a_section_may_be_an_object_and_a_source_a_path() -> None:
    optim = dataclasses.replace(Config().optim, lr=0.5)
    trainer = hybridpar.Trainer(
        hybridpar.ModelConfig(), optim=optim, data={"corpus": Path("a.txt")}
    )
    assert trainer.config.optim.lr == 0.5
    assert trainer.config.data.corpus == ("a.txt",)


def test_every_command_refuses_what_it_does_not_know(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "my.toml", "--colour", "3"])
        assert ended.value.code == 2
        assert "unknown flag --colour" in capsys.readouterr().err


def test_the_list_of_commands_has_no_line_of_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not [line for line in capsys.readouterr().out.splitlines() if line and not line.strip()]
