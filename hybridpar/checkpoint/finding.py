"""Finds a checkpoint to read, and keeps it there meanwhile, also beside a job that saves and
removes older ones.

    list | hold the newest | is it still there? | check it, read it | let go
           a save leaves held ones (folders.prune)

A checkpoint that goes nevertheless (it was removed in the moment before it was held; its job is on
another machine, which does not see this one's locks; or several newer ones are held, too) is no
damaged one: its folder has lost its name, and reading starts over with the newest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hybridpar.checkpoint.folders import HeldError, Hold, folder_of, published_steps
from hybridpar.checkpoint.format.manifest import MANIFEST, read_manifest
from hybridpar.checkpoint.load import check_files
from hybridpar.errors import CheckpointError
from hybridpar.reading import nearest_path, reason, runs_near

MOST_TRIES = 20
"""Number of checkpoints in a row that may be removed while they are read, before reading fails."""

T = TypeVar("T")
Say = Callable[[str], None]


def read_held(path: str | Path, say: Say, read: Callable[[Path], T]) -> T:
    """Return `read(folder)` of the checkpoint that a path names: the path itself, or the newest
    complete one of a run.

    If the checkpoint is removed while it is read, `read` is called again with the newest one, so it
    must leave nothing behind when it raises a CheckpointError.

    Raises:
        CheckpointError: There is no complete checkpoint. Errors of `read` pass through.
    """
    found: list[T] = []
    hold_found(path, say, lambda folder: found.append(read(folder))).close()
    return found[-1]


def hold_found(
    path: str | Path, say: Say, look: Callable[[Path], Any] = lambda folder: None
) -> Hold:
    """Return the hold on the checkpoint that a path names, after calling `look` with it.

    Raises:
        CheckpointError: As for `read_held`.
    """
    for _ in range(MOST_TRIES):
        hold = _hold(Path(path), say)
        try:
            look(hold.folder)
            return hold
        except BaseException as error:
            is_there = hold.is_there
            hold.close()
            if is_there or not isinstance(error, CheckpointError):
                raise
        say(f"{hold.folder}: was removed while it was read; starting over")
    raise _removed_too_fast(Path(path))


def find(path: str | Path, say: Say) -> Path:
    """Return the checkpoint that a path names: the path itself, or the newest complete one of a run
    folder.

    Raises:
        CheckpointError: There is none.
    """
    with _hold(Path(path), say) as hold:
        return hold.folder


def newest(root: Path, say: Say) -> Path:
    """Return the folder of the newest complete checkpoint under `root`.

    Raises:
        CheckpointError: There is none.
    """
    with _hold_newest(root, say) as hold:
        return hold.folder


def _hold(path: Path, say: Say) -> Hold:
    if not path.is_dir():
        near = runs_near(path) or nearest_path(path)
        raise CheckpointError(
            f"{path}: is neither a run folder nor a checkpoint in one" + (near and f"; try {near}")
        )
    if path.name == "checkpoints":
        path = path.parent
    if not (path / MANIFEST).is_file():
        if not (path / "checkpoints").exists():
            near = runs_near(path)
            raise CheckpointError(f"{path}: has no checkpoints" + (near and f"; try {near}"))
        return _hold_newest(path / "checkpoints", say)
    try:
        return Hold(path)
    except (HeldError, OSError):
        raise CheckpointError(
            f"{path}: is being removed by the job that saves there (checkpoint.keep)"
        ) from None


def _hold_newest(root: Path, say: Say) -> Hold:
    said: set[str] = set()
    for _ in range(MOST_TRIES):
        why = ""
        is_gone = False
        for step in published_steps(root):
            folder = folder_of(root, step)
            try:
                if (hold := _hold_whole(folder)) is not None:
                    return hold
                is_gone = True
                break
            except CheckpointError as error:
                text = str(error)
                why = why or f"; of the newest, {text}"
                if text not in said:
                    say(f"{text}: passed over")
                    said.add(text)
        if not is_gone:
            raise CheckpointError(f"{root}: holds no complete checkpoint{why}")
    raise _removed_too_fast(root)


def _hold_whole(folder: Path) -> Hold | None:
    """Return the hold on a complete checkpoint, or None if it is being removed.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    try:
        hold = Hold(folder)
    except HeldError:
        return None
    except OSError as error:
        if not os.path.lexists(folder):
            return None
        raise CheckpointError(f"{folder}: cannot be read ({reason(error)})") from None
    try:
        check_files(folder, read_manifest(folder))
    except CheckpointError:
        is_there = hold.is_there
        hold.close()
        if is_there:
            raise
        return None
    return hold


def _removed_too_fast(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: {MOST_TRIES} checkpoints in a row were removed while they were read; run the "
        f"job that saves there with a larger checkpoint.keep or train.save_interval"
    )
