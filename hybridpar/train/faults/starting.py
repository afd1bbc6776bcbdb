"""Progress messages while ranks start, which takes long if many ranks share few cores.

23 of 64 ranks have begun after 15 s: they share 2 cores
0 of 64 ranks train after 30 s (60 connecting, 4 setting up): they share 2 cores
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hybridpar.cores import shared_cores
from hybridpar.flight import HAS_MEMORY, STARTING
from hybridpar.train.faults.diagnose import Seen

_SAY_EVERY_S = 15.0
_PREPARES = "opening the run"
"""The phase in which the first rank itself shows the progress of tokenizing, on a terminal."""


class StartWatch:
    """Watches the start of a job's ranks, until all of them train."""

    def __init__(self, num_ranks: int, say: Callable[[str], None]):
        self._num_ranks = num_ranks
        self._say = say
        # without records in memory, phases before the run folder exists are unknown
        self._is_over = not HAS_MEMORY
        self._began = self._said = time.monotonic()
        self._share = shared_cores(num_ranks)

    def look(self, seen: Sequence[Seen]) -> None:
        """Report from time to time which ranks are missing. seen: state of all ranks."""
        now = time.monotonic()
        self._is_over = self._is_over or not waiting(seen)
        if self._is_over or now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        if not (_phase(seen[0]) == _PREPARES and sys.stderr.isatty()):
            self._say(self._text(waiting(seen), now - self._began))

    def _text(self, phases: Sequence[str], seconds: float) -> str:
        early = sum(phase in ("", STARTING[0]) for phase in phases)
        share = f": {self._share}" if self._share else ""
        if early:
            return (
                f"{self._num_ranks - early} of {self._num_ranks} ranks have begun after "
                f"{seconds:.0f} s{share}"
            )
        doing = ", ".join(f"{count} {phase}" for phase, count in Counter(phases).items())
        ready = self._num_ranks - len(phases)
        return f"{ready} of {self._num_ranks} ranks train after {seconds:.0f} s ({doing}){share}"


def waiting(seen: Sequence[Seen]) -> list[str]:
    """Return the phases of living ranks that do not train yet; "" for a rank without any."""
    return [
        phase for one in seen if one.exit_code is None and (phase := _phase(one)) in ("", *STARTING)
    ]


def _phase(seen: Seen) -> str:
    record = seen.record or seen.early
    return record.phase if record is not None else ""
