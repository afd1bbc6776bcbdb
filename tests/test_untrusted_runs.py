"""Reading a run folder runs no code: whoever sends one chooses the names in its config.toml."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.cli import main
from hybridpar.config import Config, ModelConfig, UnloadedModel, read_run_config, to_mapping
from hybridpar.errors import ConfigError
from hybridpar.train.folder import find_run
from hybridpar.train.forecasts.preview import costs_of_run
from hybridpar.watch.board import Board

MODULE = """
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn
from torch.nn import functional as F

from hybridpar import SequentialSpec, UpdateRule

with Path({mark!r}).open("a") as file:
    file.write("imported\\n")


@dataclass(frozen=True)
class Model(SequentialSpec):
    width: int = 8

    def layers(self):
        return [nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 1)]

    def loss(self, y, batch):
        return (y.squeeze(1) - batch["y"]).square().mean()

    def sample(self, number, seed):
        draw = np.random.default_rng((seed, number)).standard_normal(5).astype("float32")
        return {{"x": draw[:4], "y": draw[4]}}

    def dataset(self, part):
        return [self.sample(number, 0) for number in range(64)]


class Rule(UpdateRule):
    def update(self, weight, gradient, state, *, lr, decay, step):
        weight.sub_(gradient, alpha=lr)
"""
CONFIG = """
[model]
spec = "crafted_code:Model"
[optim]
name = "own"
spec = "crafted_code:Rule"
[pipeline]
num_microbatches = 2
[train]
num_steps = 20
micro_batch_size = 2
threads = 1
device = "cpu"
eval_interval = 0
save_interval = 10
record_memory = 2
[run]
dir = "runs"
name = "sent"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module, a configuration, and the run folder that another process made of
    them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "crafted_code.py").write_text(MODULE.format(mark=str(folder / "mark")))
    (folder / "my.toml").write_text(CONFIG)
    job = subprocess.run(
        [sys.executable, "-m", "hybridpar", "train", "my.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return folder


@pytest.fixture
def sent(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run folder, for a user who stands elsewhere, in a process that has not imported its
    code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (trained / "mark").unlink(missing_ok=True)
    yield trained / "runs" / "sent"
    sys.modules.pop("crafted_code", None)


def was_imported(run: Path) -> bool:
    return (run.parents[1] / "mark").exists()


def test_looking_at_a_run_imports_nothing(sent: Path) -> None:
    seen = Board(sent).look()
    assert "Model, 1f1b" in seen["configuration"]
    assert seen["latest"]["step"] == 20
    assert seen["memory"] == []
    config = read_run_config(sent / "config.toml")
    assert config.model == UnloadedModel("crafted_code:Model", (("width", 8),))
    assert to_mapping(config)["model"] == {"spec": "crafted_code:Model", "width": 8}
    with pytest.raises(ConfigError, match=r"model.spec = .*crafted_code:Model.*only with --trust"):
        config.model.num_blocks  # noqa: B018
    with pytest.raises(ConfigError, match="model"):
        costs_of_run(sent, config=replace_model(config))
    assert not was_imported(sent)


def replace_model(config: Config) -> Config:

    return replace(config, model=ModelConfig())


def test_starting_a_run_of_that_name_imports_nothing(sent: Path) -> None:
    config = read_run_config(sent / "config.toml")

    other = replace(replace_model(config), run=replace(config.run, dir=str(sent.parent)))
    with pytest.raises(Exception, match="model"):
        find_run(other)
    assert not was_imported(sent)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "command",
    [["simulate", "--run", "RUN"], ["memory", "--run", "RUN"], ["replay", "RUN", "--step", "13"]],
    ids=lambda c: c[0],
)
def test_commands_import_what_they_are_told_to_trust(
    sent: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(sent) if arg == "RUN" else arg for arg in command]
    assert main(args) == 1
    said = capsys.readouterr().err
    assert "spec = 'crafted_code:" in said
    assert "--trust" in said
    assert not was_imported(sent)
    in_process_of_its_own([*args, "--trust"], Path.cwd())
    assert was_imported(sent)


def in_process_of_its_own(args: list[str], folder: Path) -> None:
    """A class that one process has imported stays known there. This one is to know of none."""
    job = subprocess.run(
        [sys.executable, "-m", "hybridpar", *args], cwd=folder, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.thorough
def test_replay_takes_the_code_where_the_user_stands(sent: Path) -> None:
    in_process_of_its_own(["replay", str(sent), "--step", "13"], sent.parents[1])
    assert was_imported(sent)


def test_replay_takes_no_code_that_lies_in_the_run_folder(
    sent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the user stands in it, or it is a package there."""
    source = (sent.parents[1] / "crafted_code.py").read_text()
    monkeypatch.chdir(sent)
    for place in (sent / "crafted_code.py", sent / "crafted_code" / "__init__.py"):
        place.parent.mkdir(exist_ok=True)
        place.write_text(source)
        try:
            assert main(["replay", ".", "--step", "13"]) == 1
        finally:
            place.unlink()
        assert "--trust" in capsys.readouterr().err
        assert not was_imported(sent)
    place.parent.rmdir()
