"""A job of forks of this program: what its first rank returns is returned here, and what ends it is
raised here."""

from __future__ import annotations

import pickle
import sys
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

Action = Callable[[Config, Launch], Any]


def run_forked(config: Config, action: Action) -> Any:
    """Run an action on forks of this process, one for each rank of the grid; return what it returns
    on the first.

    Args:
        config: The resolved configuration.
        action: Called on each rank with the configuration, and with the rank's place in the job.

    Raises:
        ConfigError: This process uses its GPU already, so that its forks cannot.
        HybridparError: The error that all ranks had, or the reason why the job has failed.
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
    """Run the action on this rank; return its exit code. What it returns or raises, for the
    program, is left."""
    launch = Launch.from_environment()
    path = folder / str(launch.rank)
    path.unlink(missing_ok=True)  # of an earlier start
    try:
        result = action(config, launch)
    except RankError as error:  # others find out that this rank has gone
        print(f"hybridpar: {error}", file=sys.stderr, flush=True)
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
    except FileNotFoundError:  # a signal has ended the rank, say
        return "nothing", None
    if kind == "result":
        return kind, value
    made, args = value
    return kind, made(*args)


def _plain(error: HybridparError) -> tuple[type[HybridparError], tuple[Any, ...]]:
    """The kind of an error and the arguments that make an equal one."""
    if isinstance(error, ConfigError):
        return ConfigError, tuple(
            Problem(p.field, _as_value(p.value), p.rule, p.suggestion) for p in error.problems
        )
    return type(error), (str(error),)


def _as_value(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else shown(value)
