"""The folders of a run's checkpoints: their names, how one appears, and how old ones go.

    .step_00000200.part    being written, or left by a process that was killed
    step_00000200          published: one rename makes it all appear
    .step_00000200.old     what had that name before; counts as published while nothing else has it, as where a process
                           was killed between the two renames
    .step_00000100.gone    being removed
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from pathlib import Path

from hybridpar.checkpoint.files import sync
from hybridpar.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from hybridpar.config import CheckpointConfig
from hybridpar.errors import CheckpointError


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of a step, which need not be there."""
    folder = _named(root, step)
    outdated = _beside(folder, "old")
    return outdated if (outdated / MANIFEST).exists() and not (folder / MANIFEST).exists() else folder


def saved_steps(root: Path) -> list[int]:
    """The steps that complete checkpoints below `root` were made at, newest first."""
    return _steps([path.parent for path in (*root.glob(f"step_*/{MANIFEST}"), *root.glob(f".step_*.old/{MANIFEST}"))])


def published_steps(root: Path) -> list[int]:
    """The steps of complete checkpoints and of those whose manifest has been lost since, newest first."""
    return _steps([*root.glob("step_*"), *(folder_of(root, step) for step in saved_steps(root))])


def _steps(folders: list[Path]) -> list[int]:
    found = [re.fullmatch(r"\.?step_([0-9]{8,18})(\.old)?", path.name) for path in folders]
    return sorted({int(match[1]) for match in found if match}, reverse=True)


def begin(root: Path, step: int, num_bytes: int = 0) -> Path:
    """An empty folder to write the checkpoint of a step into, of so many bytes. Raises: OSError, if full ENOSPC."""
    aside = _beside(_named(root, step), "part")
    discard(aside)
    aside.mkdir(parents=True)
    room = shutil.disk_usage(aside)
    if room.total and room.free < num_bytes:  # some file systems do not say
        discard(aside)
        raise OSError(errno.ENOSPC, f"{room.free / 1e9:.3g} GB are free", str(root))
    return aside


def half_written(root: Path) -> set[tuple[str, int]]:
    """Folders of checkpoints that are being written or were left so, with the time of their last change."""
    found = set()
    for path in root.glob(".step_*.part"):
        with contextlib.suppress(OSError):  # published meanwhile
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def discard(aside: Path) -> None:
    """Removes a folder that will not be published."""
    shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, manifest: Manifest) -> Path:
    """Completes a folder that has all its shards, and gives it its name; where it is then. Raises: OSError."""
    folder = _named(aside.parent, manifest.step)
    (aside / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    sync(aside / MANIFEST)
    sync(aside)
    if folder.exists():  # a damaged one that was passed over, or the end of a run that is now to be longer
        outdated = _beside(folder, "old")
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
    aside.rename(folder)
    sync(folder.parent)
    return folder


def prune(root: Path, newest: int, settings: CheckpointConfig) -> None:
    """Removes checkpoints up to step `newest` that need not stay, and what a killed process left half written."""
    with contextlib.suppress(OSError):  # what stays takes space, no more
        older = [step for step in saved_steps(root) if step <= newest][settings.keep :]
        # later ones were passed over as damaged, or are of a longer run before: they are not in the place of any here
        for step in set(older) - set(best_steps(root, settings.keep_best, up_to=newest)):
            gone = _beside(_named(root, step), "gone")
            shutil.rmtree(gone, ignore_errors=True)
            folder_of(root, step).rename(gone)
    kept = {folder_of(root, step) for step in saved_steps(root)}
    for path in (path for kind in ("part", "old", "gone") for path in root.glob(f".step_*.{kind}")):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def best_steps(root: Path, most: int = 1, *, up_to: int | None = None) -> list[int]:
    """Steps with the lowest validation losses among those saved below `root`, best first, of equal ones the newest.

    `up_to`: the latest step that counts (None: any).
    """
    found = []
    for step in [step for step in saved_steps(root) if up_to is None or step <= up_to] if most else ():
        with contextlib.suppress(CheckpointError):
            if (loss := read_manifest(folder_of(root, step)).val_loss) is not None:
                found.append((loss, -step))
    return [-step for _, step in sorted(found)[:most]]


def _named(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")
