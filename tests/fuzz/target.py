"""A target of fuzzing: a reader, and how its files are made and mutated."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

Files = dict[str, bytes]
Mutator = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Target:
    """A reader. `make`: writes valid files into a folder, several sets of them. `read`: of the
    files in a folder.

    `mutators`: by the end of a file's name; files without one stay as they are. `repair`: puts
    checksums right, as somebody who forges files would.
    """

    name: str
    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    mutators: Mapping[str, Mutator]
    repair: Callable[[Files], Files] = lambda files: files
    renames: bool = False
    """Whether files are also taken away, put elsewhere and exchanged: where names mean
    something."""
    share: float = 1.0
    """Share of the inputs that others get: slow readers get fewer."""

    def mutator_of(self, name: str) -> Mutator | None:
        return next((mutator for end, mutator in self.mutators.items() if name.endswith(end)), None)

    @functools.cached_property
    def seeds(self) -> list[Files]:
        """Sets of valid files, by name."""
        with tempfile.TemporaryDirectory() as folder:
            return [
                {
                    path.relative_to(one).as_posix(): path.read_bytes()
                    for path in sorted(one.rglob("*"))
                    if path.is_file()
                }
                for one in self.make(Path(folder))
            ]


def folder_with(folder: Path, **files: str | bytes) -> Path:
    """A new folder with files, whose names have __ for a dot."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(
            data.encode() if isinstance(data, str) else data
        )
    return folder
