"""Writes checkpoints: shards side by side, then the manifest, then one rename that makes them all appear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridpar.checkpoint.folders import begin, prune, publish
from hybridpar.checkpoint.manifest import Manifest, ShardFile, TrainingState, file_name
from hybridpar.checkpoint.shards import WEIGHTS, header_of
from hybridpar.checkpoint.tensorfile import write_tensors
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.errors import CheckpointError
from hybridpar.grid import ProcessGrid
from hybridpar.nn.placement import Placement
from hybridpar.optim import ParameterSlot
from hybridpar.optim.loss_scale import LossScaler
from hybridpar.pipeline.run.weights import WeightStore


class Trainee(Protocol):
    """What is saved and loaded here; train.engine.Engine is one. `split`: the blocks of each stage."""

    config: Config
    grid: ProcessGrid
    weights: WeightStore
    scaler: LossScaler
    slots: list[ParameterSlot]
    split: tuple[range, ...]
    placements: dict[str, Placement]

    def owned_parts(self) -> dict[str, tuple[int, int]]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def state_meta(self) -> dict[str, Any]: ...
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


Written = tuple[ShardFile, tuple[int, ...]]
"""A file, and the versions of the weights that its stage has."""


def save(root: Path, engine: Trainee, corpus: str, val_loss: float | None = None) -> Path:
    """Saves `engine` (its pipeline drained) under `root`, removes what config.checkpoint does not keep; its folder.

    `corpus`: fingerprint of the data stream. `val_loss`: that of this step, if it was evaluated.
    Collectives: on all ranks of the grid. Raises: CheckpointError, on all ranks, if any cannot write.
    """
    grid, state = engine.grid, TrainingState.of(engine.state_meta())
    step = state.batches_done

    def finish() -> Path:
        folder = publish(aside, make_manifest(engine.config, corpus, state, filter(None, everyone), val_loss))
        prune(root, step, engine.config.checkpoint)
        return folder

    aside = _on(grid, grid.rank == 0, lambda: begin(root, step))[0]
    everyone = _on(grid, is_writer(engine), lambda: write_shard(aside, engine))
    return _on(grid, grid.rank == 0, finish)[0]


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


def is_writer(engine: Trainee) -> bool:
    """Whether this rank has a file to write: the first replica of each stage and tensor part has, with ZeRO all have,
    the others what they alone keep."""
    return engine.grid.dp.is_first or engine.config.parallel.zero > 0


def write_shard(folder: Path, engine: Trainee) -> Written:
    """Writes this rank's file. Raises: OSError."""
    grid, state = engine.grid, TrainingState.of(engine.state_meta())
    where = grid.pp.rank, grid.tp.rank, grid.dp.rank
    tensors = {name: tensor for name, tensor in engine.state_tensors().items()
               if grid.dp.is_first or not name.startswith(f"{WEIGHTS}/")}  # which all replicas have
    header = header_of(engine.placements, engine.owned_parts())
    size, digest = write_tensors(folder / file_name(*where), tensors, header)
    blocks = engine.split[grid.pp.rank]
    return ShardFile(*where, (blocks.start, blocks.stop), size, digest), state.versions


def make_manifest(config: Config, corpus: str, state: TrainingState, written: Iterable[Written],
                  val_loss: float | None = None) -> Manifest:
    """The table of contents of files that are all written; `state`: of any rank."""
    shards, versions = zip(*written, strict=True)
    common = set.intersection(*map(set, versions))
    known = val_loss is not None and isfinite(val_loss)
    state = replace(state, versions=tuple(sorted(common)))
    return Manifest(config, corpus, state, shards, val_loss if known else None)


def save_weights(root: Path, config: Config, weights: Mapping[str, Tensor],
                 placements: Mapping[str, Placement]) -> Path:
    """Saves a whole model of another origin under `root` as a checkpoint of step 0, of one process; its folder.

    It is for train.start_from, generate and export; there is no state of an optimizer to go on from.
    Raises: CheckpointError if it cannot be written.
    """
    state = TrainingState(0, (0,))
    try:
        aside = begin(root, 0)
        size, digest = write_tensors(aside / file_name(0, 0, 0), {f"{WEIGHTS}/0/{n}": t for n, t in weights.items()},
                                     header_of(placements, {}))
        shard = ShardFile(0, 0, 0, (0, config.model.num_blocks), size, digest)
        return publish(aside, make_manifest(config, "", state, [(shard, state.versions)]))
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written to ({error})") from None
