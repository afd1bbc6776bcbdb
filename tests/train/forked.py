"""Supervised jobs whose processes are forks of the test: they import nothing again. Signals, exit
codes, sessions and the environment are those of processes that are started."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handlers
import torch.distributed.run
from train.runs import LONG_S

import hybridpar.train.faults.supervisor
import hybridpar.train.job  # noqa: F401  # here once, else in every rank
from hybridpar.cli import main
from hybridpar.train.faults.inject import Fault, Injector

MAINS = {"hybridpar": main, "torch.distributed.run": torch.distributed.run.main}
"""The command that `python -m` would start."""


class Job:
    """`python -m *command` in a fork of this process, in a session of its own, and what all its
    processes say."""

    def __init__(self, *command: str | Path):
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # it goes with the job
        self._read = 0
        self.process = Forked(
            (sys.executable, "-m", *map(str, command)), os.environ, self._output.fileno()
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """Output so far."""
        return Path(self._output.name).read_text()

    def wait_for(self, wanted: str | Path) -> str:
        """Until a file is there; or that in the output, behind what was waited for before, which
        matches a regular expression: its first group, if any.

        Raises: AssertionError where it does not come, or the job ends before.
        """
        end = time.monotonic() + LONG_S
        while True:
            ended = self.process.poll() is not None
            if isinstance(wanted, Path) and wanted.exists():
                return ""
            if isinstance(wanted, str) and (
                found := re.compile(wanted, re.MULTILINE).search(self.output, self._read)
            ):
                self._read = found.end()
                return found[found.lastindex or 0]
            assert not ended, f"the job has ended: {self.output}"
            assert time.monotonic() < end, f"no {wanted}: {self.output}"
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code and output. Raises: AssertionError where it does not end."""
        try:
            code = self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGTERM)
            raise AssertionError(f"the job has not ended: {self.output}") from None
        return code, self.output


def supervised(*args: str | Path) -> tuple[int, str]:
    """Exit code and output of `hybridpar *args`, whose ranks are forks as well."""
    return Job("hybridpar", *args).end()


def torchrun(num_ranks: int, *args: str | Path, max_restarts: int = 0) -> Job:
    """`hybridpar *args` on so many local ranks that torch's own launcher starts."""
    return Job(
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        f"--max-restarts={max_restarts}",
        "-m",
        "hybridpar",
        *args,
    )


def held(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Path, Path]:
    """Has `slow link` of jobs to come last until the second of two files is there; the first
    appears as it begins."""
    begun = folder / "held"
    over = folder / "go on"
    stop = Injector._stop_here

    def wait(fault: Fault) -> None:
        if fault.kind != "slow link":
            return stop(fault)
        begun.touch()
        end = time.monotonic() + LONG_S
        while not over.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return None

    monkeypatch.setattr(Injector, "_stop_here", staticmethod(wait))
    return begun, over


def _run(output: int, module: str, *args: str) -> NoReturn:
    """Ends this process with what the command returns."""
    gc.freeze()  # a destructor of the tests' garbage may wait for a thread that is not here
    code: Any = 1
    handlers.Popen = Forked  # type: ignore[assignment,misc]
    try:
        with open(output, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            code = MAINS[module](list(args))
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        with suppress(BrokenPipeError):  # else this process would go on with the caller's tests
            os.write(2, traceback.format_exc().encode())
    os._exit(code if isinstance(code, int) else bool(code))


class Forked:
    """`subprocess.Popen` of `python -m MODULE ARGS`, as far as torch's agent and the supervisor use
    it."""

    def __init__(
        self,
        args: tuple[str, ...],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: None = None,
        start_new_session: bool = True,
        closed: Iterable[int] = (),
    ):
        """closed: descriptors of this process that the other one is not to have."""
        assert stderr is None, "goes where stdout does"
        python, m, module, *rest = (arg for arg in args if arg != "-u")
        assert (python, m) == (sys.executable, "-m")
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for file in closed:
                os.close(file)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(
                        number,
                        signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                    )
            env = dict(env)
            os.environ.clear()
            os.environ.update(env)
            _run(os.dup(1 if stdout is None else stdout), module, *rest)

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
