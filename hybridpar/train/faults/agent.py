"""torch's elastic agent, which starts and ends the ranks of one host, with our rules for signals.

a signal           ranks get it, and have `stop_s` seconds to finish and save
a second signal    later than SAME_REQUEST_S: ranks that are left have QUIT_S seconds, then SIGKILL
                   ends them
the agent's end    whatever its reason is: no rank is left
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from hybridpar.train.stop import SAME_REQUEST_S

QUIT_S = 5
"""How long ranks that are left may take to end after a second signal."""
_Handler = Callable[[int, FrameType | None], Any]


class RankAgent(LocalElasticAgent):
    """An agent that leaves no rank behind, and writes no log folders.

    Args:
        spec: What to start.
        stop_s: Seconds that ranks may take to finish and save after a signal; 0: they save nothing,
            and are killed.
    """

    def __init__(self, spec: WorkerSpec, stop_s: int):
        self._stop_s = stop_s
        self._hurries = False  # since a second signal
        super().__init__(spec, NoLogs())

    def end_ranks(self) -> None:
        """End the ranks that are left, also those that are stopped, whatever signals come
        meanwhile."""
        with _handling_signals(lambda number, handler: None):
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGTERM, QUIT_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks by a signal. Torch's own gives them 30 s, in versions where that cannot be
        set.

        A second signal, if it is not part of the same request, ends the wait by an exception; torch
        calls this again.
        """
        time_s = QUIT_S if self._hurries else self._stop_s
        if not time_s:
            death_sig = (
                signal.SIGKILL
            )  # by another signal a rank that connects may abort, and say so
        began = time.monotonic()

        def act(number: int, handler: _Handler) -> None:
            if time.monotonic() - began > SAME_REQUEST_S:
                self._hurries = True
                handler(number, None)

        if self._pcontext is not None:
            with _handling_signals(act):
                self._pcontext.close(death_sig, time_s)


class NoLogs(DefaultLogsSpecs):
    """The place to which torch's agent writes the output of ranks: none. Ranks write to their
    launcher's terminal.

    Torch's default makes a folder in the temporary folder for each launch, and never removes it.
    """

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Torch's own would read the null device twice a rank, ten times a second, as if it were a
        log."""
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


@contextlib.contextmanager
def _handling_signals(act: Callable[[int, _Handler], None]) -> Iterator[None]:
    """Call `act` with the number and the usual handler of each signal that has one, while
    entered."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python handles signals nowhere else
        yield
        return
    usual: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    usual = {number: handler for number, handler in usual.items() if callable(handler)}
    for number in usual:
        signal.signal(number, lambda number, frame: act(number, usual[number]))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
