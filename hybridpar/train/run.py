"""One stretch of training, from a step to the end or to a signal, with its evaluations, checkpoints, logs and pictures.

    step   0 ............. eval ............. eval+save ......... save ........ num_steps
           eval   one engine.train call     one call          one call        eval, save, pictures

Between two marks the pipeline never drains. A save goes on beside the next call; at the marks after it ranks agree on
whether it went well. The last one is waited for.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybridpar import checkpoint
from hybridpar.comm import all_reduce
from hybridpar.config import Config
from hybridpar.data import BatchLoader, Blend, Data
from hybridpar.flight import EVALUATING
from hybridpar.memory import MemoryWatch
from hybridpar.models.cost import training_flops_per_token, training_flops_rule
from hybridpar.pipeline.plan.svg import draw_svg
from hybridpar.train import folder as run_folder
from hybridpar.train import trace
from hybridpar.train.costs import RunCosts, describe, run_costs, write_costs
from hybridpar.train.differences import differences
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.log import RunLog
from hybridpar.train.metrics import BatchClock, peak_memory_mib, read_curves
from hybridpar.train.peak import Peak
from hybridpar.train.plot import can_plot, plot_loss
from hybridpar.train.preview import preview
from hybridpar.train.progress import Reporter
from hybridpar.train.saves import Saves
from hybridpar.train.stop import noting_signals
from hybridpar.train.trouble import Trouble

_DRAWN_MICROBATCHES = 12
_TRACED_STEPS = 5
"""A stretch of so many steps has a steady state."""


def mark_intervals(config: Config) -> list[int]:
    """At all multiples of these steps the pipeline drains."""
    intervals = config.train.eval_interval, config.train.save_interval, config.anomalies.audit_interval
    return [interval for interval in intervals if interval]


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended. `stopped_by`: number of the signal that ended it early (0: none).

    `loss`, `val_loss`: the last ones of this call; None where it had none.
    """

    folder: Path
    step: int
    num_steps: int
    resumed_from: int
    loss: float | None = None
    val_loss: float | None = None
    stopped_by: int = 0

    @property
    def exit_code(self) -> int:
        """0, or by custom 128 + the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.stopped_by if self.stopped_by else 0

    def as_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "ok": True, "run": str(self.folder), "step": self.step, "num_steps": self.num_steps,
            "resumed_from": self.resumed_from, "loss": self.loss, "val_loss": self.val_loss,
            "stopped_by": signal.Signals(self.stopped_by).name if self.stopped_by else None,
        }


class Run:
    """What a job does once its engine stands at step `resumed`. Collectives: go() and the constructor, on all ranks."""

    def __init__(self, engine: Engine, data: Data, reporter: Reporter, resumed: int, watch: MemoryWatch | None = None):
        config = engine.config
        self.config, self.engine, self.grid, self.reporter = config, engine, engine.grid, reporter
        self.folder, self.resumed, self.corpus = config.run.folder, resumed, data.train.fingerprint
        self.watch = watch
        self.train_loader = self._loader(data.train)
        self.train_loader.start = engine.data_start
        self.clock = BatchClock(self.train_loader if watch is None else watch.loader(self.train_loader))
        self.valid_loader = None if data.valid is None else self._loader(data.valid)
        self.writes = self.grid.rank == 0
        self.log = RunLog(self.folder, resumed, reporter, writes=self.writes)
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.evaluated = -1
        """The step of val_loss."""
        self.trouble = Trouble(engine, data.train, reporter, self.log)
        saving = run_folder.open_flight(config, self.grid.rank, run_folder.SAVING)
        self.saver = checkpoint.Saver(self.folder / run_folder.CHECKPOINTS, engine, self.corpus, reporter.say, saving)
        self.saves = Saves(self.saver, config.checkpoint.max_failed_saves, self.log.note)
        self.reserved = not config.saves_beside_training
        self.recorder: trace.Recorder | None = None
        self.traced = False
        self.costs: RunCosts | None = None
        self.step_seconds: list[float] = []
        self.flight, self.faults = self.grid.flight, config.faults
        self.warm = False
        """Whether a step was made: the first one may load, compile and connect for long."""
        self.flops_per_token = training_flops_per_token(config.model)
        self.peak = Peak.of(config, engine.device, self.grid.world, reporter.say, goes_on=resumed > 0)
        reporter.say(f"MFU = tokens/s x {self.flops_per_token:,} FLOP/token ({training_flops_rule(config.model)}) / "
                     f"{self.peak.flops / 1e9:,.0f} GFLOP/s ({self.peak.source})")
        if self.writes:
            self._draw_plan()

    def _loader(self, samples: Blend) -> BatchLoader:
        return BatchLoader(
            samples, micro_batch_size=self.config.train.micro_batch_size, dp_rank=self.grid.dp.rank,
            dp_size=self.grid.dp.size, num_microbatches=self.config.pipeline.num_microbatches)

    def close(self) -> None:
        """Closes the files. Where training has failed, a checkpoint that is nearly there may still come."""
        self.saver.close()
        self.log.close()

    def go(self) -> Outcome:
        """Trains to the end, or to a signal; saves and draws; says how it went."""
        engine, settings, end = self.engine, self.config.anomalies, self.config.train.num_steps
        stopped_by = 0
        with noting_signals(self.config.train.stop_signals, self._stop) as wish:
            if engine.batches_done == 0:
                self._evaluate()
                if settings.rolls_back:
                    self._save(last=True)
            while engine.batches_done < end and not stopped_by:
                self._train_until(self._next_mark(engine.batches_done))
                last = engine.batches_done == end
                stopped_by = 0 if last else self._agree(wish.number)
                last = last or bool(stopped_by)
                if not last:
                    self.saves.settle(wait=False)
                saves = last or self._is_multiple(self.config.train.save_interval)
                if settings.audit_interval and not self.trouble.is_open and (
                        saves or self._is_multiple(settings.audit_interval)):
                    self.trouble.audit()
                if self.trouble.is_open:
                    self._recover()
                    stopped_by, last = 0, engine.batches_done == end
                    if not last:
                        continue
                if not stopped_by:
                    self._evaluate()
                if saves or last:
                    self._save(last=last)
        self.flight.phase("ending", self.faults.start_timeout_s)
        if self.watch is not None:
            self.reporter.say(str(self.watch.compare(self.grid)))
        self._finish(stopped_by)
        return Outcome(self.folder, engine.batches_done, end, self.resumed, self.loss, self.val_loss, stopped_by)

    @property
    def _limit_s(self) -> float:
        """How long an action may take."""
        return self.faults.timeout_s if self.warm else self.faults.start_timeout_s

    def _is_multiple(self, interval: int) -> bool:
        return interval > 0 and self.engine.batches_done % interval == 0

    def _next_mark(self, step: int) -> int:
        """The next step at which the pipeline drains."""
        return min([self.config.train.num_steps, *((step // n + 1) * n for n in mark_intervals(self.config))])

    def _train_until(self, stop: int) -> None:
        engine = self.engine
        num_batches = stop - engine.batches_done
        self.flight.phase("training", self._limit_s)
        # a stretch with a steady state; the last one must do where all are shorter
        skip = max(engine.schedule.sync_steps - engine.batches_done, 0)
        least = _TRACED_STEPS if stop < self.config.train.num_steps else 1
        if not self.traced and num_batches - skip >= least:
            self.recorder = trace.Recorder(engine.executor, engine.batches_done, num_batches, skip=skip)
        engine.train(self.clock, num_batches, self._on_step)
        self.flight.phase("settling", self.faults.start_timeout_s)
        self.clock.stop()
        if self.recorder is not None:
            self.recorder.close()
            self._write_trace(self.recorder)
            self.recorder, self.traced = None, True

    def _on_step(self, result: StepResult) -> None:
        if not self.warm:
            self.warm = True
            self.flight.limit(self._limit_s)
        if not self.reserved:  # early, so that what is measured of memory has it
            self.saver.reserve()
            self.reserved = True
        if self.recorder is not None:
            self.recorder.after_step(result.step)
        if self.trouble.is_open:  # the batches that were under way will not count
            return
        notes = self.trouble.note(result)
        seconds = self.clock.seconds(result.step - 1)
        self.step_seconds.append(seconds)
        self.loss, settings = result.loss, self.config.train
        if not self.writes or (
                not notes and result.step % settings.log_interval and result.step != settings.num_steps):
            return
        row = self._row(result, seconds) | notes
        self.log.write(row)
        self.reporter.step(row)

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        tokens = self.config.batch_tokens
        row: dict[str, Any] = {
            "step": result.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
            "tokens_per_s": tokens / seconds, "step_ms": 1e3 * seconds, "consumed_tokens": self._consumed(result.step),
            "mfu": self.peak.share(tokens / seconds * self.flops_per_token),
            "memory_mib": peak_memory_mib(self.engine.device),
        }
        if len(result.losses) > 1:
            row["losses"] = result.losses
        if self.engine.policy.scaler.dynamic:
            row["loss_scale"] = result.loss_scale
        if result.skipped:
            row["skipped"] = True
        return row

    def _consumed(self, step: int) -> int:
        """Tokens of the batches up to a step."""
        return self.engine.data_start.consumed(step, self.config.global_batch_size) * self.config.model.seq_length

    def _evaluate(self) -> None:
        settings, step = self.config.train, self.engine.batches_done
        if not settings.eval_interval or not (self._is_multiple(settings.eval_interval) or step == settings.num_steps):
            return
        assert self.valid_loader is not None, "validate.py refuses evaluations of nothing"
        self.flight.phase(EVALUATING, self._limit_s)
        losses = self.engine.evaluate(self.valid_loader, settings.eval_batches)
        self.flight.phase("settling", self.faults.start_timeout_s)
        self.val_loss, self.evaluated = sum(losses.values()), step
        if self.writes:
            row: dict[str, Any] = {"step": step, "val_loss": self.val_loss}
            self.log.write(row, {"val_losses": losses} if len(losses) > 1 else {})
            self.reporter.evaluation(step, self.val_loss)

    def _recover(self) -> None:
        """Deals with an anomaly. Raises: AnomalyError, CheckpointError."""
        self.flight.phase("recovering", self.faults.start_timeout_s)
        self.saves.settle()
        notes = self.trouble.settle()
        self.train_loader.start = self.engine.data_start
        self.evaluated = -1
        self.log.cut_back(self.engine.batches_done)
        self.log.write({"step": self.engine.batches_done}, notes)

    def _save(self, *, last: bool) -> None:
        """`last`: what follows needs the checkpoint. Else training goes on, and it may take its time, or fail."""
        self.flight.phase("saving", self.faults.save_timeout_s)
        val_loss = self.val_loss if self.evaluated == self.engine.batches_done else None
        if last:
            self.saves.insist(val_loss)
        else:
            self.saves.start(val_loss, beside=self.config.checkpoint.asynchronous)

    def _stop(self, number: int) -> None:
        self.engine.stop_requested = True
        self.reporter.say(f"{signal.Signals(number).name}: finishing the batches under way, then saving; "
                          "again after a second to quit at once")

    def _agree(self, number: int) -> int:
        """The signal that any rank has got (0: none): all leave together, for the same reason."""
        seen = torch.tensor([number], dtype=torch.int64, device=self.engine.device)
        return int(all_reduce(seen, self.grid.world, "max"))

    def _draw_plan(self) -> None:
        schedule, m = self.config.pipeline.schedule, self.config.pipeline.num_microbatches
        shown = preview(self.config, ceil(_DRAWN_MICROBATCHES / m))
        title = f"{schedule}, {len(self.engine.split)} stages, {m} micro-batches a batch (simulated)"
        self.log.draw("plan.svg", lambda: draw_svg(shown.timeline, title=title))

    def _write_trace(self, recorder: trace.Recorder) -> None:
        ranks = trace.gather(recorder, self.grid)
        if not self.writes or not any(rank.events for rank in ranks):
            return
        shown, gathers = trace.last_batches(ranks, trace.SHOWN), self.engine.state.partition.is_sharded
        self.log.put("trace.json", lambda path: trace.write_trace(shown, path, gathers=gathers))
        title = f"{self.config.pipeline.schedule} as it ran"
        self.log.draw("executed.svg", lambda: trace.draw_executed(shown, title))
        self.costs = costs = run_costs(self.config, ranks)
        if costs is not None:
            self.log.put(run_folder.COSTS, lambda path: write_costs(costs, path))

    def _finish(self, stopped_by: int) -> None:
        if not self.writes:
            return
        few = f"no {run_folder.COSTS}: that takes {_TRACED_STEPS} steps in a row without an evaluation or a checkpoint"
        if self.config.plan.step_ms and len(self.step_seconds) >= _TRACED_STEPS:
            planned, took = self.config.plan.step_ms, 1e3 * median(self.step_seconds)
            taken = round(100 * self.config.plan.cores_taken)
            busy = f"; other programs took {taken} % of the cores while it was measured" if taken else ""
            self.reporter.say(f"plan: a step takes {took:.4g} ms (median of {len(self.step_seconds)}), "
                              f"{planned:.4g} ms predicted ({100 * (planned / took - 1):+.1f} %){busy}")
        for line in [few] * self.traced if self.costs is None else [
                *describe(self.costs), *differences(self.config, self.costs)]:
            self.reporter.say(line)
        self.log.finish()
        rows, name = read_curves(self.folder / run_folder.METRICS), self.config.run.name
        if can_plot():
            self.log.put("loss.png", lambda path: plot_loss(rows, path, name))
        else:
            self.reporter.say("no loss.png: matplotlib is not installed (pip install 'hybridpar[plot]')")
        if stopped_by:
            self.reporter.say(f"stopped after step {self.engine.batches_done}; the same command goes on from there")
