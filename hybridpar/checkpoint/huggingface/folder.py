"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import CheckpointError, config_error
from hybridpar.reading import reason


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into, which then becomes it; removed where that fails.

    Raises: ConfigError if `path` holds something already; CheckpointError if it cannot be written.
    """
    given, path = path, path.absolute()
    aside = path.with_name(f".{path.name}.part")
    try:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise config_error("output", str(given), "is there already, and nothing is overwritten", f"{path}-2")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if path.is_dir():
            path.rmdir()
        aside.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({reason(error)}); name another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
