"""A job of forks of this process: its first rank's result is returned, its errors are raised."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridpar.config import Config, Launch
from hybridpar.errors import ConfigError, HybridparError, Problem, config_error, shown
from hybridpar.scratch import scratch_folder
from hybridpar.train.faults.errors import GRACE_S, LostContactError, RankError
from hybridpar.train.faults.forked import supervise_forks
from hybridpar.train.reporting.console import say

Action = Callable[[Config, Launch], Any]


def run_forked(config: Config, action: Action) -> Any:
    """Run an action on forks of this process, one per rank; return the first rank's result.

    Args:
        action: Called on each rank with the configuration and the rank's place in the job.

    Raises:
        ConfigError: This process already uses its GPU, so that forks cannot use CUDA.
        HybridparError: The error of all ranks, or the reason why the job failed.
    """
    if config.train.device != "cpu" and torch.cuda.is_initialized():
        rule = (
            "not supported here: this program uses a GPU already, and the ranks are forks of "
            "it, which cannot use CUDA then. Start the program with torchrun, or use no GPU "
            "before training"
        )
        raise config_error("train.device", config.train.device, rule, "cpu")
    with scratch_folder() as folder:
        code, failure = supervise_forks(config, lambda smaller: _run_rank(smaller, action, folder))
        kind, value = _read(folder / "0")
        if kind == "result":
            return value
        if kind == "error":
            raise value
        if failure is None:
            raise HybridparError(f"the job has ended with exit code {code}")
        kind, value = _read(folder / str(failure.rank))
    raise value if kind in ("error", "failure") else HybridparError(failure.text)


def _run_rank(config: Config, action: Action, folder: Path) -> int:
    """Run the action on this rank; leave its result in `folder`, and return the exit code."""
    launch = Launch.from_environment()
    path = folder / str(launch.rank)
    path.unlink(missing_ok=True)  # left by an earlier start
    try:
        result = action(config, launch)
    except RankError as error:  # the other ranks lose contact with this one
        say(str(error))
        _write(path, "failure", _plain(error))
        if isinstance(error, LostContactError):
            time.sleep(GRACE_S)
        return 1
    except HybridparError as error:
        _write(path, "error", _plain(error))
        return 1
    _write(path, "result", result)
    return int(getattr(result, "exit_code", 0))


def _write(path: Path, kind: str, value: Any) -> None:
    aside = path.with_suffix(".part")
    aside.write_bytes(pickle.dumps((kind, value)))
    aside.rename(path)


def _read(path: Path) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(path.read_bytes())
    except FileNotFoundError:  # for example, a signal has ended the rank
        return "nothing", None
    if kind == "result":
        return kind, value
    made, args = value
    return kind, made(*args)


def _plain(error: HybridparError) -> tuple[type[HybridparError], tuple[Any, ...]]:
    """Return an error's class and the arguments that create an equal one, for pickling."""
    if isinstance(error, ConfigError):
        return ConfigError, tuple(
            Problem(p.field, _as_value(p.value), p.rule, p.suggestion) for p in error.problems
        )
    return type(error), (str(error),)


def _as_value(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else shown(value)
