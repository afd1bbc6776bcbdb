"""A folder that appears complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import CheckpointError, config_error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into, which then becomes it; removed where that fails.

    Raises: ConfigError if `path` holds something already; CheckpointError if it cannot be written.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise config_error("output", str(path), "is there already, and nothing is overwritten", f"{path}-2")
    path = path.absolute()
    aside = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if path.is_dir():
            path.rmdir()
        aside.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
