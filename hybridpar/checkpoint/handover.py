"""Notes from ranks that write to the rank that publishes: files beside the shards.

A save runs beside training, whose collectives must be called in the same order everywhere, so a
save uses none. A rank that dies leaves no note, and its checkpoint is never published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

from hybridpar.checkpoint.format.manifest import ShardFile, file_name, parse_shard
from hybridpar.config import Config, from_plain
from hybridpar.errors import CheckpointError
from hybridpar.grid import APART, BATCH, EXPERT_AXES, MODEL, AxisSizes, Place, sizes_of
from hybridpar.reading import errors_as, parse_json, read_limited

_MAX_BYTES = 64 << 20
_FIRST_LOOK_S = 0.001
_LONGEST_PAUSE_S = 0.2

Written = tuple[ShardFile, tuple[int, ...]]
"""A written file, and the weight versions that its stage has."""


class GivenUp(Exception):
    """Another rank has failed, so there is nothing to wait for."""


def writers(sizes: AxisSizes, every_replica: bool) -> list[Place]:
    """Return the places of the ranks that write a file.

    Of the ranks that hold the same part of the model, the first one writes; all replicas write if
    each has state of its own (ZeRO, error feedback). Each site writes its own files.
    """
    split = (*MODEL, *APART, *BATCH) if every_replica else (*MODEL, *APART, *EXPERT_AXES)
    names = (*MODEL, *(name for name in sizes if name not in MODEL))
    indices = product(*(range(sizes[name] if name in split else 1) for name in names))
    return [dict(zip(names, at, strict=True)) for at in indices]


def leave(folder: Path, written: Written) -> None:
    """Write the note that a file is complete on disk.

    Raises:
        OSError: The note cannot be written.
    """
    shard, versions = written
    note = _note(folder, shard.name)
    aside = note.with_suffix(".part")  # no reader meets half a note; notes need not survive a crash
    aside.write_text(json.dumps(shard.as_plain() | {"versions": versions}), encoding="utf-8")
    aside.rename(note)


def collect(folder: Path, config: Config, given_up: Event) -> list[Written]:
    """Wait for the notes of all writers, and remove them.

    Raises:
        GivenUp: `given_up` was set.
        OSError: A note cannot be read.
        CheckpointError: A note is damaged.
    """
    paths = [
        _note(folder, file_name(where))
        for where in writers(sizes_of(config.parallel), config.replicas_differ)
    ]
    written = [_read(path, config) for path in _as_they_come(paths, given_up)]
    for path in paths:
        path.unlink()
    return written


def _as_they_come(paths: list[Path], given_up: Event) -> Iterator[Path]:
    for path in paths:
        pause = _FIRST_LOOK_S
        while not path.exists():
            if given_up.wait(pause):
                raise GivenUp
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        yield path


def _read(path: Path, config: Config) -> Written:
    with errors_as(CheckpointError, path, "is damaged"):
        entry = from_plain(
            dict[str, Any],
            parse_json(read_limited(path, _MAX_BYTES, within=path.parent)),
            path.name,
        )
        return parse_shard(entry, config), from_plain(
            tuple[int, ...], entry.get("versions"), "versions"
        )


def _note(folder: Path, shard: str) -> Path:
    return folder / f"{shard}.json"
