"""Functions of one process of which one computes while others wait for other ranks.

function 0   compute | a sum over ranks ... | compute | a sum ...
function 1             compute | a sum over ranks ... | compute
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

Function = Callable[[], Any]


class Turns:
    """Runs `number` functions, each in a thread of its own, of which one runs at a time: the next
    one goes on where the last one waits (`give_way`) or ends.

    The order is a function of where they wait, never of time, so ranks that run the same functions
    call the same collectives in the same order. Threads inherit nothing of what torch keeps for
    each: `begin` is called in a new one.
    """

    def __init__(self, number: int, begin: Callable[[], object] | None = None):
        self.number = number
        self._begin = begin
        self._gates = [threading.Semaphore(0) for _ in range(number)]
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[int] = []  # whose turn it is comes first
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Function]) -> list[Any]:
        """What the functions return. The first one runs in the caller's thread.

        Raises: the first error of any; the others end where they wait next.
        """
        assert not self._running, "turns within turns"
        if self._pool is None:  # as late as that: a fork has no threads
            self._pool = ThreadPoolExecutor(self.number - 1, initializer=self._begin)
        self._running = list(range(self.number))
        self._error = None
        results: list[Any] = [None] * self.number
        others = [
            self._pool.submit(partial(self._run, i, functions[i], results))
            for i in range(1, self.number)
        ]
        self._gates[0].release()
        self._run(0, functions[0], results)
        for other in others:
            other.result()
        if self._error is not None:
            raise self._error
        return results

    def give_way(self) -> None:
        """Has the others run until it is the caller's turn again; outside of `run` nothing
        happens."""
        if len(self._running) > 1:
            me = self._running.pop(0)
            self._running.append(me)
            self._gates[self._running[0]].release()
            self._await(me)

    def _await(self, me: int) -> None:
        self._gates[me].acquire()
        if self._error is not None:
            raise _OtherFailed

    def _run(self, me: int, function: Function, results: list[Any]) -> None:
        try:
            self._await(me)
            results[me] = function()
        except _OtherFailed:
            pass
        except BaseException as error:
            self._error = error
        self._running.remove(me)
        if self._running:
            self._gates[self._running[0]].release()


class _OtherFailed(Exception):
    """Another function has raised an error."""
