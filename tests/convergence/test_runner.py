"""The runner: what is left to do, what is gone on with, and a whole study at toy size."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from convergence.made import made
from train.runs import write_config

from benchmarks.convergence import report, results, runner
from benchmarks.convergence.runner import (
    DONE,
    LEFT,
    OUTDATED,
    Folders,
    Item,
    items_of,
    run_all,
    state_of,
)
from benchmarks.convergence.study import Variant, comparable
from hybridpar.config import Config, load_toml, to_mapping, to_toml

SYNC = Variant("sync", "", {"pipeline.schedule": "1f1b"}, seeds=(1, 2))
STALE = Variant(
    "2bw",
    "",
    {"pipeline.schedule": "2bw", "optim.warmup_steps": lambda base: base.train.num_steps // 2},
    seeds=(1,),
)


@pytest.fixture
def base(tmp_path: Path) -> Config:
    return load_toml(write_config(tmp_path))


def test_items_are_variants_by_seed(base: Config) -> None:
    items = list(items_of(base, [SYNC, STALE]))
    assert [item.name for item in items] == ["sync-s1", "2bw-s1", "sync-s2"]
    assert [item.name for item in items_of(base, [SYNC, STALE], seeds=[2, 7])] == ["sync-s2"]
    assert items[1].changes == {"pipeline.schedule": "2bw", "optim.warmup_steps": 3}
    assert (items[1].config.optim.warmup_steps, items[1].config.train.seed) == (3, 1)
    assert (items[2].config.pipeline.schedule, items[2].config.train.seed) == ("1f1b", 2)


def test_states(base: Config, tmp_path: Path) -> None:
    item, other = items_of(base, [SYNC])
    assert state_of(item, tmp_path) == LEFT
    made_here = replace(made("sync", 1, 3.0), config=to_mapping(comparable(item.config)))
    path = results.write(made_here, tmp_path)
    assert state_of(item, tmp_path) == DONE
    assert state_of(other, tmp_path) == LEFT
    longer = replace(
        item, config=replace(item.config, train=replace(item.config.train, num_steps=7))
    )
    assert state_of(longer, tmp_path) == OUTDATED
    path.with_name(".sync-s1.json.part").write_text("{")  # what a crash while writing leaves
    assert results.read_all(tmp_path, "gpt") == [made_here]


def test_a_run_of_other_numbers_is_not_gone_on_with(base: Config, tmp_path: Path) -> None:
    config = replace(base, run=replace(base.run, name="sync-s1"))
    begun = replace(
        config, parallel=replace(config.parallel, dp=1), train=replace(config.train, threads=2)
    )
    config.run.folder.mkdir(parents=True)
    (config.run.folder / "config.toml").write_text(to_toml(begun))
    runner.forget_other_run(config)
    assert config.run.folder.exists()
    runner.forget_other_run(replace(config, optim=replace(config.optim, lr=5e-3)))
    assert not config.run.folder.exists()


def test_an_interrupt_ends_the_runs_under_way(base: Config, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results", tmp_path / "work")
    (item,) = items_of(base, [STALE])
    longer = replace(
        item, config=replace(item.config, train=replace(item.config.train, num_steps=10**6))
    )

    def interrupt(text: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_all(
            [longer], folders, 1, interrupt
        )  # comes back once the run has ended, with its million steps to go
    assert signal.getsignal(signal.SIGTERM) is before
    assert state_of(longer, folders.results) == LEFT


@pytest.mark.thorough
def test_a_study_from_start_to_report(base: Config, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results", tmp_path / "work")
    items = list(items_of(base, [SYNC, STALE], seeds=[1]))
    broken = Item("broken", replace(base, optim=replace(base.optim, lr=-1.0)), {})
    said: list[str] = []
    assert run_all([*items, broken], folders, 2, said.append) == [broken.name]
    assert "must not be negative" in (folders.work / "gpt" / f"{broken.name}.log").read_text()
    assert [state_of(item, folders.results) for item in [*items, broken]] == [DONE, DONE, LEFT]
    assert not [
        path
        for path in (folders.work / "gpt").iterdir()
        if path.is_dir() and path.name != broken.name
    ]
    found = {r.variant: r for r in results.read_all(folders.results, "gpt")}
    assert (
        found["sync"].val_loss[0] == found["2bw"].val_loss[0]
    )  # the same weights and text to begin with
    assert found["sync"].final_val_loss < found["sync"].val_loss[0][1]
    assert found["sync"].final_val_loss != found["2bw"].final_val_loss
    (tmp_path / "README.md").write_text(f"{report.BEGIN}{report.END}")
    pytest.importorskip("matplotlib")
    report.write_report(folders.results, tmp_path / "README.md")
    assert f"{found['2bw'].final_val_loss:.4f} (1 seed)" in (tmp_path / "README.md").read_text()
