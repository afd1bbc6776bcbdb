"""The folders of a run's checkpoints: their names, how one appears, and how old ones go.

    .step_00000200.part    being written, or left by a process that was killed
    step_00000200          published: one rename makes it all appear
    .step_00000200.old     what had that name before; counts as published while nothing else has it,
                           as where a process was killed between the two renames
    .step_00000100.gone    being removed
    step_00000100.is_step_00000200    had that name with the manifest of another step; moved here by
                                      a save of step 100

A process that reads a checkpoint holds it (`Hold`), and a save leaves up to MOST_HELD held ones for
the next save to remove. Locks of a folder work between the processes of one machine, whatever the
file system is. A reader on another machine may find that its folder is gone, and starts over with
the newest one (load.py).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
from itertools import count
from pathlib import Path
from types import TracebackType

from hybridpar.checkpoint.format.files import sync
from hybridpar.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    folder_name,
    misnamed_step,
    read_manifest,
    step_of,
)
from hybridpar.config import CheckpointConfig
from hybridpar.errors import CheckpointError

MOST_HELD = 2
"""Number of checkpoints that a save leaves to their readers, beyond the ones that
checkpoint.keep and keep_best keep."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, which may not exist."""
    folder = _named(root, step)
    outdated = _beside(folder, "old")
    return (
        outdated if (outdated / MANIFEST).exists() and not (folder / MANIFEST).exists() else folder
    )


def saved_steps(root: Path) -> list[int]:
    """Return the steps of complete checkpoints below `root`, newest first."""
    return _steps(
        [
            path.parent
            for path in (*root.glob(f"step_*/{MANIFEST}"), *root.glob(f".step_*.old/{MANIFEST}"))
        ]
    )


def published_steps(root: Path) -> list[int]:
    """Return the steps of complete checkpoints, and of ones whose manifest was lost later,
    newest first."""
    return _steps([*root.glob("step_*"), *(folder_of(root, step) for step in saved_steps(root))])


def _steps(folders: list[Path]) -> list[int]:
    found = {step_of(path.name) for path in folders}
    return sorted((step for step in found if step is not None), reverse=True)


def begin(root: Path, step: int, num_bytes: int = 0) -> Path:
    """Create an empty folder to write a step's checkpoint of `num_bytes` bytes into.

    Raises:
        OSError: The folder cannot be created; ENOSPC if the disk is too full.
    """
    aside = _beside(_named(root, step), "part")
    discard(aside)
    aside.mkdir(parents=True)
    room = shutil.disk_usage(aside)
    if room.total and room.free < num_bytes:  # some file systems do not report it
        discard(aside)
        raise OSError(errno.ENOSPC, f"{room.free / 1e9:.3g} GB are free", str(root))
    return aside


def half_written(root: Path) -> set[tuple[str, int]]:
    """Return the folders of checkpoints that are being written, or were left unfinished, with
    the time of their last change."""
    found = set()
    for path in root.glob(".step_*.part"):
        with contextlib.suppress(OSError):  # published in the meantime
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def discard(aside: Path) -> None:
    """Remove a folder that will not be published."""
    shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder that has all its shards, and give it its name; return the
    new path.

    Raises:
        OSError: The folder cannot be renamed.
    """
    folder = _named(aside.parent, manifest.step)
    (aside / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    sync(aside / MANIFEST)
    sync(aside)
    if (
        folder.exists()
    ):  # a damaged one that was passed over, or the end of a run that is now to be longer
        outdated = _beside(folder, "old")
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
    aside.rename(folder)
    sync(folder.parent)
    return folder


def move_misnamed(root: Path, step: int) -> str:
    """Move a folder out of the way of a step's checkpoint if its manifest is for another step.

    Such a folder may be the only copy of the other checkpoint, so it is not removed.

    Returns:
        A line for the user, or "" if nothing was moved.

    Raises:
        OSError: The folder cannot be moved.
    """
    folder = _named(root, step)
    if (other := misnamed_step(folder)) is None:
        return ""
    free = (
        folder.with_name(f"{folder.name}.is_{folder_name(other)}" + (f"-{i}" if i else ""))
        for i in count()
    )
    target = next(path for path in free if not os.path.lexists(path))
    folder.rename(target)
    return (
        f"{folder}: its manifest is for step {other}, so it was moved to {target.name} "
        f"instead of being removed"
    )


def prune(root: Path, newest: int, settings: CheckpointConfig) -> None:
    """Remove checkpoints up to step `newest` that need not be kept, and unfinished ones of killed
    processes.

    A checkpoint whose manifest does not match its name is kept, and does not count. The newest
    MOST_HELD checkpoints that are being read stay until the next save.
    """
    with contextlib.suppress(OSError):  # a leftover only takes space
        steps = [
            step
            for step in saved_steps(root)
            if step <= newest and misnamed_step(folder_of(root, step)) is None
        ]
        # later ones were passed over as damaged, or are of a longer run before: they are not in the
        # place of any here
        best = best_steps(root, settings.keep_best, up_to=newest, best_by=settings.best_by)
        num_held = 0
        for step in steps[settings.keep :]:
            if step not in best and not _remove(root, step, even_if_held=num_held >= MOST_HELD):
                num_held += 1
    kept = {folder_of(root, step) for step in saved_steps(root)}
    for path in (path for kind in ("part", "old", "gone") for path in root.glob(f".step_*.{kind}")):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _remove(root: Path, step: int, *, even_if_held: bool) -> bool:
    """Rename a checkpoint as being removed, then remove it. Return False if a reader holds it.

    Raises:
        OSError: The folder cannot be renamed.
    """
    folder = folder_of(root, step)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Hold(folder, alone=True))
        except HeldError:
            if not even_if_held:
                return False
        gone = _beside(_named(root, step), "gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
    return True


class HeldError(Exception):
    """The checkpoint is being read, or removed, by another process."""


class Hold:
    """A lock on a checkpoint's folder: shared by readers, exclusive (`alone`) for a process that
    removes it.

    The lock ends with the `with` block and with the process. Without flock (Windows) it excludes
    nobody.

    Raises:
        HeldError: The lock is taken.
        OSError: The folder does not exist.
    """

    def __init__(self, folder: Path, *, alone: bool = False):
        self.folder = folder
        self._handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        self._opened = os.fstat(self._handle)
        try:
            with contextlib.suppress(ImportError):
                fcntl = importlib.import_module("fcntl")
                fcntl.flock(
                    self._handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB
                )
        except BlockingIOError:
            os.close(self._handle)
            raise HeldError(str(folder)) from None
        except OSError:  # a file system without locks
            pass

    @property
    def is_there(self) -> bool:
        """Return whether the folder still has the name under which it was opened."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.folder), self._opened)
        return False

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def best_steps(
    root: Path, most: int = 1, *, up_to: int | None = None, best_by: str = ""
) -> list[int]:
    """Return the steps with the lowest validation losses below `root`, best first; of equal losses
    the newest first.

    Args:
        root: Folder of the checkpoints.
        most: Number of steps to return at most.
        up_to: Latest step that counts; None for any.
        best_by: Name of the validation set; losses of other sets do not count.
    """
    found = []
    for step in (
        [step for step in saved_steps(root) if up_to is None or step <= up_to] if most else ()
    ):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder_of(root, step))
            if manifest.val_loss is not None and manifest.config.checkpoint.best_by == best_by:
                found.append((manifest.val_loss, -step))
    return [-step for _, step in sorted(found)[:most]]


def _named(root: Path, step: int) -> Path:
    return root / folder_name(step)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")
