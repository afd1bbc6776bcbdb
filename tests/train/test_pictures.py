"""A run whose pictures or text cannot be made is a run: it ends well, with a line about each of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from train.runs import run_job, write_config

from hybridpar.train import job as loop
from hybridpar.train.reporting import log, plot
from hybridpar.train.reporting import run_report as report

pytestmark = pytest.mark.full_report

OPENBLAS = b"OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"
"""OpenBLAS's message before it ends the process."""


def out_of_memory(*args: Any, **options: Any) -> NoReturn:
    raise MemoryError


def fail(*args: Any, **options: Any) -> NoReturn:
    raise KeyError("a defect of ours")


def old_protobuf(*args: Any) -> NoReturn:
    raise TypeError(
        "Descriptors cannot be created directly.\nIf this call came from a _pb2.py file, .."
    )


@pytest.mark.ranks
def test_a_saved_run_ends_well_without_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(report, "draw_svg", out_of_memory)
    monkeypatch.setattr(report.trace, "draw_executed", fail)
    monkeypatch.setattr(report, "can_plot", lambda: True)
    monkeypatch.setattr(plot, "_PROGRAM", f"import os; os.write(2, {OPENBLAS!r}); os._exit(1)")
    monkeypatch.setattr(loop.Generator, "load", fail)
    monkeypatch.setattr(log, "_encoded", old_protobuf)
    out = run_job(
        1,
        "train",
        write_config(tmp_path),
        "--train.save_interval",
        "0",
        "--train.eval_interval",
        "0",
    )
    run = tmp_path / "runs" / "run"
    assert (run / "checkpoints" / "step_00000006").exists()
    for line in (
        "no plan.svg: MemoryError; ",
        "no executed.svg: KeyError: 'a defect of ours'; ",
        "no loss.png: OpenBLAS error: Memory allocation still failed after 10 retries, giving up.; ",
        "no sample.txt: KeyError: 'a defect of ours'",
        "tensorboard: TypeError: Descriptors cannot be created directly.; ",
    ):
        assert out.count(line) == 1, out
    assert "Traceback" not in out
    assert not [path for path in run.iterdir() if path.suffix in (".svg", ".png", ".txt")]


def test_whatever_ends_the_process_that_draws_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program, said in (
        ("import os; os.kill(os.getpid(), 9)", "the process that drew it was ended by SIGKILL"),
        ("import os; os._exit(3)", "the process that drew it ended with exit code 3"),
        ("raise MemoryError", "MemoryError"),
        ("import time; time.sleep(1000)", "drawing it took longer than 1 s"),
    ):
        monkeypatch.setattr(plot, "_PROGRAM", program)
        monkeypatch.setattr(plot, "_LONGEST_S", 1.0 if "sleep" in program else 100.0)
        with pytest.raises(plot.PictureError, match=f"^{said}$"):
            plot.draw_loss([], tmp_path / "loss.png", "")


@pytest.mark.thorough
def test_a_loss_is_drawn_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the code that lies in the working folder."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('this is not the standard library')")
    plot.draw_loss(
        [{"step": step, "loss": 1 / step} for step in range(1, 9)], tmp_path / "loss.png", "a run"
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
