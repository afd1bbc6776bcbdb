"""What one rank has of a training state, and writes: a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridpar.checkpoint import notes
from hybridpar.checkpoint.files import forget
from hybridpar.checkpoint.manifest import ShardFile, TrainingState, file_name, saved_place
from hybridpar.checkpoint.notes import Written
from hybridpar.checkpoint.shards import WEIGHTS, header_of
from hybridpar.checkpoint.tensorfile import TensorFile, write_tensors
from hybridpar.config import Config
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.grid import Place, ProcessGrid
from hybridpar.nn.placement import Placement
from hybridpar.optim import ParameterSlot
from hybridpar.optim.loss_scale import LossScaler
from hybridpar.state.weights import WeightStore


class Trainee(Protocol):
    """What is saved and loaded here; train.engine.Engine is one.

    `split`: the blocks of each stage, which go round the ranks. `before_change`: called before anything changes what
    `state_tensors` gives.
    """

    config: Config
    grid: ProcessGrid
    weights: WeightStore
    scaler: LossScaler
    slots: list[ParameterSlot]
    split: tuple[range, ...]
    placements: dict[str, Placement]
    before_change: Callable[[], object]

    def owned_parts(self) -> dict[str, tuple[int, int]]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def state_meta(self) -> dict[str, Any]: ...
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """One rank's file: which, and what goes into it. `blocks`: as in manifest.ShardFile. `versions`: of the weights,
    those that it has."""

    where: Place
    blocks: tuple[int, ...]
    versions: tuple[int, ...]
    tensors: dict[str, Tensor]
    header: dict[str, str]

    @staticmethod
    def of(engine: Trainee) -> Part:
        """What this rank has to write; `tensors` are those that it trains."""
        grid = engine.grid
        held = engine.split[grid.pp.rank :: grid.pp.size]
        tensors = {name: tensor for name, tensor in engine.state_tensors().items()
                   if grid.dp.is_first or not name.startswith(f"{WEIGHTS}/")}  # which all replicas have
        return Part(
            saved_place(engine.config, grid.place),
            tuple(edge for blocks in held for edge in (blocks.start, blocks.stop)),
            TrainingState.of(engine.state_meta()).versions, tensors,
            header_of(engine.placements, engine.owned_parts()))

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path, tensors: Mapping[str, Tensor] | None = None, *,
              flight: Flight = NO_FLIGHT) -> Written:
        """Writes the file, with a copy of the tensors where there is one. Raises: OSError."""
        size, checksums = write_tensors(folder / file_name(self.where), tensors or self.tensors, self.header, flight)
        return ShardFile(self.where, self.blocks, size, checksums), self.versions

    def check(self, folder: Path, written: Written, *, flight: Flight = NO_FLIGHT) -> None:
        """Compares the file with its checksums. Raises: CheckpointError where it is not what was written."""
        path, (shard, _) = folder / file_name(self.where), written
        forget(path)
        TensorFile(path, (shard.num_bytes, shard.checksums)).check(flight)


def is_writer(engine: Trainee) -> bool:
    """Whether this rank has a file to write."""
    return engine.grid.place in notes.writers(engine.grid.sizes, engine.config.parallel.zero)
