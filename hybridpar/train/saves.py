"""Saves that tolerate failures: training continues, and the next save retries.

A limited number of failures in a row ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridpar.checkpoint import Saver
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.train.faults.errors import SaveError

_PAUSES_S = 1.0, 2.0, 4.0, 8.0, 16.0
"""Pauses before the retries of a save that must succeed, in seconds."""


class Saves:
    """Save the checkpoints of a run.

    Args:
        limit: Number of failures in a row that ends the run.
        warn: Called with each failure before that.

    Collectives: all methods, on all ranks of the grid.

    Raises (on all ranks):
        SaveError: The run cannot continue.
        NotFiniteError: The state is not finite; retrying would not help.
    """

    def __init__(self, saver: Saver, limit: int, warn: Callable[[str], None]):
        self._saver = saver
        self._limit = limit
        self._warn = warn
        self._failed = 0

    def finish(self, *, wait: bool = True) -> None:
        """Finish the save in progress; without `wait` only if it has completed."""
        self._try(lambda: self._saver.settle(wait=wait) is not None)

    def start(self, val_loss: float | None, *, beside: bool) -> None:
        """Start a save. beside: training may continue while it runs."""
        self.finish()

        def save() -> bool:
            self._saver.start(val_loss, beside=beside)
            return not beside and self._saver.settle() is not None

        self._try(save)

    def _try(self, save: Callable[[], bool]) -> None:
        """Run `save`, which returns whether a checkpoint is complete, and count failures."""
        try:
            if save():
                self._failed = 0
        except NotFiniteError:
            raise
        except CheckpointError as error:
            self._failed += 1
            if self._failed >= self._limit:
                raise SaveError(
                    f"{error}; {self._failed} in a row (checkpoint.max_failed_saves)"
                ) from error
            self._warn(
                f"{error}; training continues, and the next save tries again ({self._failed} of "
                f"{self._limit} failures in a row that end the run)"
            )

    def insist(self, val_loss: float | None) -> None:
        """Save a checkpoint that the run needs: at its end or at a signal. Retry for 31 s."""
        for pause in (*_PAUSES_S, None):
            try:
                self._saver.start(val_loss, beside=False)
                self._saver.settle()
                return
            except NotFiniteError:
                raise
            except CheckpointError as error:
                if pause is None:
                    raise SaveError(f"{error}; tried {len(_PAUSES_S) + 1} times") from error
                self._warn(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)
