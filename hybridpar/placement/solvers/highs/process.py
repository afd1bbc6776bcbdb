"""The process that runs HiGHS: it takes programs from its parent one by one, and returns the
results.

It runs as a script in a folder of its own, and does not import hybridpar, which takes seconds.
HiGHS seldom checks its clock in presolve and within a long linear program, so the kernel kills this
process (SIGALRM) if a result is `GRACE` late. The process also ends when its parent does.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

GRACE = 0.5
"""Seconds."""
SHARE = 0.98
"""Share of the remaining time that HiGHS is given, because it mostly takes a little more."""
LEAST = 0.01
MOST = 1e9


def answer(program: dict[str, Any]) -> tuple[Any, float, int]:
    """Return the values (None if there are none), the bound, and scipy's status of a program."""
    seconds = SHARE * (program["deadline"] - time.monotonic())
    result = milp(
        program["cost"],
        integrality=program["integer"],
        bounds=Bounds(program["lower"], program["upper"]),
        constraints=LinearConstraint(program["matrix"], -np.inf, program["limits"]),
        options={"time_limit": max(seconds, LEAST), "mip_rel_gap": program["gap"]},
    )
    bound = result.get("mip_dual_bound")
    return result.x, -np.inf if bound is None else float(bound), int(result.status)


def serve(connection: Connection) -> None:
    """Send True when ready, then answer until the other side closes the connection."""
    # the parent receives Ctrl-C, too, and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            program = connection.recv()
            left = program["deadline"] + GRACE - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, min(max(left, LEAST), MOST))
            found = answer(program)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send(found)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
