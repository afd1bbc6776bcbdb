"""Several validation sets: a loss each, the best checkpoint by one of them, and what cannot be
meant."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from train.runs import fork_ranks, metrics, must_be_killed, tiny, write_corpus
from train.test_stopped_evaluation import go, kept, kill_in

from hybridpar.checkpoint import Saver
from hybridpar.cli.entry import parse
from hybridpar.config import (
    Config,
    DataConfig,
    Launch,
    ModelConfig,
    TrainConfig,
    from_mapping,
    load_toml,
    to_toml,
)
from hybridpar.data import open_data
from hybridpar.data.datasets import absent_sources
from hybridpar.errors import ConfigError
from hybridpar.train.callbacks import Callbacks
from hybridpar.train.engine import Engine
from hybridpar.train.job import train
from hybridpar.train.reporting.run_metrics import read_curves
from hybridpar.validate import problems

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=300, seq_length=16)


def make(folder: Path, **sections: dict[str, Any]) -> Config:
    """Six steps that evaluate and save after every second one, on two sets of words of which one is
    like the corpus."""
    folder.mkdir()
    (folder / "near.txt").write_text(write_corpus(folder / "corpus.txt").read_text()[:3000])
    (folder / "far.txt").write_text("0123456789 " * 300)
    sets = {name: [str(folder / f"{name}.txt")] for name in ("near", "far")}
    return tiny(
        folder,
        **{
            "train": {"num_steps": 6, "eval_interval": 2, "save_interval": 2},
            "optim": {"lr": 0.02, "decay": "constant"},
            "data": {"valid_sets": sets},
            "checkpoint": {"keep": 1, "keep_best": 1, "best_by": "far"},
            **sections,
        },
    )


def evaluations(config: Config) -> list[tuple[int, Any, Any]]:
    rows = metrics(config.run.folder)
    return [
        (row["step"], row["val_loss/near"], row["val_loss/far"])
        for row in rows
        if "val_loss/far" in row
    ]


def test_each_set_has_the_loss_that_it_has_alone(tmp_path: Path) -> None:
    config = make(tmp_path / "sets")
    told: list[Any] = []
    outcome = train(
        config,
        Launch.from_environment(),
        callbacks=Callbacks(on_evaluation=lambda step, numbers: told.append((step, numbers))),
    )
    rows = evaluations(config)
    assert [row[0] for row in rows] == [0, 2, 4, 6]
    assert told == [(step, {"near": {"lm": near}, "far": {"lm": far}}) for step, near, far in rows]
    assert outcome.val_loss == rows[-1][2]
    curves = read_curves(config.run.folder / "metrics.jsonl")
    assert [row["val_loss/near"] for row in curves if "val_loss/near" in row] == [
        row[1] for row in rows
    ]
    best = min(rows[1:], key=lambda row: row[2])
    assert kept(config)[best[0]] == best[2]
    assert sorted(kept(config)) == sorted({best[0], 6})
    for number, (name, sources) in enumerate(config.data.valid_sets.items()):
        alone = replace(
            config,
            data=replace(config.data, valid_sets={}, valid_corpus=sources),
            run=replace(config.run, name=name),
            checkpoint=replace(config.checkpoint, best_by=""),
        )
        train(alone, Launch.from_environment())
        found = [
            (row["step"], row["val_loss"]) for row in metrics(alone.run.folder) if "val_loss" in row
        ]
        assert found == [(row[0], row[1 + number]) for row in rows], "the same, to the bit"


@pytest.mark.thorough
@pytest.mark.ranks
def test_two_ranks_make_a_stopped_evaluation_of_all_sets(tmp_path: Path) -> None:
    sections = {"parallel": {"pp": 2}}
    calm = make(tmp_path / "calm", **sections)
    config = make(tmp_path / "stopped", **sections)
    fork_ranks(2, partial(go, calm))
    fork_ranks(2, partial(go, config, 2))
    assert [row[0] for row in evaluations(config)] == [0]
    assert kept(config) == {2: None}
    fork_ranks(2, partial(go, config))
    assert evaluations(config) == evaluations(calm)
    assert kept(config) == kept(calm)


@pytest.mark.thorough
def test_a_row_of_all_sets_makes_good_what_a_killed_run_has_not_saved(tmp_path: Path) -> None:
    config = make(tmp_path / "killed")
    fork_ranks(1, partial(go, config, 2))
    must_be_killed(partial(kill_in, Saver, "add_val_loss", config))
    (before, after) = evaluations(config)
    assert (before[0], after[0]) == (0, 2), "its row is there"
    assert kept(config) == {2: None}
    must_be_killed(partial(kill_in, Engine, "train", config))
    assert kept(config) == {2: after[2]}
    assert evaluations(config) == [before, after], "without another evaluation"


def test_sets_in_a_file_and_in_flags(tmp_path: Path) -> None:
    config = replace(
        Config(), data=DataConfig(valid_sets={"wiki": ("w.txt",), "code": ("a.py", "b.py")})
    )
    path = tmp_path / "my.toml"
    path.write_text(to_toml(config))
    assert load_toml(path) == config
    made = parse(
        [
            "check",
            str(path),
            "--data.valid_sets.wiki",
            "x.txt",
            "y.txt",
            "--data.valid-sets.new_one=z.txt",
            "--train.num_steps",
            "7",
        ]
    ).config
    assert made.data.valid_sets == {
        "wiki": ("x.txt", "y.txt"),
        "code": ("a.py", "b.py"),
        "new_one": ("z.txt",),
    }
    assert made.train.num_steps == 7
    assert absent_sources(config.data)[0].startswith("data.valid_sets.wiki = w.txt")


def test_sets_without_a_name_in_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[data]\nsplit = 0.1\n")
    with pytest.raises(SystemExit):
        parse(["check", str(path), "--data.valid_sets", "x.txt"])
    assert (
        "--data.valid_sets needs the name of a set; try --data.valid_sets.other SOURCE"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("data", "best_by", "text"),
    [
        (
            {"valid_sets": {"wiki": ["w"]}, "valid_corpus": ["v"]},
            "",
            "data.valid_corpus = ['v']: conflicts with data.valid_sets: give this set a name "
            "there; try [], and "
            "data.valid_sets = "
            '{other = ["v"], wiki = ["w"]}',
        ),
        (
            {"valid_sets": {"wiki": ["w"]}, "corpus": ["w"]},
            "",
            "data.valid_sets.wiki = ['w']: must not be in data.corpus too",
        ),
        (
            {"valid_sets": {"wiki": []}},
            "",
            "data.valid_sets.wiki = []: must have at least one source",
        ),
        (
            {"valid_sets": {"a/b": ["w"]}},
            "",
            "data.valid_sets = 'a/b': the name of a validation set must begin with a letter",
        ),
        (
            {"valid_sets": {"wiki": ["w"]}},
            "code",
            "checkpoint.best_by = 'code': must be the name of a validation set "
            '(data.valid_sets): wiki; try "wiki"',
        ),
    ],
)
def test_sets_that_cannot_be_meant(data: dict[str, Any], best_by: str, text: str) -> None:
    config = from_mapping(
        {"data": data, "checkpoint": {"best_by": best_by}, "train": {"eval_interval": 1}}
    )
    assert [text for problem in problems(config, 1) if text in str(problem)] == [text]


def test_a_set_is_no_list_of_sources() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.valid_sets = \['w'\]: must be a table with names as keys; try \{wiki = ",
    ):
        from_mapping({"data": {"valid_sets": ["w"]}})  # as for several sources of one set
    with pytest.raises(
        ConfigError, match=r"data\.valid_corpus = .*: must be a list.*data\.valid_sets"
    ):
        from_mapping({"data": {"valid_corpus": {"wiki": ["w"]}}})


def test_the_best_set_has_a_name(tmp_path: Path) -> None:
    config = make(tmp_path / "one")
    config = replace(config, data=replace(config.data, valid_sets={}))
    with pytest.raises(
        ConfigError, match=r"best_by = 'far': must be the name of .*has no name .*; try \"\""
    ):
        train(config, Launch.from_environment())


def test_a_small_text_is_trained_on_where_nothing_is_evaluated(tmp_path: Path) -> None:
    text = tmp_path / "small.txt"
    text.write_text("Once upon a time there was a river. " * 30)
    data = DataConfig((str(text),), cache=str(tmp_path / "data"))
    config = Config(MODEL, data=data)
    whole = open_data(config, quiet=True)
    assert not whole.valid
    assert len(whole.train.datasets[0]) > 0  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"data\.split = 0\.02: splits .*, but a sample " r"requires 17"
    ):
        open_data(replace(config, train=TrainConfig(eval_interval=1)), quiet=True)
    enough = open_data(replace(config, data=replace(data, split=0.3)), quiet=True)
    assert enough.valid, (
        "what can be held out is, so that training continues with the same samples once it is "
        "evaluated"
    )
