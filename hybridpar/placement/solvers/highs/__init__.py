"""HiGHS in a separate process, which may print anything and is killed at its time limit.

with Highs() as highs:
    answer = highs.solve(program, deadline)
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen

import numpy as np
from scipy.sparse import csr_array

from hybridpar.placement.workload import Floats

OUT_OF_TIME = "the time limit was reached"
RELATIVE_GAP = 5e-7
# scipy's status
_OPTIMAL = 0
_INFEASIBLE = 2
_LONGEST_START_S = 600.0
_SCRIPT = Path(__file__).with_name("process.py")


@dataclass(frozen=True, eq=False)
class Program:
    """Minimise cost @ x subject to matrix @ x <= limits, lower <= x <= upper, and x integer where
    `integer` is 1.

    Shapes: limits [rows], all others [variables]. `gap`: relative gap at which HiGHS may stop.
    """

    cost: Floats
    matrix: csr_array
    limits: Floats
    lower: Floats
    upper: Floats
    integer: Floats
    gap: float = RELATIVE_GAP


@dataclass(frozen=True, eq=False)
class Answer:
    """Result of a program.

    Args:
        values: The solution; empty if none was found.
        bound: Lower bound on the objective.
        proven: Whether the values are optimal.
        note: Reason why the result is neither proven optimal nor known to be infeasible.
    """

    values: Floats
    bound: float
    proven: bool = False
    infeasible: bool = False
    note: str = ""


class Highs:
    """A solver of programs. Its process starts at once, in parallel with the caller's preparation
    of the first program."""

    def __init__(self) -> None:
        self._process, self._connection = self._start()
        self._ready = False

    def __enter__(self) -> Highs:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def solve(self, program: Program, deadline: float) -> Answer:
        """Return HiGHS's best result until `deadline` (`time.monotonic()`).

        If HiGHS does not check its clock in time, its process is killed soon after
        (`process.GRACE`), and its result is lost. A process that has not even started is not waited
        for any longer, either.
        """
        if time.monotonic() >= deadline:
            return Answer(np.empty(0), -np.inf, note=OUT_OF_TIME)
        try:
            if not self.wait_until_ready(deadline):
                return Answer(np.empty(0), -np.inf, note=OUT_OF_TIME)
            self._connection.send(
                {f.name: getattr(program, f.name) for f in fields(program)} | {"deadline": deadline}
            )
            values, bound, status = self._connection.recv()
        except (EOFError, OSError):
            return Answer(np.empty(0), -np.inf, note=_reason(self._process.wait()))
        done = status in (_OPTIMAL, _INFEASIBLE)
        if values is None:
            values = np.empty(0)
        note = "" if done else OUT_OF_TIME
        return Answer(values, bound, status == _OPTIMAL, status == _INFEASIBLE, note)

    def wait_until_ready(self, deadline: float) -> bool:
        """Wait until the process can take a program, so that its start does not count against a
        program's time.

        Raises:
            EOFError: The process has ended. Also OSError.
        """
        if self._process.poll() is not None:  # it was killed
            self._end()
            self._process, self._connection = self._start()
            self._ready = False
        if not self._ready:
            left = min(max(deadline - time.monotonic(), 0.0), _LONGEST_START_S)
            self._ready = self._connection.poll(left) and self._connection.recv()
        return self._ready

    @staticmethod
    def _start() -> tuple[Popen[bytes], Connection]:
        ours, theirs = Pipe()
        with theirs:
            process = Popen(
                [sys.executable, str(_SCRIPT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                stdout=DEVNULL,
            )
        return process, ours

    def _end(self) -> None:
        self._connection.close()
        with suppress(OSError):
            self._process.kill()
        self._process.wait()


def _reason(status: int) -> str:
    """Return why the process ended."""
    if status == -signal.SIGALRM:
        return OUT_OF_TIME
    if status == -signal.SIGKILL:
        return "HiGHS was killed, perhaps as there was not memory enough"
    return f"HiGHS ended with status {status}"
