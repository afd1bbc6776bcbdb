"""Errors in Python: the message, the user's own line, and nothing of what lies between."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import SequentialSpec, Trainer
from hybridpar.errors import ConfigError, HybridparError, config_error

SCRIPT = """
from hybridpar import Trainer, ModelConfig
trainer = Trainer(ModelConfig(num_layers=2))
trainer.verify({"pp": 9})
"""


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Linear(5, 5) for _ in range(9)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@dataclass(frozen=True)
class Row(SequentialSpec):
    draws: bool = False

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(4, 5 if self.draws else 4)
        yield Wrong()

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.mean() * torch.rand(())

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.zeros(4, np.float32)}


def test_a_script_ends_with_its_own_line_and_the_message(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) <= 6, done.stderr
    assert 'trainer.verify({"pp": 9})' in done.stderr
    assert lines[-1].startswith("hybridpar.errors.ConfigError: parallel.pp = 9: ")


def test_the_line_of_the_user_s_code_is_in_the_message() -> None:
    line = Wrong.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        ConfigError, match=rf"module 1 \(Wrong\).*\(test_short_errors.py, line {line}\)"
    ) as failed:
        Trainer(Row()).verify({"pp": 2})
    assert len(traceback.extract_tb(failed.value.__traceback__)) == 2, (
        "this test, and what shortens"
    )
    assert failed.value.__suppress_context__


@pytest.mark.ranks
def test_a_rank_that_raises_on_purpose_has_its_message_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(HybridparError, match="draws from torch's global generator") as failed:
        Trainer(Row(draws=True)).verify({"pp": 2})
    assert "Traceback" not in str(failed.value)
    assert "Terminating" not in capfd.readouterr().err


def test_modules_and_tensors_are_named_and_not_written_out() -> None:
    large = nn.Sequential(*[nn.Linear(5, 5) for _ in range(9)])
    assert (
        str(config_error("model", large, "is wrong"))
        == "model = the torch.nn.Module Sequential: is wrong"
    )
    assert (
        str(config_error("x", torch.zeros(2, 3), "is wrong"))
        == "x = a tensor of shape (2, 3): is wrong"
    )


@pytest.mark.parametrize("call", ["fit", "verify"])
def test_an_error_in_a_loss_shows_its_own_lines_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the script of a user, as files of tests are."""

    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.mean() * batch["z"]

    monkeypatch.chdir(tmp_path)
    samples = [{"x": np.ones(4, np.float32)} for _ in range(16)]
    short = {"num_steps": 1, "eval_interval": 0}
    trainer = Trainer([nn.Linear(4, 1)], loss=loss, datasets={"train": samples}, train=short)
    with pytest.raises(HybridparError) as raised:
        getattr(trainer, call)()
    lines = str(raised.value).splitlines()
    assert lines[-1] == "KeyError: 'z'"
    assert "in loss" in "".join(lines)
    assert not [line for line in lines if "site-packages" in line or "pipeline" in line]
    assert len(lines) <= 11
