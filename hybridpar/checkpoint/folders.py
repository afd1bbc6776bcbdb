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

from hybridpar.checkpoint.files import sync
from hybridpar.checkpoint.manifest import (
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
"""Number of checkpoints that a save leaves for their readers, beyond those that checkpoint.keep and
keep_best name."""


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of a step, which need not be there."""
    folder = _named(root, step)
    outdated = _beside(folder, "old")
    return (
        outdated if (outdated / MANIFEST).exists() and not (folder / MANIFEST).exists() else folder
    )


def saved_steps(root: Path) -> list[int]:
    """The steps that complete checkpoints below `root` were made at, newest first."""
    return _steps(
        [
            path.parent
            for path in (*root.glob(f"step_*/{MANIFEST}"), *root.glob(f".step_*.old/{MANIFEST}"))
        ]
    )


def published_steps(root: Path) -> list[int]:
    """The steps of complete checkpoints and of those whose manifest has been lost since, newest
    first."""
    return _steps([*root.glob("step_*"), *(folder_of(root, step) for step in saved_steps(root))])


def _steps(folders: list[Path]) -> list[int]:
    found = {step_of(path.name) for path in folders}
    return sorted((step for step in found if step is not None), reverse=True)


def begin(root: Path, step: int, num_bytes: int = 0) -> Path:
    """An empty folder to write the checkpoint of a step into, of so many bytes. Raises: OSError, if
    full ENOSPC."""
    aside = _beside(_named(root, step), "part")
    discard(aside)
    aside.mkdir(parents=True)
    room = shutil.disk_usage(aside)
    if room.total and room.free < num_bytes:  # some file systems do not say
        discard(aside)
        raise OSError(errno.ENOSPC, f"{room.free / 1e9:.3g} GB are free", str(root))
    return aside


def half_written(root: Path) -> set[tuple[str, int]]:
    """Folders of checkpoints that are being written or were left so, with the time of their last
    change."""
    found = set()
    for path in root.glob(".step_*.part"):
        with contextlib.suppress(OSError):  # published meanwhile
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def discard(aside: Path) -> None:
    """Removes a folder that will not be published."""
    shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, manifest: Manifest) -> Path:
    """Completes a folder that has all its shards, and gives it its name; where it is then. Raises:
    OSError."""
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
    """Move a folder out of the way of the checkpoint of a step, if its manifest is of another step.

    Such a folder may be the only copy of that other checkpoint, so it is not removed. Returns a
    line for people, or "" if nothing was moved. Raises: OSError.
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
        f"{folder}: its manifest is of step {other}, so it was moved to {target.name} and is not "
        "removed"
    )


def prune(root: Path, newest: int, settings: CheckpointConfig) -> None:
    """Removes checkpoints up to step `newest` that need not stay, and what a killed process left
    half written.

    A checkpoint whose manifest is of another step than its name stays, and counts for nothing. Of
    those that somebody reads right now, the MOST_HELD newest stay until the next save.
    """
    with contextlib.suppress(OSError):  # what stays takes space, no more
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
    """Give a checkpoint the name of one that is being removed; return False if it is held. Raises:
    OSError."""
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
    """Another process reads the checkpoint, or removes it."""


class Hold:
    """A lock on a checkpoint's folder, shared by those that read it, `alone` for the one that
    removes it.

    It ends with the block, and with the process. Without flock (Windows) it excludes nobody.
    Raises: HeldError if the lock is not to be had; OSError if the folder is not there.
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
        """Whether the folder still has the name under which it was opened."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.folder), self._opened)
        return False

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
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
    """Steps with the lowest validation losses among those saved below `root`, best first, of equal
    ones the newest.

    `up_to`: the latest step that counts (None: any). `best_by`: the validation set; losses of
    another one do not count.
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
