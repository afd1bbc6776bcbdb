"""Writes checkpoints: shards side by side, then the manifest, then one rename that makes them all appear."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridpar.checkpoint.files import sha256, sync
from hybridpar.checkpoint.manifest import (
    KEEP,
    MANIFEST,
    Manifest,
    ShardFile,
    folder_of,
    placements_to_plain,
    saved_steps,
)
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.errors import CheckpointError
from hybridpar.grid import ProcessGrid
from hybridpar.nn.placement import Placement


class Trainee(Protocol):
    """What is saved and loaded here; train.engine.Engine is one."""

    config: Config
    grid: ProcessGrid
    device: torch.device

    @property
    def batches_done(self) -> int: ...
    @property
    def placements(self) -> Mapping[str, Placement]: ...
    def owned_parts(self) -> dict[str, tuple[int, int]]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def state_meta(self) -> dict[str, Any]: ...
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


def save(root: Path, engine: Trainee, corpus: str) -> Path:
    """Saves `engine` (its pipeline drained) under `root`, removes checkpoints older than the newest KEEP; its folder.

    The first replica of each stage and tensor part writes; with ZeRO the others add what they alone have. `corpus`:
    fingerprint of the data stream.
    Collectives: on all ranks of the grid. Raises: CheckpointError, on all ranks, if any cannot write.
    """
    grid = engine.grid
    folder = folder_of(root, engine.batches_done)
    aside = root / f".{folder.name}.part"

    def make_room() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def write() -> dict[str, Any]:
        return asdict(_write_shard(aside, engine))

    def publish() -> None:
        shards = tuple(ShardFile(**shard) for shard in everyone if shard is not None)
        _publish(aside, folder, Manifest(engine.batches_done, engine.config, corpus, shards))
        _prune(root, engine.batches_done)

    _on(grid, grid.rank == 0, make_room)
    everyone = _on(grid, grid.dp.is_first or engine.config.parallel.zero > 0, write)
    _on(grid, grid.rank == 0, publish)
    return folder


def _on(grid: ProcessGrid, here: bool, action: Callable[[], Any]) -> list[Any]:
    """What `action` returned on the ranks where `here` is true (else None), in rank order; fails on all at once."""
    result, failure = None, ""
    if here:
        try:
            result = action()
        except OSError as error:
            failure = f"{grid.describe()} cannot write the checkpoint: {error}"
    everyone = gather_objects((result, failure), grid.world)
    if failures := [text for _, text in everyone if text]:
        raise CheckpointError(failures[0])
    return [value for value, _ in everyone]


def save_weights(root: Path, config: Config, weights: Mapping[str, Tensor],
                 placements: Mapping[str, Placement]) -> Path:
    """Saves a whole model of another origin under `root` as a checkpoint of step 0, of one process; its folder.

    It is for train.start_from, generate and export; there is no state of an optimizer to go on from.
    Raises: CheckpointError if it cannot be written.
    """
    folder = folder_of(root, 0)
    aside = root / f".{folder.name}.part"
    path = aside / "pp0-tp0.safetensors"
    header = {"state": {"batches_done": 0, "versions": [0]}, "placements": placements_to_plain(placements), "parts": {}}
    try:
        aside.mkdir(parents=True)
        save_file({f"weights/0/{name}": tensor.contiguous() for name, tensor in weights.items()}, path,
                  metadata={key: json.dumps(value) for key, value in header.items()})
        sync(path)
        shard = ShardFile(path.name, 0, 0, path.stat().st_size, sha256(path))
        _publish(aside, folder, Manifest(0, config, "", (shard,)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error})") from None
    return folder


def _write_shard(folder: Path, engine: Trainee) -> ShardFile:
    pp, tp, dp = engine.grid.pp.rank, engine.grid.tp.rank, engine.grid.dp.rank
    path = folder / f"pp{pp}-tp{tp}{f'-dp{dp}' if dp else ''}.safetensors"
    header = {"state": engine.state_meta(), "placements": placements_to_plain(engine.placements),
              "parts": engine.owned_parts()}
    tensors = {name: tensor.contiguous() for name, tensor in engine.state_tensors().items()
               if dp == 0 or not name.startswith("weights/")}  # which all replicas have
    save_file(tensors, path, metadata={key: json.dumps(value) for key, value in header.items()})
    sync(path)
    return ShardFile(path.name, pp, tp, path.stat().st_size, sha256(path), dp)


def _publish(aside: Path, folder: Path, manifest: Manifest) -> None:
    (aside / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    sync(aside / MANIFEST)
    sync(aside)
    if folder.exists():  # a damaged one that was passed over, or the end of a run that is now to be longer
        outdated = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
        aside.rename(folder)
        shutil.rmtree(outdated)
    else:
        aside.rename(folder)
    sync(folder.parent)


def _prune(root: Path, newest: int) -> None:
    """Removes what is older than the newest KEEP, and what a killed process left half written."""
    for step in [s for s in saved_steps(root) if s <= newest][KEEP:]:
        shutil.rmtree(folder_of(root, step), ignore_errors=True)
    for path in (*root.glob(".step_*.part"), *root.glob(".step_*.old")):
        shutil.rmtree(path, ignore_errors=True)
