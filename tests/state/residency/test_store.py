"""The file of the slow tier: what was written is read, and what is wrong with its disk is said."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridpar.errors import HybridparError
from hybridpar.state.residency.store import PAGE, DiskStore, padded

SIZES = [1, PAGE, PAGE + 1, (9 << 20) + 5, 0]  # the fourth goes in three pieces


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def memory_of(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(padded(size), PAGE)))[: padded(size)]


@pytest.mark.parametrize("direct", [True, False], ids=["past the page cache", "through it"])
def test_content_comes_back(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(DiskStore, "_go_direct", lambda self: False)
    store = DiskStore(tmp_path, SIZES)
    draw = torch.Generator().manual_seed(0)
    there = [memory_of(size) for size in SIZES]
    for _ in range(2):
        for item, memory in enumerate(there):
            if memory.nbytes:
                torch.frombuffer(memory, dtype=torch.uint8).random_(0, 256, generator=draw)
            store.write(item, memory)
        for item in reversed(range(len(SIZES))):
            back = memory_of(SIZES[item])
            store.read(item, back)
            assert back == there[item]
    store.close()


def test_unwritten_items_are_zeros(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, [PAGE, PAGE])
    memory = memory_of(PAGE)
    memory[:] = b"\1" * PAGE
    store.write(0, memory)
    store.read(1, memory)
    assert bytes(memory) == bytes(PAGE)
    store.close()


def test_the_file_has_no_name_and_its_room_at_once(tmp_path: Path) -> None:
    """A killed run leaves nothing, and a disk is full before training begins rather than in the
    middle."""
    store = DiskStore(tmp_path / "new", [64 << 20])
    assert list((tmp_path / "new").iterdir()) == []
    assert os.fstat(store._file).st_blocks * 512 >= 64 << 20
    store.close()
    store.close()


def test_a_disk_without_room_is_named(small_disk: Path) -> None:
    with pytest.raises(
        HybridparError,
        match=rf"{small_disk}: cannot make the file of the state: .*No space left.*"
        r"it takes 0\.00839 GB: make room, or set memory\.folder",
    ):
        DiskStore(small_disk, [8 << 20])
    DiskStore(small_disk, [1 << 20]).close()  # nothing was left behind


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        HybridparError, match=rf"{tmp_path}/file: cannot make the file of the state: .*File exists"
    ):
        DiskStore(tmp_path / "file", [PAGE])


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, [8 * PAGE])
    memory = memory_of(8 * PAGE)
    os.truncate(store._file, 3 * PAGE)
    with pytest.raises(
        HybridparError, match=r"cannot read a part of the state: .*nothing was moved"
    ):
        store.read(0, memory)
    store.close()
