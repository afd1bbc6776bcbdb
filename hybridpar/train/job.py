"""`hybridpar train`: train from a configuration to a finished run folder or a resumable checkpoint.

resolve, device, threads      each process alone; an error here occurs on every process
run folder, data              all processes together, through the launcher's store
process group, engine, load   collectives exist from here on; the run folder is still unchanged
run.py                        trains, evaluates, saves
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybridpar import checkpoint
from hybridpar.config import Config, Launch, from_mapping, require_gpu_queues, use_all_gpu_queues
from hybridpar.data import NO_DATASETS, Data, open_data
from hybridpar.data.packed_rows import mean_visible_share
from hybridpar.errors import CheckpointError, HybridparError, config_error, in_a_line
from hybridpar.flight import FAILED, LOST, REFUSED, RENDEZVOUS, Flight, Waiting
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.ops.backends.libraries import examine_triton
from hybridpar.prediction import MemoryWatch
from hybridpar.schedules.proof.check import PlanError
from hybridpar.train import continued
from hybridpar.train import folder as run_folder
from hybridpar.train.autotuning import kernel_options, warm_up
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.callbacks import SILENT, Callbacks
from hybridpar.train.engine import Engine
from hybridpar.train.equal_plans import (
    require_equal_data,
    require_equal_plans,
    require_equal_settings,
    require_equal_start,
)
from hybridpar.train.evaluation import require_best_set
from hybridpar.train.faults import watchdog
from hybridpar.train.faults.errors import (
    AnomalyError,
    CallbackError,
    LostContactError,
    SaveError,
    SetupError,
    describe_failure,
)
from hybridpar.train.faults.inject import Fault, Injector, parse_faults
from hybridpar.train.faults.links import Hosts, LinkWatch
from hybridpar.train.forecasts.tier_forecast import require_limit
from hybridpar.train.inference.generate import Generator, Sampling
from hybridpar.train.launching.launch import (
    Job,
    choose_backend,
    choose_device,
    keep_freed_memory,
    set_precision,
    set_threads,
)
from hybridpar.train.reporting.progress import PlainReporter, Reporter, make_reporter
from hybridpar.train.reporting.run_report import RunReport
from hybridpar.train.run import Outcome, Run
from hybridpar.validate import resolve

T = TypeVar("T")
_FINAL = (AnomalyError, CallbackError, SaveError)
"""Errors that a restart would meet again."""
_ON_ALL_RANKS = (*_FINAL, SetupError, CheckpointError, PlanError)
"""Errors that all ranks raise together."""
_PROMPTS = {True: "    def", False: "The"}
"""Prompts of a sample: the key says whether the corpus is source code. They end without a space,
because tokens begin with one."""
_NOISE = 0.6
"""A model's text counts as noise if its loss exceeds this share of log(vocab_size), the loss of
guessing."""
_FEW_CHARACTERS = 60
_SAMPLE_TEMPERATURE = 0.5
"""Temperature of the final sample: low, because likely text of a small model reads best."""


def train(
    config: Config,
    launch: Launch,
    inject: Sequence[str] = (),
    callbacks: Callbacks = SILENT,
    datasets: Mapping[str, Any] = NO_DATASETS,
    is_verbose: bool = False,
) -> Outcome:
    """Train as `config` says in this process's job, from the run's last checkpoint if there is one.

    Args:
        inject: Faults to inject, in the syntax of `train.faults.inject`.
        datasets: Data sets by split that replace the data sets of a custom model.

    Collectives: to be called by all processes of the job.

    Raises:
        HybridparError: ConfigError, DataError or CheckpointError on all processes alike; nothing
            is overwritten.
        RankError: Training failed on this rank.
    """
    config = resolve(config, launch.world_size)
    given = config.pipeline.num_microbatches
    place, config = join(config, launch)
    job = place.job
    faults = parse_faults(inject, config)
    folder = config.run.folder
    num_steps = config.train.num_steps
    first = launch.rank == 0
    saved, changed = job.decide(lambda: run_folder.find_run(config))
    require_equal_start(config.model, job, resumes=saved > 0)
    if saved >= num_steps:
        if first:
            said = f"{folder}: finished, {saved} steps are done; raise train.num_steps to continue"
            print(said, file=sys.stderr)
        return Outcome(folder, saved, num_steps, resumed_from=saved)
    with contextlib.ExitStack() as stack:
        start = ""
        held = stack.enter_context(contextlib.ExitStack())
        if config.train.start_from and not saved:
            start = job.decide(lambda: _find_start(config, held))
        job.together(lambda: stack.enter_context(run_folder.in_use(folder, launch)), here=first)
        run_folder.require_shared(folder, job)
        data = open_job_data(config, job, datasets)
        require_equal_data(data, job)
        if start or (saved and config.train.continue_with):
            # without continue_with, `checkpoint.resume` refuses other data by their fingerprint
            run = Path(start).parent.parent if start else folder
            job.decide(lambda: checkpoint.check_tokens(run, data.tokenizer, config.data.tokenizer))
        reporter = stack.enter_context(
            contextlib.closing(make_reporter(launch.rank, num_steps, is_verbose))
        )
        for line in changed:
            reporter.say(f"since the last time: {line}")
        if (number := config.pipeline.num_microbatches) != given:
            reporter.say(
                f"pipeline.num_microbatches = {number}, not {given}: the run keeps its batches of "
                f"{config.global_batch_size} samples; train.continue_with says how to change them"
            )
        for line in data.notes:
            reporter.say(line)
        place = replace(place, faults=faults, callbacks=callbacks)
        outcome = _train_on_grid(config, data, place, reporter, _Start(start, held))
        if (
            first
            and config.model.can_generate
            and data.tokenizer is not None
            and not outcome.stopped_by
        ):
            _sample(config, place.device, reporter, outcome.loss)
    return outcome


def join(config: Config, launch: Launch) -> tuple[JobPlace, Config]:
    """Join the other processes of the job, and prepare this one.

    The configuration gets the batch size and the measured values of the run in its folder, which
    rank 0 reads.

    Collectives: on all processes of the job. Raises: HybridparError, on all of them.
    """
    flight = watchdog.begin(launch)
    flight.phase("starting", config.faults.start_timeout_s)
    job = Job.connect(launch, flight)
    require_equal_settings(config, job)
    use_all_gpu_queues()
    device = choose_device(config.train, launch, job.gather)
    if choose_backend(config.train, device) == "nccl":
        job.together(lambda: require_gpu_queues(config.parallel.pp))
    job.require_addresses(choose_backend(config.train, device))
    threads = set_threads(config.train.threads, launch)
    set_precision(config.train, device)
    if device.type == "cuda":
        # now, so that a missing compiler is reported before the first micro-batch
        examine_triton(warn=launch.local_rank == 0)
    if device.type == "cpu":
        keep_freed_memory()
    flight.phase("opening the run")  # no time limit: tokenizing may take hours
    number = job.decide(lambda: run_folder.with_kept_batch(config).pipeline.num_microbatches)
    kept = replace(config, pipeline=replace(config.pipeline, num_microbatches=number))
    measured = from_mapping(job.decide(lambda: run_folder.measured(kept)), kept)
    return JobPlace(job, device, threads), measured


def _find_start(config: Config, held: contextlib.ExitStack) -> str:
    """Return the checkpoint to start from; `held` protects it from pruning until it is loaded."""
    return str(
        held.enter_context(checkpoint.hold_start(config.train.start_from, config.model)).folder
    )


def open_job_data(config: Config, job: Job, datasets: Mapping[str, Any]) -> Data:
    """Open the data; the first process of each machine prepares the corpus for the others."""

    def opened() -> Data:
        return open_data(config, quiet=job.launch.rank != 0, datasets=datasets)

    first = job.launch.local_rank == 0
    data = job.together(opened, here=first)
    data = job.together(opened, here=not first) or data
    assert data is not None
    if not data.valid and config.train.eval_interval:
        rule = f"requires validation samples, and {config.model.kind} has none"
        raise config_error("train.eval_interval", config.train.eval_interval, rule, "0")
    require_best_set(config, data.valid)
    return data


@dataclass(frozen=True)
class JobPlace:
    """This process's place in the job, the faults to inject there, and the program's callbacks."""

    job: Job
    device: torch.device
    threads: int
    faults: tuple[Fault, ...] = ()
    callbacks: Callbacks = SILENT

    def connect(self, config: Config, flight: Flight) -> ProcessGrid:
        """Start the process group and create the grid. Collectives: on all processes of the job."""
        flight.phase("connecting", config.faults.start_timeout_s)
        with Waiting(flight, RENDEZVOUS, "world"):
            backend = choose_backend(config.train, self.device)
            wait = config.longest_wait_s
            if backend == "nccl":
                # Ranks wait for one that compiles kernels. `Run` restores the shorter limit after
                # the first step.
                wait = max(wait, config.faults.start_timeout_s)
            self.job.start_group(self.device, backend, wait)
            return ProcessGrid(
                sizes_of(config.parallel), device_type=self.device.type, flight=flight
            )

    def watch_links(self, config: Config, flight: Flight, reporter: Reporter) -> LinkWatch | None:
        """Start watching the links to other hosts; return None if all ranks are on one host.

        The first rank of each host reports which link is down. Collectives: on all processes of
        the job.
        """
        launch = self.job.launch
        if launch.loopback or launch.world_size == 1:
            return None
        hosts = Hosts.of(self.job.gather(Hosts.introduce()), launch.rank)
        if not hosts.names:
            return None
        files = [run_folder.flight_path(config.run.folder, rank) for rank in hosts.ranks]
        say = None
        if launch.rank == 0:
            say = reporter.say
        elif launch.rank == hosts.ranks[0]:
            say = PlainReporter(0).say
        return LinkWatch(flight, config.longest_wait_s, hosts, files, say)

    def set_up(self, action: Callable[[], T], *, here: bool = True) -> T | None:
        """Run `action` where `here` is true. Raises: SetupError on all, if it fails on one."""
        try:
            return self.job.together(action, here=here)
        except HybridparError as error:
            raise SetupError(str(error)) from error

    def build(self, build: Callable[[], Engine]) -> Engine:
        """Build the engine. Raises: SetupError on all processes, if one lacks memory."""
        engine = self.set_up(build)
        assert engine is not None
        return engine


@dataclass(frozen=True)
class _Start:
    """The checkpoint whose weights a new run starts from.

    Attributes:
        folder: The checkpoint; empty if there is none.
        held: Protects the checkpoint from pruning until it is loaded.
    """

    folder: str
    held: contextlib.ExitStack


def _train_on_grid(
    config: Config, data: Data, place: JobPlace, reporter: Reporter, start: _Start
) -> Outcome:
    """Build the engine, load a checkpoint, and train.

    Raises:
        _ON_ALL_RANKS: On all ranks alike.
        RankError: Any other error; it names this rank.
    """
    rank = place.job.launch.rank
    who = f"rank {rank}"
    flight = place.job.flight
    started = False
    job_plan = JobPlan(config)
    run_folder.open_flight(job_plan, rank, flight)
    injector = Injector(place.faults, config.run.folder, rank, flight)
    links: LinkWatch | None = None
    try:
        grid = place.connect(config, flight)
        links = place.watch_links(config, flight, reporter)
        flight.phase("setting up", config.faults.start_timeout_s)
        who = grid.describe(job_plan.shape.stages_of(grid.pp.rank))
        # before autotuning measures anything with these kernels
        options = kernel_options.prepare(config, place.job, place.device, reporter.say)
        if warm_up.is_needed(grid, place.device):
            warm_up.warm_up(config, grid, place.device, place.build)
        config = autotune(config, grid, place.device, reporter.say, place.build)
        job_plan = JobPlan(config)
        job_plan.prove()
        place.set_up(lambda: require_limit(job_plan), here=rank == 0)
        watched = config.train.measure_memory or bool(config.plan.memory_mib)
        watch = MemoryWatch(job_plan, place.device) if watched else None
        engine = place.build(
            lambda: Engine(job_plan, grid, place.device, wrap_plan=injector.wrap_plan)
        )
        require_equal_plans(engine)
        resumed = _load(engine, data, reporter, start)
        if rank == 0:
            for line in continued.go_on(config, resumed, data.train.fingerprint, engine.data_start):
                reporter.say(line)
            run_folder.begin(config, data.tokenizer)
            options.write(config.run.folder, reporter.say)
        _introduce(config, place, grid, reporter, resumed)
        visible = 1.0
        if config.data.is_packed and (text := config.model.text_format) is not None:
            visible = mean_visible_share(data.train, text)
        report = RunReport(engine, reporter, resumed, links, visible=visible)
        with contextlib.closing(Run(engine, data, report, watch, place.callbacks)) as run:
            injector.attach(engine, run.saver)
            started = True
            outcome = run.go()
        with Waiting(flight, "barrier", "world"):
            place.job.end_group()
        flight.phase("finished")
        return outcome
    except _ON_ALL_RANKS as error:
        again = started and not isinstance(error, _FINAL)
        flight.end(FAILED if again else REFUSED, str(error))
        place.job.end_group()
        if again:
            error.note_may_pass()
        raise
    except Exception as error:
        silence = str(links.silence or "") if links else ""
        failure = describe_failure(error, who, flight.read(), silence)
        flight.end(LOST if isinstance(failure, LostContactError) else FAILED, str(failure))
        raise failure from error
    finally:
        if links is not None:
            links.close()


def _load(engine: Engine, data: Data, reporter: Reporter, start: _Start) -> int:
    """Load and return the run's newest checkpoint's step, or load `start` and return 0."""
    flight = engine.grid.flight
    config = engine.config
    flight.phase("loading", config.faults.start_timeout_s)
    root = config.run.folder / run_folder.CHECKPOINTS
    resumed = checkpoint.resume(root, engine, data.train.fingerprint, reporter.say)
    if start.folder and not resumed:
        checkpoint.start_from(Path(start.folder), engine)
        reporter.say(f"starting from the weights of {start.folder}")
    start.held.close()
    flight.phase("setting up", config.faults.start_timeout_s)
    return resumed


def _introduce(
    config: Config, place: JobPlace, grid: ProcessGrid, reporter: Reporter, resumed: int
) -> None:
    """Say what is trained, on which grid, and from which step."""
    parallel = config.parallel
    threads = f"{place.threads} thread{'s' * (place.threads != 1)} a process"
    sites = f"{parallel.sites} sites of " if parallel.sites > 1 else ""
    context = f" cp={parallel.cp}" if parallel.cp > 1 else ""
    experts = f" ep={parallel.ep}" if parallel.ep > 1 else ""
    where = (
        f"{sites}tp={parallel.tp}{context} pp={parallel.pp} dp={parallel.dp}{experts}, "
        f"{place.device.type}, {threads}"
    )
    what = f"{config.model.kind}, {config.pipeline.schedule}, {config.train.dtype}"
    how = f"resuming after step {resumed}" if resumed else "starting"
    reporter.say(f"{config.run.folder}: {what} on {where}; {how}")
    if grid.world.via_host:
        local = place.job.launch.local_world_size
        gpus = torch.cuda.device_count()
        reporter.say(
            f"train.share_gpus: {local} processes of this machine share {gpus} "
            f"GPU{'s' * (gpus > 1)} and talk over Gloo, through host memory, which is slow"
        )


def _sample(config: Config, device: torch.device, reporter: Reporter, loss: float | None) -> None:
    """Generate text from the saved checkpoint; show little of it if the last `loss` is high.

    A GPU that is too small for a model that the ranks had in parts leaves it to the CPU.
    """
    folder = config.run.folder
    prompt = _PROMPTS["stdlib" in config.data.corpus]
    try:
        sampling = replace(Sampling(), temperature=_SAMPLE_TEMPERATURE, seed=config.train.seed)
        try:
            text = _generate(folder, prompt, sampling, reporter, device)
        except torch.OutOfMemoryError:
            reporter.say(f"{device} has no room for the whole model: the CPU writes the sample")
            text = _generate(folder, prompt, sampling, reporter, torch.device("cpu"))
        (folder / "sample.txt").write_text(text, encoding="utf-8")
    except Exception as error:  # a failed sample must not fail the run
        reporter.say(f"no sample.txt: {in_a_line(error)}")
        return
    guessing = math.log(config.transformer.vocab_size)
    if loss is not None and not loss < _NOISE * guessing:
        text = " ".join(text[:_FEW_CHARACTERS].split())
        reporter.say(
            f"{folder / 'sample.txt'}: {text} ... (still noise: the loss is {loss:.1f}, and "
            f"guessing has {guessing:.1f})"
        )
    else:
        reporter.say(f"{folder / 'sample.txt'}:\n{text}")


def _generate(
    folder: Path, prompt: str, sampling: Sampling, reporter: Reporter, device: torch.device
) -> str:
    """Return a prompt and its continuation by the newest checkpoint of a run."""
    generator = Generator.load(folder, reporter.say, device=device)
    return prompt + "".join(generator.generate(prompt, sampling))
