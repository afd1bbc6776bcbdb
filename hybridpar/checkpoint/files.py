"""Files that are there completely or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK = 4 << 20


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it there, so that a reader or a crash never meets half of it."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
