"""The training state of one rank, which it writes to its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridpar.checkpoint import handover
from hybridpar.checkpoint.format.files import forget
from hybridpar.checkpoint.format.manifest import ShardFile, TrainingState, file_name, saved_place
from hybridpar.checkpoint.format.shards import header_of
from hybridpar.checkpoint.format.tensorfile import TensorFile, write_tensors
from hybridpar.checkpoint.handover import Written
from hybridpar.config import Config
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.grid import EXPERTS, Place, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.nn.placement import Held
from hybridpar.state import RankState
from hybridpar.state.kind import StateKind
from hybridpar.state.kinds import parse_key


class Trainee(Protocol):
    """A rank whose state can be saved and loaded: train.engine.Engine."""

    job: JobPlan
    config: Config
    grid: ProcessGrid
    state: RankState

    def state_meta(self) -> dict[str, Any]: ...
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """The file of one rank: its place on the grid, and its content.

    `blocks`: as in manifest.ShardFile. `versions`: the weight versions that it has. `read`: returns
    the content of a tensor.
    """

    where: Place
    blocks: tuple[int, ...]
    versions: tuple[int, ...]
    tensors: dict[str, Tensor]
    header: dict[str, str]
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor

    @staticmethod
    def of(engine: Trainee) -> Part:
        """Return the part of this rank. `tensors` are the ones that it trains, without those
        that another replica writes: the first one that holds them."""
        grid = engine.grid
        state = engine.state
        held = engine.job.held(grid.pp.rank)
        tensors = {
            key: tensor
            for kind in writes(engine)
            for key, tensor in kind.tensors().items()
            if _is_first(engine, key) or _is_own(engine, kind)
        }
        return Part(
            saved_place(engine.config, grid.place),
            tuple(edge for blocks in held.values() for edge in (blocks.start, blocks.stop)),
            TrainingState.of(engine.state_meta()).versions,
            tensors,
            header_of(state.placements, state.parts),
            state.memory.read,
        )

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors in bytes, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        flight: Flight = NO_FLIGHT,
    ) -> Written:
        """Write the file, from copies of the tensors if there are any.

        Raises:
            OSError: The file cannot be written.
        """
        size, checksums = write_tensors(
            folder / file_name(self.where), tensors or self.tensors, self.header, flight, self.read
        )
        return ShardFile(self.where, self.blocks, size, checksums), self.versions

    def check(self, folder: Path, written: Written, *, flight: Flight = NO_FLIGHT) -> None:
        """Verify the checksums of the file.

        Raises:
            CheckpointError: The file does not match what was written.
        """
        path, (shard, _) = folder / file_name(self.where), written
        forget(path)
        TensorFile(path, (shard.num_bytes, shard.checksums)).check(flight)


def is_writer(engine: Trainee) -> bool:
    """Return whether this rank has a file to write."""
    return engine.grid.place in handover.writers(engine.grid.sizes, engine.config.replicas_differ)


def writes(engine: Trainee) -> list[StateKind]:
    """Return the kinds of state in this rank's file. State that replicas share is in the file of
    the first of them only."""
    return [
        kind
        for kind in engine.state.kinds
        if kind.saved and (engine.grid.expert_dp.is_first or _is_own(engine, kind))
    ]


def _is_own(engine: Trainee, kind: StateKind) -> bool:
    """Return whether each replica has state of its own of this kind."""
    return kind.differs or (engine.config.parallel.zero > 0 and not kind.whole)


def _is_first(engine: Trainee, key: str) -> bool:
    """Return whether this rank is the first of those that hold the same tensor."""
    _, parameter, _ = parse_key(key)
    is_apart = engine.state.placements[parameter].along(EXPERTS) is Held.SHARDED
    return (engine.grid.expert_dp if is_apart else engine.grid.dp_cp).is_first
