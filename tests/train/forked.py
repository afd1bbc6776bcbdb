"""Supervised jobs whose processes are forks of the test: they import nothing again. Signals, exit codes, sessions and
the environment are those of processes that are started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handlers

import hybridpar.train.faults.supervisor
import hybridpar.train.loop  # noqa: F401  # here once, else in every rank
from hybridpar.cli import main


def supervised(*args: str | Path, timeout_s: float = 200.0) -> tuple[int, str]:
    """Exit code and output of `hybridpar *args`, whose ranks are forks as well.

    Raises: AssertionError where it does not end in time.
    """
    with tempfile.NamedTemporaryFile() as output:
        job = multiprocessing.get_context("fork").Process(target=_run, args=(output.name, *map(str, args)))
        job.start()
        job.join(timeout_s)
        text = Path(output.name).read_text()
        if job.exitcode is None:
            job.terminate()
            raise AssertionError(f"the job has not ended: {text}")
        return job.exitcode, text


def _run(output: str | int, *args: str) -> NoReturn:
    """Ends this process with what the command returns. output: a file, or its number."""
    code: Any = 1
    handlers.Popen = Forked  # type: ignore[assignment,misc]
    try:
        with open(output, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            code = main(list(args))
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code if isinstance(code, int) else bool(code))


class Forked:
    """`subprocess.Popen` of `python -m hybridpar ARGS`, as far as torch's agent and the supervisor use it."""

    def __init__(self, args: tuple[str, ...], env: Mapping[str, str], stdout: int | None = None, stderr: None = None,
                 start_new_session: bool = True):
        assert stderr is None, "goes where stdout does"
        assert args[:3] == (sys.executable, "-m", "hybridpar")
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            _run(os.dup(1 if stdout is None else stdout), *args[3:])

    def poll(self) -> int | None:
        """Exit code, where it has ended."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code. Raises: TimeoutExpired."""
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode
