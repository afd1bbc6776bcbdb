"""Handle a run's anomalies, on all ranks alike, once the pipeline has drained.

step b is an anomaly   skip: nothing more     roll_back: load the newest checkpoint before b, resume at b + 1
a save of step b has   roll_back: the same, once for each checkpoint; otherwise stop
numbers that are
not finite
replicas differ        roll_back: load the newest checkpoint, resume with the same batches
                       stop: AnomalyError
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridpar import checkpoint
from hybridpar.checkpoint.format.files import write_text
from hybridpar.comm import gather_objects
from hybridpar.data import Samples
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.state import find_divergence
from hybridpar.train import folder as run_folder
from hybridpar.train.bundle import Bundle, content_hash
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.faults.anomalies import DIVERGENCE, STATE, Anomaly
from hybridpar.train.faults.errors import AnomalyError
from hybridpar.train.reporting.log import RunLog


class AnomalyHandler:
    """Record anomalies, write their replay bundles, and handle those with another policy than skip.

    Collectives: agree, audit, note_state and resolve, on all ranks of the grid.
    """

    def __init__(self, engine: Engine, samples: Samples, log: RunLog, say: Callable[[str], None]):
        self._engine = engine
        self._samples = samples
        self._log = log
        self._say = say
        self._folder = engine.config.run.folder
        self._checkpoints = self._folder / run_folder.CHECKPOINTS
        self._found: tuple[int, Anomaly] | None = None
        self._skipped: list[int] = []
        self._last_rollback = (0, 0)
        """Step of the last rollback's checkpoint, and step that training resumed after."""
        self._divergences = 0
        self._newest_when_refused: int | None = None
        """Step of the newest checkpoint when a state was last refused as not finite."""

    @property
    def is_open(self) -> bool:
        """Whether an anomaly is waiting for `resolve`."""
        return self._found is not None

    def note(self, result: StepResult) -> dict[str, Any]:
        """Record a step's anomaly, if any, and return what metrics.jsonl adds about it."""
        if result.skipped:
            self._skipped.append(result.step)
        if (anomaly := result.anomaly) is None:
            return {}
        if anomaly.policy != "skip":
            self._found = result.step, anomaly
        where = self._write(result, anomaly) if self._engine.grid.rank == 0 else ""
        self._say(
            f"step {result.step}: {anomaly.what}: {anomaly.policy.replace('_', ' ')}; hybridpar "
            f"replay {where}"
        )
        return {"anomaly": anomaly.kind, "policy": anomaly.policy}

    def _write(self, result: StepResult, anomaly: Anomaly) -> str:
        """Write the replay bundle of a step, on rank 0, and return its path."""
        engine = self._engine
        batch = result.step - 1
        size = engine.config.global_batch_size
        first = engine.data_start.position(batch, size)
        saved = next(
            (step for step in checkpoint.saved_steps(self._checkpoints) if step <= batch), None
        )
        start = saved or 0
        if saved == self._last_rollback[0]:
            start = max(start, self._last_rollback[1])
        bundle = Bundle(
            engine.config,
            result.step,
            result.losses,
            result.grad_norm,
            self._samples.fingerprint,
            saved,
            start,
            tuple(step for step in self._skipped if start < step < result.step),
            anomaly.kind,
            anomaly.what,
            anomaly.policy,
            result.lr,
            result.loss_scale,
            versions=engine.policy.versions_of(batch),
            stage_norms=result.stage_norms,
            samples=range(first, first + size),
        )
        bundle = replace(bundle, tokens=content_hash(self._samples, bundle.samples))
        self._log.put(bundle.name, lambda path: write_text(path, bundle.to_json()))
        return str(self._folder / bundle.name)

    def agree(self) -> None:
        """Adopt an anomaly of another site, so that all handle it. Collectives: over the sites."""
        found = [
            found
            for found in gather_objects(self._found, self._engine.grid.site)
            if found is not None
        ]
        self._found = next(iter(found), None)

    def audit(self) -> None:
        """Compare replicas; a difference is an anomaly."""
        state = self._engine.state
        if found := find_divergence(state.placed(), self._engine.grid, state.memory.read):
            settings = self._engine.config.anomalies
            self._divergences += 1
            too_many = 0 < settings.limit <= self._divergences
            policy = "stop" if too_many else settings.on_divergence
            what = f"replicas differ: {found}" + " again (anomalies.limit)" * too_many
            self._found = self._engine.batches_done, Anomaly(DIVERGENCE, what, policy)
            self._say(f"step {self._engine.batches_done}: {what}: {policy.replace('_', ' ')}")

    def note_state(self, error: NotFiniteError) -> None:
        """Record that a state is not finite and was not saved. It predates any other anomaly.

        The run rolls back if anomalies.on_non_finite says so, and if there is a checkpoint that it
        has not rolled back to for this reason: an update that is wrong for these weights would be
        wrong again.

        Collectives: one gather over the world.
        """
        config = self._engine.config
        root = self._checkpoints
        steps = gather_objects(checkpoint.saved_steps(root), self._engine.grid.world)[0]
        newest = next((step for step in steps if step < error.step), None)
        rolls_back = False
        if config.anomalies.on_non_finite == "roll_back":
            rolls_back = newest not in (None, self._newest_when_refused)
        self._newest_when_refused = newest
        rule = ""
        if config.optim.spec:
            rule = f"correct the update of optim.spec = {config.optim.spec!r}, or "
        rates = "optim.lr_points" if config.optim.lr_points else "optim.lr"
        what = (
            f"{error}, so that state is not saved: {rule}try a lower {rates} than "
            f"{config.optim.highest_lr:g}"
        )
        if config.train.dtype == "fp16":
            what += ', or train.dtype = "bf16", whose largest number is not 65504'
        self._found = error.step, Anomaly(STATE, what, "roll_back" if rolls_back else "stop")
        self._say(f"step {error.step}: {what}: {self._found[1].policy.replace('_', ' ')}")

    def resolve(self) -> dict[str, Any]:
        """Handle the anomaly, and return what metrics.jsonl records about it.

        No save may be in progress.

        Raises (on all ranks):
            AnomalyError: The policy is to stop.
            CheckpointError: There is no checkpoint to roll back to.
        """
        assert self._found is not None
        step, anomaly = self._found
        self._found = None
        saved = checkpoint.saved_steps(self._checkpoints)
        if anomaly.policy == "stop":
            newest = "there is no checkpoint"
            if saved:
                newest = f"the newest checkpoint is of step {saved[0]}"
            raise AnomalyError(f"step {step}: {anomaly.what}; stopped, {newest}")
        same_batches = anomaly.kind == DIVERGENCE
        up_to = step if same_batches else step - 1
        back = checkpoint.resume(
            self._checkpoints,
            self._engine,
            self._samples.fingerprint,
            self._say,
            up_to=up_to,
            go_on_at=0 if same_batches else step,
        )
        if back not in saved:
            raise CheckpointError(
                f"step {step}: {anomaly.what}; {self._checkpoints} has no checkpoint to roll "
                f"back to"
            )
        self._last_rollback = back, self._engine.batches_done
        self._skipped = [s for s in self._skipped if s > self._engine.batches_done]
        done = self._engine.batches_done
        last = self._engine.config.train.num_steps
        then = f"step {last} was the last, so training ends"
        if done < last:
            then = f"going on with step {done + 1}"
        self._say(f"rolled back to the checkpoint of step {back}; {then}")
        return {"anomaly": anomaly.kind, "rolled_back_to": back}
