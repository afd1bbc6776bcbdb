"""Temporary folders of killed processes are removed by the next one, and never those of a live
one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybridpar import scratch
from hybridpar.scratch import remove_left_folders, scratch_folder

KERNEL = 32 * "a"
"""A process of another machine."""
HOLDER = """
import os, sys, time
from pathlib import Path
from hybridpar.scratch import scratch_folder
with scratch_folder("mine", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    if sys.argv[2] == "fork" and os.fork():
        os.kill(os.getpid(), 9)
    print(folder.name, os.getpid(), flush=True)
    time.sleep(600)
"""


def holder(parent: Path, how: str = "") -> tuple[str, int, subprocess.Popen[str]]:
    """A process in the block of a scratch folder: the folder's name, and the process that is alive
    there."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name, pid = process.stdout.readline().split()
    return name, int(pid), process


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_the_next_removes_what_a_killed_process_left_and_nothing_of_a_live_one(
    tmp_path: Path,
) -> None:
    """A fork that outlives the process counts as live."""
    for name in (
        "mine",
        "mine.old",
        "mine.a.b",
        "mine.bak.20261128",
        f"mine.{KERNEL}.short",
        f"other.{KERNEL}.12345678",
        f"mine.{KERNEL}.12345678.c",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / f"mine.{KERNEL}.12345678").touch()
    others = names(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    killed, _, process = holder(tmp_path)
    live, pid, living = holder(tmp_path, "fork")
    process.kill()
    process.wait()
    living.wait()
    assert names(tmp_path) == others | {killed, live}
    with scratch_folder("mine", tmp_path) as folder:
        assert names(tmp_path) == others | {live, folder.name}
    assert names(tmp_path) == others | {live}
    os.kill(pid, signal.SIGKILL)
    while names(tmp_path) != others:  # the system gives its lock up a moment later
        remove_left_folders("mine", tmp_path)
        time.sleep(0.01)


def test_a_folder_of_another_kernel_stays_for_a_day(tmp_path: Path) -> None:
    """Whose locks are not known here, as on a shared file system."""
    theirs = tmp_path / f"mine.{KERNEL}.12345678"
    theirs.mkdir()
    remove_left_folders("mine", tmp_path)
    assert theirs.is_dir()
    yesterday = time.time() - scratch._UNCHANGED_S - 60
    (theirs / "written").touch()
    os.utime(theirs, (yesterday, yesterday))
    remove_left_folders("mine", tmp_path)
    assert theirs.is_dir(), "a file in it was just written"
    os.utime(theirs / "written", (yesterday, yesterday))
    os.utime(theirs, (yesterday, yesterday))
    remove_left_folders("mine", tmp_path)
    assert not theirs.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / f"mine.{scratch._kernel()}.12345678").symlink_to(tmp_path / "target")
    remove_left_folders("mine", tmp_path)
    assert len(names(tmp_path)) == 2
