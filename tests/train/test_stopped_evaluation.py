"""A signal at a step at which an evaluation is due: the run that resumes makes the evaluation
first, and only once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from train.runs import fork_ranks, metrics, must_be_killed, tiny

from hybridpar import checkpoint
from hybridpar.checkpoint import Saver
from hybridpar.checkpoint.folders import folder_of
from hybridpar.config import Config, Launch
from hybridpar.train.callbacks import Callbacks
from hybridpar.train.engine import Engine
from hybridpar.train.job import train


def make(folder: Path, **sections: dict[str, Any]) -> Config:
    """Nine steps that evaluate after each third, with a learning rate that grows until the loss
    does, after step 3."""
    folder.mkdir()
    return tiny(
        folder,
        **{
            "train": {"num_steps": 9, "eval_interval": 3, "save_interval": 3},
            "optim": {"lr": 0.3, "warmup_steps": 9, "decay": "constant"},
            "checkpoint": {"keep": 1, "keep_best": 1},
            **sections,
        },
    )


def go(config: Config, stop_at: int = 0) -> int:
    """Train until a real signal comes after a step (0: to the end); return 0 if it ended so."""

    def on_step(result: Any) -> None:
        if result.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = train(config, Launch.from_environment(), callbacks=Callbacks(on_step=on_step))
    expected = signal.SIGTERM if 0 < stop_at < config.train.num_steps else 0
    return abs(outcome.stopped_by - expected)


def kill_in(owner: type, name: str, config: Config) -> None:
    """Train, and end this process by SIGKILL where a method would begin."""

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)
    train(config, Launch.from_environment())


def evaluations(config: Config) -> list[tuple[int, float | None, float | None]]:
    """Step, loss and validation loss of each row, in order."""
    return [
        (row["step"], row.get("loss"), row.get("val_loss")) for row in metrics(config.run.folder)
    ]


def kept(config: Config) -> dict[int, float | None]:
    """The checkpoints that are there, with their validation losses."""
    root = config.run.folder / "checkpoints"
    return {
        step: checkpoint.read_manifest(folder_of(root, step)).val_loss
        for step in checkpoint.saved_steps(root)
    }


def must_be_as_undisturbed(stopped: Config, calm: Config) -> None:
    assert evaluations(stopped) == evaluations(calm)
    assert kept(stopped) == kept(calm)
    assert sorted(kept(calm)) == [3, 9], (
        "the best one is of the step at which the other run was stopped"
    )


@pytest.mark.thorough
def test_a_stopped_evaluation_is_made_once_whenever_the_run_is_killed_meanwhile(
    tmp_path: Path,
) -> None:
    calm = make(tmp_path / "calm")
    config = make(tmp_path / "stopped")
    fork_ranks(1, partial(go, calm))
    fork_ranks(1, partial(go, config, 3))
    assert kept(config) == {3: None}
    must_be_killed(partial(kill_in, Engine, "evaluate", config))
    must_be_killed(partial(kill_in, Saver, "add_val_loss", config))
    assert evaluations(config) == evaluations(calm)[: len(evaluations(config))]
    assert evaluations(config)[-1][:2] == (3, None), "its row is there"
    assert kept(config) == {3: None}, "and its manifest has no validation loss yet"
    must_be_killed(partial(kill_in, Engine, "train", config))
    assert kept(config) == {3: kept(calm)[3]}
    never: Callable[[], int] = partial(_go_without_evaluations_of, 3, config)
    fork_ranks(1, never)
    must_be_as_undisturbed(config, calm)


def _go_without_evaluations_of(step: int, config: Config) -> int:
    evaluate = Engine.evaluate

    def evaluate_another(self: Engine, *args: Any) -> dict[str, float]:
        assert self.batches_done != step, "it was evaluated already"
        return evaluate(self, *args)

    Engine.evaluate = evaluate_another  # type: ignore[method-assign]
    return go(config, stop_at=config.train.num_steps)  # where a signal stops nothing


@pytest.mark.thorough
@pytest.mark.ranks
def test_two_ranks_make_a_stopped_evaluation_as_an_undisturbed_job_does(tmp_path: Path) -> None:
    """Saves go on beside training."""
    sections = {"parallel": {"pp": 2}}
    calm = make(tmp_path / "calm", **sections)
    config = make(tmp_path / "stopped", **sections)
    fork_ranks(2, partial(go, calm))
    fork_ranks(2, partial(go, config, 3))
    assert kept(config) == {3: None}
    fork_ranks(2, partial(go, config))
    must_be_as_undisturbed(config, calm)
