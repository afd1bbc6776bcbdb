"""Start and end the ranks of one host: torch's elastic agent with our rules for signals.

a signal           ranks receive it, and have `stop_s` seconds to finish and save
a second signal    later than SAME_REQUEST_S: remaining ranks have QUIT_S seconds, then SIGKILL
the agent's end    whatever the reason: no rank is left running
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException

from hybridpar.train.stop import SAME_REQUEST_S, signals_as_before

QUIT_S = 5
"""Seconds that remaining ranks have to end after a second signal."""
_Handler = Callable[[int, FrameType | None], Any]


class RankAgent(LocalElasticAgent):
    """An agent that leaves no rank running, and writes no log folders.

    Args:
        stop_s: Seconds that ranks have to finish and save after a signal. 0: ranks save nothing and
            are killed.
    """

    def __init__(self, spec: WorkerSpec, stop_s: int):
        self._stop_s = stop_s
        self._hurries = False  # whether a second signal came
        super().__init__(spec, NoLogs())

    def end_ranks(self) -> None:
        """End all remaining ranks, including stopped ones, ignoring signals in the meantime."""
        with _handling_signals(lambda number, handler: None):
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGTERM, QUIT_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks by a signal, and give them `stop_s` seconds.

        Torch's method gives them 30 s, which some versions cannot change. A second signal that is a
        separate request ends the wait by an exception, and torch calls this method again.
        """
        time_s = QUIT_S if self._hurries else self._stop_s
        if not time_s:
            # other signals may make a connecting rank abort with a message
            death_sig = signal.SIGKILL
        began = time.monotonic()

        def act(number: int, handler: _Handler) -> None:
            if time.monotonic() - began > SAME_REQUEST_S:
                self._hurries = True
                handler(number, None)

        if self._pcontext is not None:
            with _handling_signals(act):
                self._pcontext.close(death_sig, time_s)


def run_agent(agent: RankAgent, log_level: int = logging.ERROR) -> int:
    """Run an agent; return 0, 1 if its ranks have failed, 128 + n if signal n ended them."""
    for name in ("agent.server.api", "multiprocessing.api"):  # each sets its own level
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(log_level)
    try:
        return 1 if agent.run().is_failed() else 0
    except SignalException as stopped:
        return 128 + stopped.sigval.value
    finally:
        agent.end_ranks()


class NoLogs(DefaultLogsSpecs):
    """Send the output of ranks to their launcher's terminal instead of log files.

    Torch's default creates a temporary folder for each launch, and never removes it.
    """

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log destination without tees.

        Torch's method would poll the null device as a log, twice per rank and ten times a second.
        """
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


@contextlib.contextmanager
def _handling_signals(act: Callable[[int, _Handler], None]) -> Iterator[None]:
    """Call `act` with number and usual handler of each handled signal, while entered."""
    with signals_as_before() as before:
        usual = {number: handler for number, handler in before.items() if callable(handler)}
        for number in usual:
            signal.signal(number, lambda number, frame: act(number, usual[number]))
        yield
