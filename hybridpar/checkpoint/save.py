"""Writes checkpoints: shards side by side, then the manifest, then one rename that makes them all
appear.

    this rank, drained   begin | copy ............. | write its file, sync | leave a note
    rank 0 in addition                                                     | all notes there? manifest, rename, prune
    training                   | forward, backward, update, forward ............

All but `begin` runs in a thread without collectives, whether training continues meanwhile or waits
(`save`). Ranks agree on what became of it when training is next between two stretches
(`Saver.settle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from threading import Event

from torch import Tensor

from hybridpar.checkpoint import handover
from hybridpar.checkpoint.background import Note, Task, Write, explain
from hybridpar.checkpoint.folders import begin, discard, folder_of, move_misnamed, prune, publish
from hybridpar.checkpoint.format.manifest import (
    Manifest,
    TrainingState,
    add_val_loss,
    read_manifest,
    saved_place,
)
from hybridpar.checkpoint.format.part import Part, Trainee, is_writer, writes
from hybridpar.checkpoint.format.shards import header_of
from hybridpar.checkpoint.handover import Written
from hybridpar.checkpoint.snapshot import Snapshot
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.flight import NO_FLIGHT, Flight, Waiting
from hybridpar.nn.placement import Placement
from hybridpar.state.kinds import WeightVersions

_TURN_S = (
    1.0  # ranks that wait for each other's files meet this often, so that no collective times out
)
_GRACE_S = 10.0


def save(root: Path, engine: Trainee, corpus: str, val_loss: float | None = None) -> Path:
    """Save `engine` (its pipeline drained) under `root`, remove checkpoints that config.checkpoint
    does not keep, and return the new folder.

    Args:
        corpus: Fingerprint of the data stream.
        val_loss: Validation loss of this step, if it was evaluated.

    Collectives: on all ranks of the grid.

    Raises:
        CheckpointError: On all ranks, if any cannot write.
        NotFiniteError: On all ranks, if the state of any has NaN or infinity.
    """
    saver = Saver(root, engine, corpus)
    saver.start(val_loss, beside=False)
    folder = saver.settle()
    assert folder is not None
    return folder


class Saver:
    """Saves an engine under `root`, one checkpoint at a time, also while it trains.

    Args:
        say: Called with each published checkpoint, on rank 0, from another thread.
        flight: Record in which this rank's writing thread notes what it does.
    """

    def __init__(
        self,
        root: Path,
        engine: Trainee,
        corpus: str,
        say: Callable[[str], None] = lambda text: None,
        flight: Flight = NO_FLIGHT,
        on_save: Callable[[Path], None] = lambda folder: None,
    ):
        self._root = root
        self._engine = engine
        self._corpus = corpus
        self._say = say
        self._flight = flight
        self._wrap: Callable[[Write], Write] = lambda write: write
        self._on_save = on_save
        self._snapshot = Snapshot()
        self._task: Task | None = None
        self._step = self._num_bytes = 0

    def write_with(self, wrap: Callable[[Write], Write]) -> None:
        """Write this rank's files by what `wrap` returns, which is called when a save starts."""
        self._wrap = wrap

    def reserve(self) -> None:
        """Allocate the memory of a copy now: as much as the state takes once the optimizer has
        made a step."""
        if is_writer(self._engine):
            self._snapshot.reserve(
                tensor for kind in writes(self._engine) for tensor in kind.memory()
            )

    def start(self, val_loss: float | None = None, *, beside: bool = True) -> None:
        """Begin to save the engine, whose pipeline must be drained. Waits for a save that is still
        under way.

        Args:
            val_loss: Validation loss of this step, if known.
            beside: Let training continue at once, while a copy is written. Else it must wait for
                `settle`.

        Collectives: on all ranks of the grid.

        Raises:
            CheckpointError: On all ranks, for this save or the last one.
        """
        self.settle()
        engine = self._engine
        grid = self._engine.grid
        part = Part.of(engine) if is_writer(engine) else None
        states = list(map(TrainingState.of, gather_objects(engine.state_meta(), grid.site)))
        self._num_bytes = sum(gather_objects(part.num_bytes if part else 0, grid.world))
        self._step = states[0].batches_done
        aside = self._begin(self._step)
        finish = partial(self._publish, aside, states, val_loss, time.monotonic())
        note = Note(self._flight, self._step, engine.config.faults.save_timeout_s)
        task = Task(aside, finish if grid.rank == 0 else None, note, gives_way=beside)
        if part is not None:
            take = self._snapshot.begin(part.tensors) if beside else partial(dict, part.tensors)
            check = (
                partial(part.check, aside, flight=self._flight)
                if engine.config.checkpoint.read_back
                else None
            )
            task.writes(take, self._wrap(partial(part.write, aside, flight=self._flight)), check)
        task.start()
        engine.state.hold(task.copied.wait)
        self._task = task

    def _who(self) -> str:
        grid = self._engine.grid
        return grid.describe(self._engine.job.shape.stages_of(grid.pp.rank))

    def _begin(self, step: int) -> Path:
        """Return the folder to write into: the first rank's, under this rank's run.dir."""
        grid = self._engine.grid
        aside = None
        failure = ""
        if grid.rank == 0:
            try:
                aside = begin(self._root, step, self._num_bytes).name
            except OSError as error:
                failure = explain(error, self._who(), self._num_bytes)
        aside, failure = gather_objects((aside, failure), grid.world)[0]
        if aside is None:
            raise CheckpointError(failure)
        return self._root / aside

    def _publish(
        self,
        aside: Path,
        states: Sequence[TrainingState],
        val_loss: float | None,
        began: float,
        given_up: Event,
    ) -> Path:
        """Turn the files of all ranks into a checkpoint; on rank 0, in its thread."""
        config = self._engine.config
        with Waiting(self._flight, "files", "world"):
            written = handover.collect(aside, config, given_up)
        manifest = make_manifest(config, self._corpus, states[0], written, val_loss, states[1:])
        if moved := move_misnamed(self._root, manifest.step):
            self._say(moved)
        folder = publish(aside, manifest)
        self._say(
            f"step {states[0].batches_done}: saved {folder} ({_size(self._num_bytes)} in "
            f"{time.monotonic() - began:.2g} s)"
        )
        prune(self._root, states[0].batches_done, config.checkpoint)
        return folder

    def settle(self, *, wait: bool = True) -> Path | None:
        """End the save under way and return its folder. Return None if there is no save or, without
        `wait`, it has not finished.

        After a failure nothing is left of the save, and earlier checkpoints stay.
        Collectives: on all ranks of the grid.

        Raises:
            CheckpointError: On all ranks, if any could not write.
            NotFiniteError: With the step, if any rank's state has NaN or infinity.
        """
        if (task := self._task) is None:
            return None
        grid = self._engine.grid
        while True:
            if wait:
                task.join(_TURN_S)
            mine = (
                task.is_alive(),
                task.failure(self._who(), self._num_bytes),
                task.not_finite,
                task.folder,
            )
            everyone = gather_objects(mine, grid.world)
            failures = [text for _, text, _, _ in everyone if text]
            if not any(alive for alive, *_ in everyone):
                break
            if failures:
                task.given_up.set()
            elif not wait:
                return None
            wait = True
        self._task = None
        if failures:
            if grid.rank == 0:
                discard(task.aside)
            if not_finite := [tensor for _, _, tensor, _ in everyone if tensor]:
                raise NotFiniteError(not_finite[0], self._step)
            raise CheckpointError(failures[0]) from task.error
        if (folder := everyone[0][3]) is not None:
            self._on_save(folder)
        return folder

    def val_loss_of(self, step: int) -> float | None:
        """Return the validation loss in the checkpoint of a step; None if there is none."""
        try:
            return read_manifest(folder_of(self._root, step)).val_loss
        except CheckpointError:
            return None

    def add_val_loss(self, step: int, val_loss: float) -> None:
        """Add the validation loss to the newest checkpoint, which must be for this step, and prune
        as if it had been there.

        For one process, while no save is under way. A loss that is not finite is not added. A
        failure is only reported.
        """
        if not isfinite(val_loss):
            return
        try:
            add_val_loss(folder_of(self._root, step), val_loss)
        except CheckpointError as error:
            self._say(
                f"{error}; the validation loss of step {step} does not count for "
                "checkpoint.keep_best yet, and "
                "the next start from this checkpoint adds it"
            )
            return
        prune(self._root, step, self._engine.config.checkpoint)

    def close(self) -> None:
        """Give a save under way some seconds to finish after training has failed. No
        collectives."""
        if self._task is not None:
            self._task.join(_GRACE_S)


def _size(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def make_manifest(
    config: Config,
    corpus: str,
    state: TrainingState,
    written: Iterable[Written],
    val_loss: float | None = None,
    other_sites: Iterable[TrainingState] = (),
) -> Manifest:
    """Return the table of contents of files that are all written. `state`: any rank's, or the
    first site's if there are several."""
    shards, versions = zip(*written, strict=True)
    common = set.intersection(*map(set, versions))
    known = val_loss is not None and isfinite(val_loss)
    state, *others = (
        replace(state, versions=tuple(sorted(common))) for state in (state, *other_sites)
    )
    return Manifest(config, corpus, state, shards, val_loss if known else None, tuple(others))


def save_weights(
    root: Path,
    config: Config,
    weights: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    read: Callable[[str], Tensor] | None = None,
) -> Path:
    """Save the full weights of an imported model under `root` as a checkpoint of step 0, from one
    process; return its folder.

    For train.start_from, generate and export; it has no optimizer state to resume from.

    Args:
        read: Returns a weight by its name, if `weights` only have shapes and types. One weight at a
            time is in memory then.

    Raises:
        CheckpointError: It cannot be written.
    """
    tensors = {WeightVersions.key(name, "0"): tensor for name, tensor in weights.items()}
    names = {id(tensor): name for name, tensor in weights.items()}
    part = Part(
        saved_place(config),
        (0, config.model.num_blocks),
        (0,),
        tensors,
        header_of(placements, {}),
        (lambda tensor: tensor) if read is None else (lambda tensor: read(names[id(tensor)])),
    )
    try:
        aside = begin(root, 0, part.num_bytes)
        return publish(
            aside, make_manifest(config, "", TrainingState(0, (0,)), [part.write(aside)])
        )
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written to ({error})") from None
