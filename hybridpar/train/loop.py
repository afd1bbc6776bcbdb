"""`hybridpar train`: from a configuration to a run folder, with logs, evaluations, checkpoints and resuming.

    step   0 ............. eval ............. eval+save ......... save ........ num_steps
           eval   one engine.train call     one call          one call        eval, save, pictures, sample

Between two marks the pipeline never drains. Everything that can be wrong is found before there is a process group.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from hybridpar import checkpoint
from hybridpar.comm import all_reduce
from hybridpar.config import Config, Launch
from hybridpar.data import BatchLoader, Data, open_data
from hybridpar.errors import HybridparError
from hybridpar.grid import ProcessGrid
from hybridpar.models.cost import training_flops_per_token
from hybridpar.pipeline.plan.draw import draw_svg
from hybridpar.train import folder as run_folder
from hybridpar.train import trace
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.failure import describe_failure
from hybridpar.train.launch import Job, choose_device, set_threads
from hybridpar.train.metrics import BatchClock, MetricsLog, peak_flops, peak_memory_mb, read_metrics
from hybridpar.train.plot import TensorBoard, plot_loss
from hybridpar.train.preview import preview
from hybridpar.train.progress import Reporter, make_reporter
from hybridpar.train.stop import StopSignals
from hybridpar.validate import resolve

SAMPLE_PROMPT = {True: "def ", False: "The "}  # by whether the corpus is program text


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended. `stopped_by`: number of the signal that ended it early (0: none).

    `loss`, `val_loss`: the last ones of this call; None where it had none.
    """

    folder: Path
    step: int
    num_steps: int
    resumed_from: int
    loss: float | None
    val_loss: float | None
    stopped_by: int = 0

    @property
    def exit_code(self) -> int:
        return 128 + self.stopped_by if self.stopped_by else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True, "run": str(self.folder), "step": self.step, "num_steps": self.num_steps,
            "resumed_from": self.resumed_from, "loss": self.loss, "val_loss": self.val_loss,
            "stopped_by": signal.Signals(self.stopped_by).name if self.stopped_by else None,
        }


def train(config: Config, launch: Launch) -> Outcome:
    """Trains as `config` says in the job that this process belongs to, from the last checkpoint if there is one.

    Collectives: to be called by all processes of the job.
    Raises: ConfigError, DataError, CheckpointError or HybridparError on all processes alike, nothing overwritten;
    RankError where training fails on this one.
    """
    config = resolve(config, launch.world_size)
    device = choose_device(config.train.device, launch)
    threads = set_threads(config.train.threads, launch)
    job = Job.connect(launch)
    folder = config.run.folder
    saved, changed = job.decide(lambda: run_folder.find_run(config))
    if saved >= config.train.num_steps:
        if launch.rank == 0:
            print(f"{folder}: finished, {saved} steps are done; raise train.num_steps to go on", file=sys.stderr)
        return Outcome(folder, saved, config.train.num_steps, saved, None, None)
    with contextlib.ExitStack() as stack:
        job.together(lambda: stack.enter_context(run_folder.in_use(folder)), here=launch.rank == 0)
        data = _open_data(config, job)
        job.together(lambda: run_folder.begin(config, data.tokenizer and data.tokenizer.to_json()), here=launch.rank == 0)
        reporter = stack.enter_context(make_reporter(launch.rank, config.train.num_steps))
        for line in changed:
            reporter.say(f"since the last time: {line}")
        job.start_group(device, config.train.timeout_s)
        outcome = _train_on_grid(config, data, device, threads, reporter)
        job.end_group()
        if launch.rank == 0 and config.model.kind == "gpt" and data.tokenizer is not None and not outcome.stopped_by:
            _sample(config, reporter)
    return outcome


def _open_data(config: Config, job: Job) -> Data:
    """Lets the first process of each machine prepare the corpus, then opens it on the others."""
    quiet = job.launch.rank != 0
    cache = Path(config.data.cache) if config.data.cache else Path(config.run.dir) / "data"

    def open_() -> Data:
        return open_data(config.model, config.data, cache, seed=config.train.seed, quiet=quiet)

    first = job.launch.local_rank == 0
    prepared = job.together(open_, here=first)
    data = job.together(open_, here=not first)
    opened = prepared or data
    assert opened is not None
    return opened


def _train_on_grid(config: Config, data: Data, device: torch.device, threads: int, reporter: Reporter) -> Outcome:
    """Raises: RankError, naming this rank, for whatever goes wrong from here on."""
    parallel = config.parallel
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, device_type=device.type)
    try:
        engine = Engine(config, grid, device)
        resumed = checkpoint.resume(config.run.folder / run_folder.CHECKPOINTS, engine, data.train.fingerprint, reporter.say)
    except HybridparError:
        raise  # the same on all ranks
    except Exception as error:
        raise describe_failure(error, grid) from error
    with contextlib.ExitStack() as stack:
        try:
            run = Run(config, engine, data, reporter, resumed)
            stack.enter_context(contextlib.closing(run))
            reporter.say(
                f"{config.run.folder}: {config.model.kind} on tp={parallel.tp} pp={parallel.pp} dp={parallel.dp}, schedule "
                f"{config.pipeline.schedule}, {config.train.dtype}, {device.type}, {threads} threads a process; "
                + (f"resuming after step {resumed}" if resumed else "starting"))
            return run.go()
        except Exception as error:
            raise describe_failure(error, grid) from error


class Run:
    """The training of one job, from a step on. Collectives: every method is to be called on all ranks."""

    def __init__(self, config: Config, engine: Engine, data: Data, reporter: Reporter, resumed: int):
        self.config, self.engine, self.grid, self.reporter = config, engine, engine.grid, reporter
        self.folder, self.resumed = config.run.folder, resumed
        self.corpus = data.train.fingerprint
        self.clock = BatchClock(self._loader(data.train))
        self.valid_loader = None if data.valid is None else self._loader(data.valid)
        self.writes = self.grid.rank == 0
        self.metrics = MetricsLog(self.folder / run_folder.METRICS, resumed) if self.writes else None
        self.board = TensorBoard(self.folder / "tensorboard", resumed, enabled=self.writes)
        self.peak, source = peak_flops(config, engine.device, self.grid.world)
        self.flops_per_token = training_flops_per_token(config.model)
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.recorder: trace.Recorder | None = None
        self.traced = False
        reporter.say(
            f"MFU = tokens/s x {self.flops_per_token:,} FLOP/token (6 N + 12 L h s) / {self.peak / 1e9:,.0f} GFLOP/s ({source})")
        if self.writes:
            self._draw_plan()

    def _loader(self, samples: Any) -> BatchLoader:
        return BatchLoader(
            samples, micro_batch_size=self.config.train.micro_batch_size,
            num_microbatches=self.config.pipeline.num_microbatches, dp_rank=self.grid.dp.rank, dp_size=self.grid.dp.size)

    def close(self) -> None:
        self.board.close()
        if self.metrics is not None:
            self.metrics.__exit__(None, None, None)

    def _draw_plan(self) -> None:
        schedule, m = self.config.pipeline.schedule, self.config.pipeline.num_microbatches
        shown = preview(self.config, num_batches=max(1, ceil(12 / m)))
        title = f"{schedule}, {self.grid.pp.size} stages, {m} micro-batches a batch (simulated)"
        (self.folder / "plan.svg").write_text(draw_svg(shown.timeline, title=title), encoding="utf-8")

    def go(self) -> Outcome:
        """Trains to the end, or to a signal; saves and draws; says how it went."""
        settings, engine = self.config.train, self.engine
        signals = StopSignals(self._stop)
        with signals:
            if engine.batches_done == 0:
                self._evaluate()
            stopped_by, saved = 0, engine.batches_done
            while engine.batches_done < settings.num_steps and not stopped_by:
                stop = self._next_mark(engine.batches_done)
                self._train_until(stop)
                stopped_by = self._agree(signals.number)
                done = engine.batches_done
                if not stopped_by or done == settings.num_steps:
                    self._evaluate()
                if stopped_by or done == settings.num_steps or (settings.save_interval and done % settings.save_interval == 0):
                    self._save()
                    saved = done
            assert saved == engine.batches_done
        if engine.batches_done == settings.num_steps:
            stopped_by = 0  # it came too late to stop anything
        self._finish(stopped_by)
        return Outcome(self.folder, engine.batches_done, settings.num_steps, self.resumed, self.loss, self.val_loss, stopped_by)

    def _next_mark(self, step: int) -> int:
        """The next step at which the pipeline drains."""
        settings = self.config.train
        intervals = [n for n in (settings.eval_interval, settings.save_interval) if n]
        return min([settings.num_steps, *((step // n + 1) * n for n in intervals)])

    def _train_until(self, stop: int) -> None:
        engine = self.engine
        num_batches = stop - engine.batches_done
        # a stretch with a steady state; the last one must do where all are shorter
        trace_now = not self.traced and (num_batches > trace.WARMUP + trace.BATCHES or stop == self.config.train.num_steps)
        if trace_now:
            self.recorder = trace.Recorder(engine.executor, engine.batches_done, num_batches)
        engine.train(self.clock, num_batches, self._on_step)
        self.clock.stop()
        if self.recorder is not None:
            self.recorder.close()
            self._write_trace(self.recorder)
            self.recorder, self.traced = None, True

    def _on_step(self, result: StepResult) -> None:
        seconds = self.clock.seconds(result.step - 1)
        if self.recorder is not None:
            self.recorder.after_step(result.step)
        self.loss = result.loss
        if self.metrics is None or (result.step % self.config.train.log_interval and result.step != self.config.train.num_steps):
            return
        row = self._row(result, seconds)
        self.metrics.write(row)
        self.board.write(row)
        self.reporter.step(row)

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        tokens = self.config.batch_tokens
        row: dict[str, Any] = {
            "step": result.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
            "tokens_per_s": tokens / seconds, "step_ms": 1e3 * seconds, "consumed_tokens": result.step * tokens,
            "mfu": tokens / seconds * self.flops_per_token / self.peak, "memory_mb": peak_memory_mb(self.engine.device),
        }
        if len(result.losses) > 1:
            row["losses"] = result.losses
        if self.engine.scaler.dynamic:
            row["loss_scale"] = result.loss_scale
        if result.skipped:
            row["skipped"] = True
        return row

    def _evaluate(self) -> None:
        settings, step = self.config.train, self.engine.batches_done
        if not settings.eval_interval or (step % settings.eval_interval and step != settings.num_steps):
            return
        assert self.valid_loader is not None, "validate.py wants data.split > 0 with evaluations"
        losses = self.engine.evaluate(self.valid_loader, settings.eval_batches)
        self.val_loss = sum(losses.values())
        if self.metrics is not None:
            row: dict[str, Any] = {"step": step, "val_loss": self.val_loss}
            self.metrics.write(row | ({"val_losses": losses} if len(losses) > 1 else {}))
            self.board.write(row)
            self.reporter.evaluation(step, self.val_loss)

    def _save(self) -> None:
        where = checkpoint.save(self.folder / run_folder.CHECKPOINTS, self.engine, self.corpus)
        self.reporter.say(f"step {self.engine.batches_done}: saved {where}")

    def _stop(self, number: int) -> None:
        self.engine.stop_requested = True
        self.reporter.say(f"{signal.Signals(number).name}: finishing the batches under way, then saving; again to quit at once")

    def _agree(self, number: int) -> int:
        """The signal that any rank has got (0: none): all leave together, for the same reason."""
        seen = torch.tensor([number], dtype=torch.int64, device=self.engine.device)
        return int(all_reduce(seen, self.grid.world, "max"))

    def _write_trace(self, recorder: trace.Recorder) -> None:
        ranks = trace.gather(recorder, self.grid)
        if self.writes and any(rank.events for rank in ranks):
            trace.write_trace(ranks, self.folder / "trace.json")
            title = f"{self.config.pipeline.schedule} as it ran (milliseconds)"
            (self.folder / "executed.svg").write_text(trace.draw_executed(ranks, title), encoding="utf-8")

    def _finish(self, stopped_by: int) -> None:
        if not self.writes:
            return
        drawn = plot_loss(read_metrics(self.folder / run_folder.METRICS), self.folder / "loss.png", self.config.run.name)
        if not drawn:
            self.reporter.say("no loss.png: matplotlib is not installed (pip install 'hybridpar[plot]')")
        if stopped_by:
            self.reporter.say(f"stopped after step {self.engine.batches_done}; the same command goes on from there")


def _sample(config: Config, reporter: Reporter) -> None:
    """Writes text from the checkpoint just saved."""
    from hybridpar.train.generate import Generator, Sampling

    folder = config.run.folder
    prompt = SAMPLE_PROMPT["stdlib" in config.data.corpus]
    text = prompt + "".join(Generator.load(folder, reporter.say).generate(prompt, Sampling()))
    (folder / "sample.txt").write_text(text, encoding="utf-8")
    reporter.say(f"{folder / 'sample.txt'}:\n{text}")
