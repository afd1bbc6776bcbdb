"""Launch options of kernels: the block sizes, warps and stages that a class of launches is started
with.

A kernel that can be launched in several ways lists candidates, the default first, and starts by
`OPTIONS.launch`. What is chosen for a class of launches on this device is set before training
(hybridpar/train/autotuning/kernel_options.py times the candidates); a class without a choice has the default.
A candidate that needs more shared memory than the device has is passed over: Triton refuses it
before anything runs.

Nothing is timed in here, and triton.autotune is not used: it would time candidates in the middle of
a step, each rank on its own, perhaps while a CUDA graph is captured, and it does not work in
Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from triton.runtime.errors import OutOfResources

Option = tuple[int, ...]
Start = Callable[[Any], None]
Choose = Callable[[str, Sequence[Any], Start], Any]
"""Returns one of the candidates of a class of launches; `Start` launches the kernel with one of
them."""

_log = logging.getLogger(__name__)


class LaunchOptions:
    """The option chosen for each class of launches in this process."""

    def __init__(self) -> None:
        self._chosen: dict[str, Any] = {}
        self._choose: Choose | None = None

    def use(self, chosen: Mapping[str, Option]) -> None:
        """Use these choices from now on, and none of the earlier ones."""
        self._chosen = dict(chosen)

    @contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Within this context, ask `choose` for the option of every launch."""
        self._choose = choose
        try:
            yield
        finally:
            self._choose = None

    def launch(self, key: str, candidates: Sequence[Any], start: Start) -> None:
        """Start a kernel with the option chosen for its class of launches, else with the first that
        fits.

        Args:
            key: the class of launches: the kernel, and what the fastest option depends on.
            candidates: options, the default first; later ones need less shared memory, or are
                faster on some device.
            start: launches the kernel with an option.

        Raises: OutOfResources if no candidate fits this device.
        """
        if self._choose is not None:
            self._chosen[key] = self._choose(key, candidates, start)
        option = self._chosen.get(key, candidates[0])
        try:
            start(option)
        except OutOfResources as error:
            self._chosen[key] = _first_that_fits(
                key, [one for one in candidates if one != option], start, error
            )


def fits(start: Start, option: Any) -> bool:
    """Launch a kernel; return False if it needs more of this device than there is."""
    try:
        start(option)
    except OutOfResources:
        return False
    return True


def can_run(start: Start, option: Any) -> bool:
    """Launch a kernel; return False, and warn, if this version of Triton cannot compile it, or if
    it does not fit."""
    try:
        return fits(start, option)
    except (
        Exception
    ) as error:  # Triton's, ptxas's, or one of a pass of the compiler, which is a RuntimeError
        _log.warning(
            "launch options %s are passed over: %s: %s",
            tuple(option),
            type(error).__name__,
            " ".join(str(error).split())[:200],
        )
        return False


def _first_that_fits(
    key: str, candidates: Sequence[Any], start: Start, error: OutOfResources
) -> Any:
    """Launch the first of the candidates that fits, and return it. Raises: `error` if none does."""
    for option in candidates:
        if fits(start, option):
            _log.warning("%s: %s; launched with %s instead", key, error, tuple(option))
            return option
    raise error


OPTIONS = LaunchOptions()
"""The options of this process's launches. A process uses one device."""
