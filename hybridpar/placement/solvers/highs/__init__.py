"""HiGHS, in a process of its own: it prints what it likes there, and the process ends when its time
is over.

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
    """Minimise cost @ x where matrix @ x <= limits, lower <= x <= upper, and x is whole where
    `integer` is 1.

    Shapes: limits [rows], all others [variables]. `gap`: relative, at which HiGHS may stop.
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
    """`values` is empty if no solution was found. `bound`: none is below it. `proven`: the values
    are optimal.

    `note`: why it is neither proven nor known to be infeasible.
    """

    values: Floats
    bound: float
    proven: bool = False
    infeasible: bool = False
    note: str = ""


class Highs:
    """Solves programs. The process starts at once, beside what the caller does before the first of
    them."""

    def __init__(self) -> None:
        self._process, self._connection = self._start()
        self._ready = False

    def __enter__(self) -> Highs:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def solve(self, program: Program, deadline: float) -> Answer:
        """The best answer of HiGHS until `deadline` (`time.monotonic()`).

        Where it has not looked at its clock, the process is ended soon after (`process.GRACE`), and
        nothing is known of what it has found. Nor is it waited for any longer where it has not even
        started.
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
        return Answer(
            np.empty(0) if values is None else values,
            bound,
            status == _OPTIMAL,
            status == _INFEASIBLE,
            "" if done else OUT_OF_TIME,
        )

    def wait_until_ready(self, deadline: float) -> bool:
        """Waits until the process can take a program, so that its start does not count against the
        time of one.

        Raises: EOFError, OSError where the process has ended meanwhile.
        """
        if self._process.poll() is not None:  # it was ended
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
    """Why the process ended."""
    if status == -signal.SIGALRM:
        return OUT_OF_TIME
    if status == -signal.SIGKILL:
        return "HiGHS was killed, perhaps as there was not memory enough"
    return f"HiGHS ended with status {status}"
