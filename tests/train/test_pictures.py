"""A run whose pictures or text cannot be made is a run: it ends well, with a line about each of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from train.runs import run_job, write_config

from hybridpar.train import loop, report
from hybridpar.train.log import TensorBoard
from hybridpar.train.plot import PictureError, draw_apart


def out_of_memory(*args: Any, **options: Any) -> NoReturn:
    raise MemoryError


def fail(*args: Any, **options: Any) -> NoReturn:
    raise KeyError("a defect of ours")


def exit_like_openblas(*args: Any, **options: Any) -> NoReturn:
    os.write(2, b"OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n")
    os._exit(1)


def old_protobuf(*args: Any) -> NoReturn:
    raise TypeError("Descriptors cannot be created directly.\nIf this call came from a _pb2.py file, ..")


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="pictures are drawn in this process")
def test_a_saved_run_ends_well_without_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(report, "draw_svg", out_of_memory)
    monkeypatch.setattr(report.trace, "draw_executed", fail)
    monkeypatch.setattr(report, "can_plot", lambda: True)
    monkeypatch.setattr(report, "plot_loss", exit_like_openblas)
    monkeypatch.setattr(loop.Generator, "load", fail)
    monkeypatch.setattr(TensorBoard, "_begin", old_protobuf)
    out = run_job(1, "train", write_config(tmp_path), "--train.save_interval", "0", "--train.eval_interval", "0")
    run = tmp_path / "runs" / "run"
    assert (run / "checkpoints" / "step_00000006").exists()
    for line in ("no plan.svg: MemoryError; ", "no executed.svg: KeyError: 'a defect of ours'; ",
                 "no loss.png: OpenBLAS error: Memory allocation still failed after 10 retries, giving up.; ",
                 "no sample.txt: KeyError: 'a defect of ours'",
                 "tensorboard: TypeError: Descriptors cannot be created directly.; "):
        assert out.count(line) == 1, out
    assert "Traceback" not in out
    assert not [path for path in run.iterdir() if path.suffix in (".svg", ".png", ".txt")]


@pytest.mark.skipif(sys.platform != "linux", reason="pictures are drawn in this process")
def test_whatever_ends_the_process_that_draws_is_said(tmp_path: Path) -> None:
    draw_apart((tmp_path / "drawn").touch)
    assert (tmp_path / "drawn").exists()
    for draw, said in ((lambda: os.kill(os.getpid(), signal.SIGKILL), "the process that drew it was ended by SIGKILL"),
                       (lambda: os._exit(3), "the process that drew it ended with exit code 3"),
                       (out_of_memory, "MemoryError"), (fail, "KeyError: 'a defect of ours'")):
        with pytest.raises(PictureError, match=f"^{said}$"):
            draw_apart(draw)
