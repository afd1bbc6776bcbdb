"""A terminal's lines while training runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import pairwise

import pytest

from hybridpar.train.reporting.progress import BarReporter, PlainReporter, Status, make_reporter

ROW = {
    "step": 7,
    "loss": 5.1234,
    "grad_norm": 1.234,
    "lr": 1e-3,
    "tokens_per_s": 12345.6,
    "step_ms": 1234.5,
    "mfu": 0.4567,
    "memory_mib": 1234.5,
    "skipped": True,
}


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (
            None,
            "loss 5.1234  val 4.3210  grad norm 1.234  lr 1.00e-03  12,346 tokens/s  1,234 ms  MFU "
            "45.7 %  1,234 MiB  "
            "SKIPPED (gradients not finite)",
        ),
        (
            90,
            "loss 5.1234  val 4.3210  lr 1.00e-03  12,346 tokens/s  SKIPPED (gradients not finite)",
        ),
        (60, "loss 5.1234  val 4.3210  SKIPPED (gradients not finite)"),
        (45, "loss 5.1234  SKIPPED (gradients not finite)"),
        (5, "loss 5.1234  SKIPPED (gradients not finite)"),
    ],
)
def test_a_narrow_terminal_goes_without_what_matters_least(width: int | None, shown: str) -> None:
    status = Status(100, evaluation={"val_loss": 4.321})
    status.update(ROW)
    assert status.text(width) == shown


def test_a_line_of_the_history_has_the_evaluation_of_its_own_step_alone() -> None:
    status = Status(100, evaluation={"val_loss/wiki": 4.321, "val_loss/code": 1.5})
    status.update(ROW | {"skipped": False})
    assert status.line(46) == "step 7    loss 5.1234  12,346 tokens/s"
    assert (
        status.line(80)
        == "step 7    loss 5.1234  grad norm 1.234  lr 1.00e-03  12,346 tokens/s  MFU 45.7 %"
    )
    assert status.line(60, evaluation=True) == "step 7    loss 5.1234  val wiki 4.3210 code 1.5000"
    assert status.line().startswith("step 7/100    loss 5.1234  grad norm 1.234")


def test_lines_come_more_rarely_as_time_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step a second for three hours: every 2 s, then after a tenth of the time, then every
    minute."""
    seconds = 0.0
    monkeypatch.setattr("hybridpar.train.reporting.progress.time.monotonic", lambda: seconds)
    reporter = PlainReporter(10_000)
    lines = []
    reporter.evaluation(0, {"val_loss": 9.0})
    assert capsys.readouterr().err == "step 0/10000      val 9.0000\n"
    for step in range(1, 10_001):
        seconds = 100.0 + step
        reporter.step(ROW | {"step": step})
        if capsys.readouterr().err:
            lines.append(step)
    pauses = [after - before for before, after in pairwise(lines)]
    assert pauses[:9] == [2] * 9
    assert pauses[:-1] == sorted(pauses[:-1])
    assert pauses[-2] == 60
    assert (lines[0], lines[-1]) == (1, 10_000)
    assert 150 < len(lines) < 250


def test_a_step_that_is_evaluated_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter(7)
    reporter.step(ROW | {"skipped": False}, is_evaluated=True)
    reporter.evaluation(7, {"val_loss": 4.321})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "step 7/7  loss 5.1234  val 4.3210  grad norm 1.234  lr 1.00e-03  12,346 tokens/s  "
    )


def test_details_are_for_whoever_asks(capsys: pytest.CaptureFixture[str]) -> None:
    for is_verbose in (False, True):
        PlainReporter(7, is_verbose).detail("in detail")
        assert capsys.readouterr().err == "in detail\n" * is_verbose


def test_the_time_left_is_that_of_steps_not_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """train.log_interval has only every so many steps noted; after a roll back steps are made
    again."""
    clock = iter([0.0, 2.5, 5.0, 7.5, 9.5])
    monkeypatch.setattr("hybridpar.train.reporting.progress.time.monotonic", lambda: next(clock))
    status = Status(110)
    shown = []
    for step in (10, 20, 30, 20, 30):
        status.update(ROW | {"step": step})
        shown.append(status.eta())
    assert shown == ["-", "0:00:22", "0:00:20", "-", "0:00:16"]


SHOWING = """
import sys
from hybridpar.train.reporting.progress import BarReporter
reporter = BarReporter(100)
for step in range(1, 20):
    reporter.step({row} | {{"step": step}})
    reporter._live.refresh()
    reporter.evaluation(step, {{"val_loss": 4.321}})
    reporter.say("a line of its own, " * step)
reporter.close()
"""


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    mine, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        kind = type(make_reporter(0, 7))
        monkeypatch.undo()
    os.close(mine)
    assert kind is (PlainReporter if terminal == "dumb" else BarReporter)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_bottom_of_a_terminal_has_two_lines(width: int) -> None:
    """A terminal wraps none of the lines: wrapped ones would be left behind, bars among them."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {
        "TERM": "xterm"
    }
    with subprocess.Popen(
        [sys.executable, "-c", SHOWING.format(row=ROW)], stdin=theirs, stderr=theirs, env=environ
    ):
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # the other side has ended
            while part := os.read(mine, 65536):
                written += part
    os.close(mine)
    text = written.decode()
    back = [
        len(ups) // len("\x1b[1A\x1b[2K") for ups in re.findall("(?:\x1b\\[1A\x1b\\[2K)+", text)
    ]
    assert len(back) >= 19
    assert back.pop() == 2, "the bar and its numbers go at the end"
    assert max(back) == 1, "lines that a frame goes up by, to begin where the last one began"
    assert all(
        len(line) <= width for line in re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    )
