"""Writes checkpoints: shards side by side, then the manifest, then one rename that makes them all
appear.

    this rank, drained   begin | copy ............. | write its file, sync | leave a note
    rank 0 in addition                                                     | all notes there? manifest, rename, prune
    training                   | forward, backward, update, forward ............

All but `begin` runs in a thread without collectives, whether training goes on meanwhile or waits
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
from hybridpar.checkpoint.handover import Written
from hybridpar.checkpoint.manifest import (
    Manifest,
    TrainingState,
    add_val_loss,
    read_manifest,
    saved_place,
)
from hybridpar.checkpoint.part import Part, Trainee, is_writer, writes
from hybridpar.checkpoint.shards import header_of
from hybridpar.checkpoint.snapshot import Snapshot
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.flight import NO_FLIGHT, Flight, Waiting
from hybridpar.nn.placement import Placement
from hybridpar.state.kinds import WeightVersions

_TURN_S = (
    1.0  # ranks that wait for each other's files meet so often: no collective runs into its timeout
)
_GRACE_S = 10.0


def save(root: Path, engine: Trainee, corpus: str, val_loss: float | None = None) -> Path:
    """Saves `engine` (its pipeline drained) under `root`, removes what config.checkpoint does not
    keep; its folder.

    `corpus`: fingerprint of the data stream. `val_loss`: that of this step, if it was evaluated.
    Collectives: on all ranks of the grid.
    Raises: CheckpointError, on all ranks, if any cannot write; NotFiniteError if the state of any
        is not finite.
    """
    saver = Saver(root, engine, corpus)
    saver.start(val_loss, beside=False)
    folder = saver.settle()
    assert folder is not None
    return folder


class Saver:
    """Saves an engine under `root`, one checkpoint at a time, also while it trains on.

    `say`: told of each one that has been published, on rank 0, from another thread. `flight`: where
    this rank's thread that writes notes what it does.
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
        """Takes the memory of a copy now: as much as the state has once the optimizer has made a
        step."""
        if is_writer(self._engine):
            self._snapshot.reserve(
                tensor for kind in writes(self._engine) for tensor in kind.memory()
            )

    def start(self, val_loss: float | None = None, *, beside: bool = True) -> None:
        """Begins to save the engine, its pipeline drained. A save that is under way is waited for.

        `beside`: training may go on at once, as a copy is written. Else it must wait for `settle`.
        Collectives: on all ranks of the grid. Raises: CheckpointError, on all ranks, for this save
            or the last one.
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
        """The folder to write into: the first rank's, as this rank's own run.dir names it."""
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
        """Makes the files of all ranks a checkpoint; on rank 0, in its thread."""
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
        """Ends the save under way; its folder, or None where there is none or, without `wait`, it
        is not over.

        Collectives: on all ranks of the grid. Raises: CheckpointError, on all ranks, if any could
            not write;
        NotFiniteError, with the step, if any found its state not to be finite. Nothing is left of
        the save then, and the checkpoints before stay.
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
        """Return the validation loss that the checkpoint of a step has; None without one, or
        without a checkpoint."""
        try:
            return read_manifest(folder_of(self._root, step)).val_loss
        except CheckpointError:
            return None

    def add_val_loss(self, step: int, val_loss: float) -> None:
        """Add the validation loss to the newest checkpoint, which is of this step, and prune as if
        it had been there.

        It is for one process, while no save is under way. A loss that is not finite is not added. A
        failure is said.
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
        """Gives a save under way some seconds to end, where training has failed. No collectives."""
        if self._task is not None:
            self._task.join(_GRACE_S)


def _size(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def make_manifest(
    config: Config,
    corpus: str,
    state: TrainingState,
    written: Iterable[Written],
    val_loss: float | None = None,
    other_sites: Iterable[TrainingState] = (),
) -> Manifest:
    """Table of contents of files that are all written; `state`: of any rank, of the first site if
    there are others."""
    shards, versions = zip(*written, strict=True)
    common = set.intersection(*map(set, versions))
    known = val_loss is not None and isfinite(val_loss)
    state, *others = (
        replace(state, versions=tuple(sorted(common))) for state in (state, *other_sites)
    )
    return Manifest(config, corpus, state, shards, val_loss if known else None, tuple(others))


def save_weights(
    root: Path, config: Config, weights: Mapping[str, Tensor], placements: Mapping[str, Placement]
) -> Path:
    """Saves a whole model of another origin under `root` as a checkpoint of step 0, of one process;
    its folder.

    It is for train.start_from, generate and export; there is no state of an optimizer to go on
    from.
    Raises: CheckpointError if it cannot be written.
    """
    tensors = {WeightVersions.key(name, "0"): tensor for name, tensor in weights.items()}
    part = Part(
        saved_place(config), (0, config.model.num_blocks), (0,), tensors, header_of(placements, {})
    )
    try:
        aside = begin(root, 0, part.num_bytes)
        return publish(
            aside, make_manifest(config, "", TrainingState(0, (0,)), [part.write(aside)])
        )
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written to ({error})") from None
