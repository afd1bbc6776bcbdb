"""Saves that may fail: training goes on, and the next one tries again, up to a number of failures
in a row."""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridpar.checkpoint import Saver
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.train.faults.errors import SaveError

_PAUSES_S = 1.0, 2.0, 4.0, 8.0, 16.0
"""Pauses between the tries of a save that must succeed."""


class Saves:
    """The saves of a run. limit: so many failures in a row end it. warn: told of each failure
    before that.

    Collectives: all methods, on all ranks of the grid.
    Raises, on all ranks: SaveError if the run cannot continue; NotFiniteError if a state is not
    finite, which no other try would change.
    """

    def __init__(self, saver: Saver, limit: int, warn: Callable[[str], None]):
        self._saver = saver
        self._limit = limit
        self._warn = warn
        self._failed = 0

    def settle(self, *, wait: bool = True) -> None:
        """Ends the save under way; without `wait` only where it is over."""
        self._try(lambda: self._saver.settle(wait=wait) is not None)

    def start(self, val_loss: float | None, *, beside: bool) -> None:
        """Saves. beside: training may go on meanwhile."""
        self.settle()

        def save() -> bool:
            self._saver.start(val_loss, beside=beside)
            return not beside and self._saver.settle() is not None

        self._try(save)

    def _try(self, save: Callable[[], bool]) -> None:
        """Counts failures. save: returns whether a checkpoint is there now."""
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
                f"{error}; training goes on, and the next save tries again ({self._failed} of "
                f"{self._limit} "
                "failures in a row that end the run)"
            )

    def insist(self, val_loss: float | None) -> None:
        """Saves where the run needs the checkpoint, at its end or at a signal. Tries for half a
        minute."""
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
