from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """The folder of a name, which the first of pytest's workers to ask for it fills."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / name
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                fill(folder)
                (folder / "done").touch()
        return folder

    return folder_of
