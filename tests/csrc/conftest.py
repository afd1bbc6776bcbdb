from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    / "hybridpar"
    / "compiled_by_tests"
)


def made_of() -> str:
    """Checksum of all that compiled code follows from: sources, how they are compiled, compilers,
    torch, Python."""
    digest = hashlib.sha256(
        repr((torch.__version__, torch.__file__, sys.version, os.environ.get("CXX"))).encode()
    )
    sources = [*ROOT.glob("csrc/**/*"), *ROOT.glob("tests/csrc/**/*"), ROOT / "setup.py"]
    tools = [
        os.path.realpath(shutil.which(tool) or tool)
        for tool in (os.environ.get("CXX", "c++"), "nvcc")
    ]
    for path in sorted(
        path for path in sources if path.suffix in (".c", ".cpp", ".cu", ".cuh", ".h", ".py")
    ):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    for tool in tools:
        digest.update(repr((tool, os.path.exists(tool) and os.stat(tool).st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


@pytest.fixture(scope="session")
def built_once() -> Callable[[str, Callable[[Path], None]], Path]:
    """The folder of a name, which the first to ask for it fills; of the same sources only once on a
    machine."""
    key = made_of()

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder = CACHE / f"{name}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # it is in use, perhaps beside tests of other sources
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                for other in CACHE.glob(f"{name}-*"):
                    with suppress(FileNotFoundError):  # tests of other sources remove it, too
                        if time.time() - other.stat().st_mtime > 86400:
                            shutil.rmtree(other, ignore_errors=True)
                fill(folder)
                (folder / "done").touch()
        return folder

    return folder_of
