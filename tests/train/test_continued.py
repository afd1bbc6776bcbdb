"""Going on with other data, batches or settings: named, exact to the bit from there on, and written
down."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train.runs import metrics, run_job, steps, tiny, write_config, write_corpus

from hybridpar.checkpoint import read_manifest
from hybridpar.config import Config, Launch, from_mapping, load_toml
from hybridpar.data import Blend, DataStart
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.train import job as loop
from hybridpar.verify.replay import replay

ALONE = Launch(0, 0, 1, 1)
LONGER = {
    "optim": {"decay": "wsd"},
    "train": {"num_steps": 30, "save_interval": 2, "eval_interval": 0},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run that has stood at step 4; its learning rates do not depend on where it stops."""
    config = tiny(tmp_path, **LONGER)
    until(config, 4)
    return config


def until(config: Config, step: int, **sections: dict[str, Any]) -> Config:
    """Trains up to a step, with changes."""
    changed = from_mapping(
        sections | {"train": sections.get("train", {}) | {"num_steps": step}}, config
    )
    changed = replace(changed, optim=replace(changed.optim, decay="constant"))
    loop.train(changed, ALONE)
    return changed


def other_corpus(config: Config) -> str:
    folder = Path(config.data.corpus[0]).parent
    path = write_corpus(folder / "other.txt")
    path.write_text(path.read_text()[::-1])
    return str(path)


def changes_to(config: Config, what: str) -> dict[str, dict[str, Any]]:
    """Settings, with the names that allow them."""
    tokenizer = str(config.run.folder / "tokenizer.json")
    data = {"corpus": (*config.data.corpus, other_corpus(config)), "tokenizer": tokenizer}
    sections: dict[str, dict[str, Any]] = {
        "data": {"data": data},
        "mix": {"data": data | {"weights": (1.0, 3.0)}},
        "batch": {"train": {"micro_batch_size": 3}},
        "data and batch": {"data": data, "pipeline": {"num_microbatches": 3}},
        "dropout": {"model": {"dropout": 0.2}},
    }[what]
    names = {
        "data": ["data.corpus"],
        "mix": ["data.corpus", "data.weights"],
        "batch": ["train.micro_batch_size"],
        "data and batch": ["data.corpus", "pipeline.num_microbatches"],
        "dropout": ["model.dropout"],
    }[what]
    return sections | {"train": sections.get("train", {}) | {"continue_with": tuple(names)}}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("what", ["data", "mix", "batch", "dropout"])
def test_unnamed_changes_are_refused_with_the_remedy(config: Config, what: str) -> None:
    sections = changes_to(config, what)
    named = sections["train"].pop("continue_with")
    before = {
        p: p.stat().st_mtime_ns for p in config.run.folder.rglob("*") if p.name not in (".lock",)
    }
    with pytest.raises(CheckpointError) as error:
        until(config, 6, **sections)
    (allowed,) = re.findall(r"train\.continue_with = (\[.*?\])", str(error.value))
    assert sorted(json.loads(allowed)) == sorted(named)
    after = {
        p: p.stat().st_mtime_ns
        for p in config.run.folder.rglob("*")
        if p in before and "flight" not in p.parts
    }
    assert after == {p: before[p] for p in after}, "nothing was overwritten"


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["mix", "data and batch", "dropout"])
def test_going_on_with_a_change_is_the_same_wherever_it_stops(
    config: Config, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 4 to 12 at once, and with stops at 5, 8 and 10: the same steps and the same last
    checkpoint."""
    sections = changes_to(config, what)
    folder = config.run.folder
    drawn: list[tuple[int, ...]] = []
    batch = Blend.batch

    def noting(self: Blend, counter: np.ndarray) -> Any:
        drawn.append(tuple(counter))
        return batch(self, counter)

    monkeypatch.setattr(Blend, "batch", noting)
    shutil.copytree(folder, folder.with_name("kept"))
    changed = until(config, 12, **sections)
    size = changed.train.micro_batch_size * changed.pipeline.num_microbatches
    first = 0 if "data" in what or what == "mix" else 16
    assert sorted(sample for samples in drawn for sample in samples) == [
        *range(first, first + 8 * size)
    ]
    rows = metrics(folder)
    state = manifest_of(folder, 12)
    shutil.rmtree(folder)
    folder.with_name("kept").rename(folder)
    for stop in (5, 8, 10, 12):
        until(config, stop, **sections)
    assert steps(metrics(folder)) == steps(rows)
    assert manifest_of(folder, 12) == state, "checksums of all tensors among it"
    tokens = [row["consumed_tokens"] for row in rows if "loss" in row]
    assert tokens == [
        *(16 * 4 * i for i in range(1, 5)),
        *(16 * (16 + size * i) for i in range(1, 9)),
    ]
    assert changes(folder)[0]["step"] == 4
    assert sorted(changes(folder)[0]["settings"]) == sorted(sections["train"]["continue_with"])
    assert len(changes(folder)) == 1


def manifest_of(folder: Path, step: int) -> Any:
    manifest = read_manifest(folder / "checkpoints" / f"step_{step:08d}")
    return manifest.state, manifest.shards, manifest.corpus


def changes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_steps_on_both_sides_of_a_change_can_be_replayed(config: Config) -> None:
    config = from_mapping({"checkpoint": {"keep": 9}}, config)
    sections = changes_to(config, "data and batch")
    until(config, 7, **sections)
    until(
        config, 9, **{name: keys for name, keys in sections.items() if name != "train"}
    )  # saved since: not needed
    folder = config.run.folder
    for step in (4, 5, 6, 9):
        assert replay(folder, step, print).agrees
    saved = folder / "checkpoints" / "step_00000004"
    saved.rename(folder / "elsewhere")
    for step, why in (
        (5, "settings changed after step 4"),
        (4, "no checkpoint between the two is left"),
    ):
        with pytest.raises(ConfigError, match=why):
            replay(folder, step, print)


@pytest.mark.thorough
def test_an_anomalys_bundle_knows_its_samples_after_a_change(config: Config) -> None:
    sections = changes_to(config, "batch")
    changed = from_mapping(
        sections
        | {"train": sections["train"] | {"num_steps": 8}, "checkpoint": {"asynchronous": False}},
        config,
    )
    loop.train(changed, ALONE, inject=["nan gradient rank 0 at step 7"])
    path = config.run.folder / "anomalies" / "step_00000007.json"
    assert json.loads(path.read_text())["samples"] == [16 + 2 * 6, 16 + 3 * 6]
    assert not replay(path, 0, print).agrees, "the gradient was spoilt, not the data"


def test_another_tokenizer_is_refused_whatever_is_named(config: Config) -> None:
    sections = changes_to(config, "data")
    del sections["data"]["tokenizer"]  # so one is trained on both corpora
    with pytest.raises(
        ConfigError, match=r"which were trained with another tokenizer; try '.*tokenizer\.json'"
    ):
        until(config, 6, **sections)


def test_only_settings_that_can_change_can_be_named(config: Config) -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.continue_with = \['model\.hidden_size'\]: must be one of .*; try",
    ):
        until(config, 6, train={"continue_with": ("model.hidden_size",)})


@pytest.mark.thorough
def test_a_longer_cosine_says_that_its_rate_rises_and_wsd_has_no_need_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for decay, said in (("cosine", True), ("wsd", False)):
        config = tiny(
            tmp_path,
            optim={"decay": decay},
            run={"name": decay, "dir": str(tmp_path / "runs")},
            train={"num_steps": 10, "save_interval": 4, "eval_interval": 0},
        )
        loop.train(config, ALONE)
        if decay == "wsd":  # from before its decay
            for path in (config.run.folder / "checkpoints" / "step_00000010").iterdir():
                path.write_bytes(b"")
        capsys.readouterr()
        loop.train(from_mapping({"train": {"num_steps": 40}}, config), ALONE)
        err = capsys.readouterr().err
        assert (
            "the learning rate of step 11 was to be 0 (train.num_steps = 10), and is 0.008536 now"
            in err
        ) == said
        assert ("the learning rate of step" in err) == said
        assert ('optim.decay = "wsd" can be made longer' in err) == said
        rates = [row["lr"] for row in metrics(config.run.folder) if "loss" in row]
        assert (rates[:32] == [0.01] * 32) == (decay == "wsd")
    loop.train(from_mapping({"train": {"num_steps": 42}}, config), ALONE)
    assert "move the later checkpoints away" in capsys.readouterr().err, (
        "its decay began after step 32"
    )


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_grid_goes_on_with_batches_of_another_size(tmp_path: Path) -> None:
    """Two stages, 2bw, then replicas too: the samples are those of one process."""
    path = write_config(tmp_path)
    flags = ("--train.eval_interval", "0", "--optim.decay", "constant", "--model.dropout", "0.1")
    stages = ("--parallel.pp", "2")
    three = ("--pipeline.num_microbatches", "3")
    named = ("--train.continue_with", "pipeline.num_microbatches")
    run_job(2, "train", path, *flags, *stages, "--train.num_steps", "4")
    run_job(2, "train", path, *flags, *stages, *three, *named, "--train.num_steps", "6")
    run_job(
        2,
        "train",
        path,
        *flags,
        *three,
        "--parallel.dp",
        "2",
        "--train.micro_batch_size",
        "1",
        "--train.num_steps",
        "8",
    )
    one = load_toml(path)
    one = from_mapping(
        {"run": {"name": "one"}, "model": {"dropout": 0.1}, "train": {"eval_interval": 0}}, one
    )
    until(one, 4)
    until(
        one,
        8,
        pipeline={"num_microbatches": 3},
        train={"continue_with": ("pipeline.num_microbatches",)},
    )
    grid, alone = (metrics(tmp_path / "runs" / name) for name in ("run", "one"))
    assert [row["loss"] for row in grid if "loss" in row] == pytest.approx(
        [row["loss"] for row in alone if "loss" in row], rel=1e-5
    )  # fp32, in another order of summation
    assert [row["consumed_tokens"] for row in grid if "loss" in row][-1] == 16 * (4 * 4 + 4 * 6)


def test_a_place_in_the_stream_counts_from_where_batches_changed() -> None:
    start = DataStart(10, 40, 340)
    assert [start.position(batch, 6) for batch in (10, 11)] == [40, 46]
    assert start.consumed(12, 6) == 352
    assert DataStart().position(7, 6) == DataStart().consumed(7, 6) == 42
