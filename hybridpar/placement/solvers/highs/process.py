"""The process that runs HiGHS: takes programs from its parent, one after the other, and gives back
what was found.

It is run as a script, in a folder of its own, and imports nothing of hybridpar, which takes seconds
to import. HiGHS looks at its clock seldom in presolve and within a long linear program, so the
kernel ends this process (SIGALRM) where an answer is `GRACE` late. It also ends when its parent
does.
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
"""Share of the time that HiGHS is told: it mostly takes a little more."""
LEAST = 0.01
MOST = 1e9


def answer(program: dict[str, Any]) -> tuple[Any, float, int]:
    """The values (None if there are none), the bound, and scipy's status of a program."""
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
    """Says True when it can begin, then answers until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends this process
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
