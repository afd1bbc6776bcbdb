"""Train from one step to the end of the run or to a signal, with evaluations and checkpoints.

    step   0 ............. eval ............. eval+save ......... save ........ num_steps
           eval   one engine.train call     one call          one call        eval, save, pictures

The pipeline never drains between two marks. A save runs in the background of the next call; at the
marks after it the ranks agree on whether it succeeded. The last save is waited for.
reporting/run_report.py writes the metrics and the progress lines.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridpar import checkpoint
from hybridpar.comm import all_reduce, gather_objects
from hybridpar.config import Config
from hybridpar.config.row_names import valid_name
from hybridpar.data import Data
from hybridpar.errors import NotFiniteError
from hybridpar.flight import EVALUATING, Flight
from hybridpar.prediction import MemoryWatch
from hybridpar.train import folder as run_folder
from hybridpar.train.callbacks import SILENT, CallbackRunner, Callbacks
from hybridpar.train.early_stopping import EarlyStopping
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.evaluation import Evaluator, as_told, batch_loader, row_of
from hybridpar.train.faults.errors import CallbackError
from hybridpar.train.faults.rollback import AnomalyHandler
from hybridpar.train.faults.watchdog import SAVING
from hybridpar.train.reporting.run_metrics import BatchClock, History
from hybridpar.train.reporting.run_report import RunReport, is_evaluated
from hybridpar.train.saves import Saves
from hybridpar.train.stop import StopReason, noting_signals

if TYPE_CHECKING:
    from hybridpar.memory_behaviour.recording.memory_trace import MemoryLog


def mark_intervals(config: Config) -> list[int]:
    """Return the intervals, in steps, at whose multiples the pipeline drains."""
    intervals = (
        config.train.eval_interval,
        config.train.save_interval,
        config.anomalies.audit_interval,
    )
    return [interval for interval in intervals if interval]


@dataclass(frozen=True)
class Outcome:
    """Result of a call of `train`.

    Attributes:
        resumed_from: Step of the checkpoint that the call resumed from.
        loss: The last training loss of this call; None if it trained no step.
        val_loss: The last validation loss of this call; None if it evaluated nothing.
        stopped_by: Number of the signal that ended the call early; 0 if none did.
        asked_to_stop: Whether a callback returned STOP, the program called `request_stop`, or
            train.stop_patience is over.
    """

    folder: Path
    step: int
    num_steps: int
    resumed_from: int
    loss: float | None = None
    val_loss: float | None = None
    stopped_by: int = 0
    asked_to_stop: bool = False
    _metrics: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_metrics", Path(self.folder).absolute() / run_folder.METRICS)

    @cached_property
    def history(self) -> History:
        """The losses and evaluations of the whole run, read from its folder on first access."""
        return History.read(self._metrics)

    @property
    def exit_code(self) -> int:
        """Exit code by shell convention: 0, or 128 + the signal (130 Ctrl-C, 143 SIGTERM)."""
        return 128 + self.stopped_by if self.stopped_by else 0

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        stopped_by = None
        if self.stopped_by:
            stopped_by = signal.Signals(self.stopped_by).name
        elif self.asked_to_stop:
            stopped_by = "program"
        return {
            "ok": True,
            "run": str(self.folder),
            "step": self.step,
            "num_steps": self.num_steps,
            "resumed_from": self.resumed_from,
            "loss": self.loss,
            "val_loss": self.val_loss,
            "stopped_by": stopped_by,
        }


class Run:
    """Training of a job from the step that its engine stands at.

    Args:
        watch: Measures memory; None: it is not measured.

    Collectives: `go` and the constructor, on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        data: Data,
        report: RunReport,
        watch: MemoryWatch | None = None,
        callbacks: Callbacks = SILENT,
    ):
        config = self.config = engine.config
        self.callbacks = CallbackRunner(callbacks, engine.request_stop)
        self.engine = engine
        self.grid = engine.grid
        self.report = report
        self.reporter = report.reporter
        self.watch = watch
        self.train_loader = batch_loader(engine, data.train)
        self.train_loader.start_at(engine.data_start)
        loader = self.train_loader if watch is None else watch.loader(self.train_loader)
        self.memory: MemoryLog | None = None
        if config.train.record_memory:
            from hybridpar.memory_behaviour.recording.memory_trace import MemoryLog

            self.memory = MemoryLog(engine, report.resumed, self.reporter.say)
        self.clock = BatchClock(loader if self.memory is None else self.memory.loader(loader))
        self.evaluator = Evaluator(engine, data.valid, data.tokenizer)
        self.early_stopping = EarlyStopping(config, self._past_evaluations())
        self.anomalies = AnomalyHandler(engine, data.train, report.log, self.reporter.say)
        self.saving = Flight()
        run_folder.open_flight(engine.job, self.grid.rank, self.saving, SAVING)
        self.saver = checkpoint.Saver(
            config.run.folder / run_folder.CHECKPOINTS,
            engine,
            data.train.fingerprint,
            self.reporter.say,
            self.saving,
            self.callbacks.on_save,
        )
        self.saves = Saves(self.saver, config.checkpoint.max_failed_saves, report.log.note)
        self.reserved = not config.saves_beside_training
        self.evaluated: tuple[int, float] | None = None
        """Step of the last evaluation, and the validation loss that compares checkpoints."""
        self.flight = self.grid.flight
        self.faults = config.faults
        self.warm = False
        """Whether a step is done: the first may load, compile and connect for long."""

    def close(self) -> None:
        """Close the files; after a failure a save that is nearly complete may still finish."""
        self.saver.close()
        self.saving.leave()
        if self.memory is not None:
            self.memory.close()
        self.report.log.close()

    def go(self) -> Outcome:
        """Train to the end or a stop request; save, plot and report. Raises: CallbackError."""
        engine = self.engine
        end = self.config.train.num_steps
        alone = self.grid.world.size == 1
        with noting_signals(self.config.train.stop_signals, self._on_signal, alone) as request:
            if engine.batches_done == 0:
                self._evaluate()
                if self.config.anomalies.rolls_back:
                    self._save(last=True)
                    if self.anomalies.is_open:
                        self._recover()
            else:
                self._make_up_evaluation()
            stop = self._agree(0)  # on_evaluation may have returned STOP, or the run be over
            if stop and engine.batches_done == 0:
                self._save(last=True)
            while engine.batches_done < end and not stop:
                self._train_until(self._next_mark(engine.batches_done))
                self.anomalies.agree()
                last = engine.batches_done == end
                stop = StopReason() if last else self._agree(request.number)
                last = last or bool(stop)
                if not last:
                    self._finish_save(wait=False)
                saves = last or self._is_multiple(self.config.train.save_interval)
                self._audit(saves)
                stop = self._end_stretch(stop, saves=saves, last=last)
        self.flight.phase("ending", self.faults.start_timeout_s)
        if self.watch is not None:
            compared = self.watch.compare(self.grid, self.engine.moves.peak)
            tell = self.reporter.say if self.config.train.measure_memory else self.reporter.detail
            tell(str(compared))
        self.report.finish(stop.code)
        self._raise_callback_errors()
        return Outcome(
            self.config.run.folder,
            engine.batches_done,
            end,
            self.report.resumed,
            self.report.loss,
            self.report.val_loss,
            stop.signal,
            stop.is_by_program,
        )

    def _end_stretch(self, stop: StopReason, *, saves: bool, last: bool) -> StopReason:
        """Evaluate and save if due, and handle anomalies, including one that the save found.

        The loop ends because each rollback goes to another checkpoint.

        Args:
            saves: Whether a save is due.
            last: Whether training ends here.

        Returns:
            The reason to end the run, possibly from on_evaluation; falsy if the run rolled back
            and resumes.
        """
        while True:
            if self.anomalies.is_open:
                self._recover()
                stop = StopReason()
                last = self.engine.batches_done == self.config.train.num_steps
                if not last:
                    return stop
            if not stop.signal:
                self._evaluate()
                if self._is_evaluation_due and not last:
                    stop = self._agree(0)
                    last = bool(stop)
                    if self.early_stopping.is_over:
                        self.reporter.say(str(self.early_stopping))
            if saves or last:
                self._save(last=last)
            if not self.anomalies.is_open:
                return stop

    def _raise_callback_errors(self) -> None:
        """Raise CallbackError on all ranks if a callback raised on any. Collectives: one gather."""
        errors = gather_objects(self.callbacks.error, self.grid.world)
        texts = {
            text: [rank for rank, other in enumerate(errors) if other == text]
            for text in errors
            if text
        }
        if not texts:
            return
        lines = [
            text if len(ranks) == len(errors) else f"rank {', '.join(map(str, ranks))}: {text}"
            for text, ranks in texts.items()
        ]
        raise CallbackError("\n".join(lines)) from self.callbacks.cause

    @property
    def _limit_s(self) -> float:
        """Time limit of an action, in seconds: longer until the first step is done."""
        return self.faults.timeout_s if self.warm else self.faults.start_timeout_s

    def _is_multiple(self, interval: int) -> bool:
        return interval > 0 and self.engine.batches_done % interval == 0

    def _next_mark(self, step: int) -> int:
        """Return the next step at which the pipeline drains."""
        return min(
            [
                self.config.train.num_steps,
                *((step // n + 1) * n for n in mark_intervals(self.config)),
            ]
        )

    def _train_until(self, stop: int) -> None:
        self.flight.phase("training", self._limit_s)
        self.report.begin_stretch(stop)
        with contextlib.nullcontext() if self.memory is None else self.memory.active():
            self.engine.train(self.clock, stop - self.engine.batches_done, self._on_step)
        self.flight.phase("settling", self.faults.start_timeout_s)
        self.clock.stop()
        self.report.end_stretch()

    def _on_step(self, result: StepResult) -> None:
        if not self.warm:
            self.warm = True
            self.flight.limit(self._limit_s)
            self.grid.wait_at_most(self.config.longest_wait_s)
        if not self.reserved:  # in the first step, so that measured memory includes it
            self.saver.reserve()
            self.reserved = True
        self.report.after_update(result.step)
        if self.memory is not None:
            self.memory.after_step(result.step)
        if not self.anomalies.is_open:  # a rollback discards the batches after an anomaly
            notes = self.anomalies.note(result)
            if result.site_status:
                notes = notes | result.site_status.notes()
            self.report.step(result, self.clock.seconds(result.step - 1), notes)
            self.callbacks.on_step(result)

    def _audit(self, saves: bool) -> None:
        """Compare replicas at multiples of the interval, and before every save."""
        interval = self.config.anomalies.audit_interval
        if interval and not self.anomalies.is_open and (saves or self._is_multiple(interval)):
            self.anomalies.audit()

    @property
    def _is_evaluation_due(self) -> bool:
        return is_evaluated(self.config, self.engine.batches_done)

    def _make_up_evaluation(self) -> None:
        """Evaluate the step that the run resumes from, if a signal stopped it before evaluating.

        The validation loss is recorded in two places, first a row of metrics.jsonl and then the
        checkpoint's manifest. After a kill between the two it is copied from the row, without
        another evaluation. Then checkpoints are pruned as if the checkpoint had been saved with
        its validation loss.

        Collectives: one gather, and an evaluation, on all ranks.
        """
        if not self._is_evaluation_due:
            return
        step = self.engine.batches_done
        saved, row = gather_objects(self._recorded_losses(step), self.grid.world)[0]
        if saved is not None:
            self.evaluated = step, saved
            return
        if row is None:
            self._evaluate()
        else:
            self.evaluated = step, row
        if self.evaluated is not None and self.grid.rank == 0:
            self.saver.add_val_loss(*self.evaluated)

    def _past_evaluations(self) -> dict[int, dict[str, float]]:
        """Return the evaluations in metrics.jsonl up to the run's step. Collectives: one gather."""
        if not self.config.train.stop_patience:
            return {}
        found = self._evaluations() if self.grid.rank == 0 else {}
        past: dict[int, dict[str, float]] = gather_objects(found, self.grid.world)[0]
        return {step: past[step] for step in past if step <= self.engine.batches_done}

    def _evaluations(self) -> dict[int, dict[str, float]]:
        """Return the numbers of all evaluations in metrics.jsonl, by step and name."""
        return History.read(self.config.run.folder / run_folder.METRICS).validation

    def _recorded_losses(self, step: int) -> tuple[float | None, float | None]:
        """Return a step's validation losses in its manifest and metrics.jsonl, on rank 0."""
        if self.grid.rank != 0:
            return None, None
        numbers = self._evaluations().get(step, {})
        name = valid_name("loss", self.evaluator.best)
        return self.saver.val_loss_of(step), numbers.get(name)

    def _evaluate(self) -> None:
        if not self._is_evaluation_due:
            return
        step = self.engine.batches_done
        self.flight.phase(EVALUATING, self._limit_s)
        numbers = self.evaluator.evaluate()
        self.flight.phase("settling", self.faults.start_timeout_s)
        self.report.validation_sets(self.evaluator)
        if not numbers:
            return
        row = row_of(numbers, self.engine.loss_names)
        self.early_stopping.add(step, row)
        loss = row.get(valid_name("loss", self.evaluator.best))
        self.report.evaluation(step, numbers, row, loss)
        if loss is not None:
            self.evaluated = step, loss
        self.callbacks.on_evaluation(step, as_told(numbers))

    def _recover(self) -> None:
        """Handle an anomaly: skip, roll back, or raise. Raises: AnomalyError, CheckpointError."""
        self.flight.phase("recovering", self.faults.start_timeout_s)
        self._finish_save(wait=True)
        notes = self.anomalies.resolve()
        self.train_loader.start_at(self.engine.data_start)
        self.evaluated = None
        self.early_stopping.forget_after(self.engine.batches_done)
        self.report.log.cut_back(self.engine.batches_done)
        self.report.log.write({"step": self.engine.batches_done}, notes)

    def _save(self, *, last: bool) -> None:
        """Save a checkpoint, which the run needs if it is the last; others may fail."""
        self.flight.phase("saving", self.faults.save_timeout_s)
        step, val_loss = self.evaluated or (-1, None)
        if step != self.engine.batches_done:
            val_loss = None
        with self._noting_refused_states():
            if last:
                self.saves.insist(val_loss)
            else:
                self.saves.start(
                    val_loss,
                    beside=self.config.checkpoint.asynchronous
                    and not self.config.memory.is_limited,
                )

    def _finish_save(self, *, wait: bool) -> None:
        """Finish the save in progress; without `wait` only if it has completed."""
        with self._noting_refused_states():
            self.saves.finish(wait=wait)

    @contextlib.contextmanager
    def _noting_refused_states(self) -> Iterator[None]:
        """Turn a save that was refused because the state is not finite into an anomaly."""
        try:
            yield
        except NotFiniteError as error:
            self.anomalies.note_state(error)

    def _on_signal(self, number: int) -> None:
        self.engine.request_stop()
        self.reporter.say(
            f"{signal.Signals(number).name}: finishing the batches under way, then saving; "
            "again after a second to quit at once"
        )

    def _agree(self, number: int) -> StopReason:
        """Agree with all ranks on whether to stop, and why. number: this rank's signal, or 0."""
        wants_stop = self.callbacks.wants_stop or self.early_stopping.is_over
        mine = StopReason.of(number, by_program=wants_stop)
        seen = torch.tensor([mine.code], dtype=torch.int64, device=self.engine.device)
        return StopReason(int(all_reduce(seen, self.grid.world, "max")))
