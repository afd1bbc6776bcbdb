"""Report a run: plan and trace as drawings, numbers of each step, and a summary."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from statistics import median
from typing import Any

from hybridpar.comm import gather_objects
from hybridpar.config import UNCOMPRESSED, Config
from hybridpar.config.row_names import valid_name
from hybridpar.models.cost import training_flops_per_token, training_flops_rule
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.simulate.timeline import milliseconds
from hybridpar.state.compression.method import Sent
from hybridpar.state.residency.tiered import slow_folder
from hybridpar.train import folder as run_folder
from hybridpar.train.batches.expert_loads import max_violation
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.evaluation import Evaluator, Numbers
from hybridpar.train.faults.links import LinkWatch, Traffic
from hybridpar.train.forecasts.preview import differences, preview
from hybridpar.train.forecasts.split_advice import EarlyAdvice, better_split
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.costs_file import (
    RunCosts,
    describe,
    in_ms,
    percent,
    run_costs,
    write_costs,
)
from hybridpar.train.reporting.loads_picture import MOST_EXPERTS, LoadCounter, draw_loads, size_of
from hybridpar.train.reporting.log import RunLog
from hybridpar.train.reporting.peak import Peak
from hybridpar.train.reporting.plot import can_plot, draw_loss
from hybridpar.train.reporting.progress import Reporter
from hybridpar.train.reporting.run_metrics import peak_memory_mib, read_curves
from hybridpar.train.reporting.sent_traffic import Stream, as_row, describe_sent, gather_sent

_DRAWN_MICROBATCHES = 12
_DRAWN_BATCHES = 3
"""In the third batch, a 2bw run uses other weights than in the first batch for the first time."""
_MOST_BOXES = 10_000
_TRACED_STEPS = 5
"""Fewest steps between two drains that have a steady state."""


def is_evaluated(config: Config, step: int) -> bool:
    """Return whether the validation set is due after this step."""
    interval = config.train.eval_interval
    return interval > 0 and (step == config.train.num_steps or step % interval == 0)


class RunReport:
    """Reports a run. All ranks call it; only rank 0 writes and prints.

    Attributes:
        loss, val_loss: The last losses of this run; None if there are none.

    Collectives: the constructor, `end_stretch` and, with `links`, `finish`, on all ranks of the
        grid.
    """

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        resumed: int,
        links: LinkWatch | None = None,
        *,
        visible: float = 1.0,
    ):
        config = self.config = engine.config
        self.engine = engine
        self.reporter = reporter
        self.resumed = resumed
        self.links = links
        self._traffic = links.traffic() if links else Traffic()
        self.writes = engine.grid.rank == 0
        self.log = RunLog(config.run.folder, resumed, reporter, writes=self.writes, config=config)
        self.loss: float | None = None
        self.val_loss: float | None = None
        self._step_seconds: list[float] = []
        self._num_batches = 0
        self._loads = LoadCounter()
        self._sent: dict[Stream, Sent] = {}
        self._recorder: trace.Recorder | None = None
        self._traced = False
        self._exchange = EarlyAdvice(engine.job, engine.grid)
        self._advised = config.parallel.pp == 1
        self._costs: RunCosts | None = None
        self._num_unlabelled = 0
        self._knows_validation_sets = False
        self._flops_per_token = training_flops_per_token(config.model, visible)
        self._peak = Peak(config, engine.device, engine.grid.world, reporter.say)
        counts = config.model.counts
        each = (
            f"{self._flops_per_token:,} FLOP/{counts.removesuffix('s')} "
            f"({training_flops_rule(config.model, visible)})"
        )
        reporter.detail(
            f"MFU = {counts}/s x {each} / {self._peak.flops / 1e9:,.0f} GFLOP/s "
            f"({self._peak.source})"
        )
        if self.writes:
            self._draw_plan()

    def begin_stretch(self, stop: int) -> None:
        """Start training to step `stop` without a drain; record the first steady state.

        If every stretch between drains is short, the last one is recorded.
        """
        engine = self.engine
        num_batches = stop - engine.batches_done
        skip = max(engine.schedule.options.sync_steps - engine.batches_done, 0)
        least = _TRACED_STEPS if stop < self.config.train.num_steps else 1
        if not self._traced and num_batches - skip >= least:
            self._recorder = trace.Recorder(
                engine.executor, engine.batches_done, num_batches, skip=skip
            )

    def end_stretch(self) -> None:
        """Gather and write what was recorded and sent, once the pipeline has drained."""
        self._report_loads()
        if self.engine.grid.world.size > 1:
            self._sent = gather_sent(self.engine)
            if self.writes and self._sent:
                row = {"step": self.engine.batches_done}
                self.log.write(row, {"traffic": as_row(self._sent, self._num_batches)})
        if self._recorder is not None:
            self._recorder.close()
            self._write_trace(self._recorder)
            self._recorder = None
            self._traced = True

    def _report_loads(self) -> None:
        """Write and draw the loads of the stretch's steps, if there are experts."""
        loads = self._loads.take()
        if not loads:
            return
        if (size := size_of(loads)) > MOST_EXPERTS:
            self.reporter.detail(
                f"no loads of {size:,} experts: at most {MOST_EXPERTS:,} are drawn"
            )
            return
        step = self.engine.batches_done
        self.log.write({"step": step}, {"expert_loads": loads})
        self.log.draw(run_folder.LOADS_PICTURE, partial(draw_loads, loads, step))

    def after_update(self, step: int) -> None:
        """Advance the recording; call it after every update, even of a step that is rolled back."""
        self._num_batches += 1
        if self._recorder is not None:
            self._recorder.after_step(step)
            if not self._advised:
                self._advised = self._exchange.has_ended(self._recorder, self.reporter.say)

    def step(self, result: StepResult, seconds: float, notes: dict[str, Any]) -> None:
        """Report a step that took `seconds`. notes: further values; if any, the step is logged."""
        self._step_seconds.append(seconds)
        self.loss = result.loss
        settings = self.config.train
        if not result.num_targets:
            notes = notes | self._note_unlabelled(result.step)
        logged = (
            notes or result.step % settings.log_interval == 0 or result.step == settings.num_steps
        )
        if not self.writes:
            return
        self._loads.add(result.loads)
        share = self._peak.share(self.config.batch_tokens / seconds * self._flops_per_token)
        if logged:
            row = self._row(result, seconds, share) | notes
            self.log.write(row)
            self.reporter.step(row, is_evaluated=is_evaluated(self.config, result.step))

    def _note_unlabelled(self, step: int) -> dict[str, Any]:
        """Count a step without labels, warn at the first, and return values for metrics.jsonl."""
        self._num_unlabelled += 1
        if self._num_unlabelled == 1:
            self.reporter.say(
                f"step {step}: no label of this batch counts (all are -100, or num_targets is 0), "
                "so the losses over labels and their gradients are 0; further such batches are "
                "counted as unlabelled_steps in metrics.jsonl"
            )
        return {"unlabelled_steps": self._num_unlabelled}

    def validation_sets(self, evaluator: Evaluator) -> None:
        """Warn once, after the first evaluation, if samples repeat or no label counts."""
        if self._knows_validation_sets:
            return
        self._knows_validation_sets = True
        num_batches = self.config.train.eval_batches
        for name, loader in evaluator.loaders.items():
            of_set = f" of {name}" if name else ""
            if not evaluator.has_targets(name):
                self.reporter.say(
                    f"validation{of_set}: no label of the validation set counts (all are -100, or "
                    "num_targets is 0), so there is no validation loss"
                )
            asked = num_batches * loader.batch_size
            if repeats := loader.samples.num_repeats(asked):
                once = loader.num_batches_without_repeats(num_batches)
                fewer = (
                    f"; no train.eval_batches avoids it, as one batch has {loader.batch_size} "
                    "samples"
                )
                if once:
                    fewer = f"; train.eval_batches = {once} takes each at most once"
                self.reporter.say(
                    f"validation{of_set}: train.eval_batches = {num_batches} asks for {asked} "
                    f"samples, and {repeats} of them repeat earlier ones, as the validation set is "
                    f"smaller{fewer}"
                )

    def evaluation(
        self, step: int, numbers: Numbers, row: Mapping[str, float], loss: float | None
    ) -> None:
        """Report an evaluation.

        Args:
            numbers: Losses and metrics by set.
            row: The same numbers, named as in metrics.jsonl.
            loss: Loss that compares checkpoints; None if no label of its set counts.
        """
        self.val_loss = self.val_loss if loss is None else loss
        if self.writes:
            names = self.engine.loss_names
            partial = {
                valid_name("losses", name): {key: found[key] for key in names}
                for name, found in numbers.items()
            }
            self.log.write({"step": step, **row}, partial if len(names) > 1 else {})
            self.reporter.evaluation(step, row)

    def finish(self, stopped_by: int) -> None:
        """Print a summary, and plot the loss. stopped_by: signal that ended the run early, or 0."""
        traffic = self._all_traffic()
        if not self.writes:
            return
        say = self.reporter.say
        detail = self.reporter.detail
        config = self.config
        for line in traffic:
            say(line)
        if self._num_unlabelled:
            momentum = ""
            if len(self.engine.loss_names) == 1:
                momentum = ", and only momentum and weight decay changed the weights"
            say(
                f"{self._num_unlabelled} of {len(self._step_seconds)} batches had no label that "
                f"counts: the losses over labels gave no gradient there{momentum}"
            )
        if self._step_seconds:
            say(self._summary())
        self._compare_with_plan()
        if self._sent and self._num_batches:
            tell = detail if config.compression == UNCOMPRESSED else say
            for line in describe_sent(self._sent, self._num_batches):
                tell(line)
        if self._costs is not None:
            folder = None
            if config.memory.is_limited and self.engine.device.type == "cpu":
                folder = slow_folder(config)
            for line in [
                *describe(self._costs, folder),
                *differences(self.engine.job, self._costs),
            ]:
                detail(line)
        elif self._traced:
            detail(
                f"no {run_folder.COSTS}: that takes {_TRACED_STEPS} steps in a row without an "
                "evaluation or a checkpoint"
            )
        self.log.finish()
        if can_plot():
            metrics = config.run.folder / run_folder.METRICS
            self.log.put(
                "loss.png", lambda path: draw_loss(read_curves(metrics), path, config.run.name)
            )
        else:
            detail("no loss.png: matplotlib is not installed (pip install 'hybridpar[plot]')")
        if stopped_by:
            say(
                f"stopped after step {self.engine.batches_done}; the next start of "
                f"{config.run.name} resumes there"
            )

    def _row(self, result: StepResult, seconds: float, share: float) -> dict[str, Any]:
        config = self.config
        tokens = self.config.batch_tokens
        samples = self.engine.data_start.consumed(result.step, config.global_batch_size)
        row: dict[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **({} if config.model.counts == "tokens" else {"counts": config.model.counts}),
            "tokens_per_s": tokens / seconds,
            "step_ms": 1e3 * seconds,
            "consumed_tokens": samples * config.model.tokens_per_sample,
            "mfu": share,
            "memory_mib": peak_memory_mib(self.engine.device),
        }
        if self.links is not None:
            sent, received = (self.links.traffic() - self._traffic).a_day
            row |= {"sent_gb_a_day": sent / 1e9, "received_gb_a_day": received / 1e9}
        row |= result.metrics
        if (violation := max_violation(result.loads)) is not None:
            row["max_vio"] = violation
        if len(result.losses) > 1:
            row["losses"] = result.losses
        if self.engine.policy.scaler.dynamic:
            row["loss_scale"] = result.loss_scale
        if result.skipped:
            row["skipped"] = True
        return row

    def _all_traffic(self) -> list[str]:
        """Return a line per host with its traffic. Collectives: on all ranks, with `links`."""
        if self.links is None:
            return []
        mine = self.links.hosts.own, str(self.links.traffic() - self._traffic)
        return [
            f"{host} {text}"
            for host, text in dict(gather_objects(mine, self.engine.grid.world)).items()
        ]

    def _draw_plan(self) -> None:
        schedule = self.config.pipeline.schedule
        m = self.config.pipeline.num_microbatches
        title = f"{schedule}, {len(self.engine.job.split)} stages, {m} micro-batches a batch (simulated)"
        num_batches = ceil(_DRAWN_MICROBATCHES / m)
        if _DRAWN_BATCHES * m * len(self.engine.job.split) <= _MOST_BOXES:
            num_batches = max(num_batches, _DRAWN_BATCHES)

        def picture() -> str:
            shown = preview(self.engine.job, num_batches)
            return draw_svg(shown.drawn(), title=title, steady_idle=shown.bubble)

        self.log.draw("plan.svg", picture)

    def _write_trace(self, recorder: trace.Recorder) -> None:
        ranks = trace.gather(recorder, self.engine.grid)
        if not self.writes or not any(rank.events for rank in ranks):
            return
        shown = trace.last_batches(ranks, trace.SHOWN)
        gathers = self.engine.state.partition.is_sharded
        self.log.put("trace.json", lambda path: trace.write_trace(shown, path, gathers=gathers))
        title = f"{self.config.pipeline.schedule} as it ran"
        self.log.draw("executed.svg", lambda: trace.draw_executed(shown, title))
        self._costs = costs = run_costs(self.engine.job, ranks)
        if costs is not None:
            self.log.put(run_folder.COSTS, lambda path: write_costs(costs, path))
            if not self._advised and (advice := better_split(self.engine.job, costs)):
                self.reporter.say(advice)
            self._advised = True

    def _summary(self) -> str:
        """Return a line with the step time and, if measured, the idle time of stages."""
        took = median(self._step_seconds)
        plan = self.config.plan
        planned = f", {in_ms(plan.step_ms / 1e3)} planned" if plan.step_ms else ""
        text = f"{in_ms(took)} a step (median of {len(self._step_seconds)}{planned})"
        if self._costs is None or self._costs.shape.num_ranks == 1:
            return text
        idle = percent(self._costs.measured.idle)
        return f"{text}; {self._costs.shape.rank_name}s idle {idle} of the time"

    def _compare_with_plan(self) -> None:
        plan = self.config.plan
        if plan.step_ms and len(self._step_seconds) >= _TRACED_STEPS:
            took = 1e3 * median(self._step_seconds)
            taken = round(100 * plan.cores_taken)
            busy = ""
            if taken:
                busy = f"; other programs took {taken} % of the cores while it was measured"
            self.reporter.detail(
                f"plan: a step takes {milliseconds(took / 1e3)} ms (median of {len(self._step_seconds)}), "
                f"{milliseconds(plan.step_ms / 1e3)} ms predicted ({100 * (plan.step_ms / took - 1):+.1f} %){busy}"
            )
