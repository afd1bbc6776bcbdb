"""`hybridpar train`: from a configuration to a finished run folder, or to the checkpoint from which
it goes on.

resolve, device, threads      each process alone; what is wrong is wrong everywhere
run folder, data              all processes together, through the launcher's store
process group, engine, load   now there are collectives; still nothing in the folder has changed
run.py                        trains, evaluates, saves
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridpar import checkpoint
from hybridpar.config import Config, Launch, from_mapping, require_gpu_queues, use_all_gpu_queues
from hybridpar.data import NO_DATASETS, Data, open_data
from hybridpar.errors import CheckpointError, HybridparError, config_error, in_a_line
from hybridpar.flight import FAILED, LOST, REFUSED, RENDEZVOUS, Flight, Waiting
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.ops.libraries import examine_triton
from hybridpar.prediction import MemoryWatch
from hybridpar.schedules.proof.check import PlanError
from hybridpar.train import continued
from hybridpar.train import folder as run_folder
from hybridpar.train.autotuning import kernel_options, warm_up
from hybridpar.train.autotuning.autotune import settle
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
from hybridpar.train.inference.generate import Generator, Sampling
from hybridpar.train.launch import (
    Job,
    choose_backend,
    choose_device,
    keep_freed_memory,
    set_precision,
    set_threads,
)
from hybridpar.train.reporting.progress import PlainReporter, Reporter, make_reporter
from hybridpar.train.run import Outcome, Run
from hybridpar.validate import resolve

_FINAL = (AnomalyError, CallbackError, SaveError)
"""Errors with which a new start would end again."""
_ON_ALL_RANKS = (*_FINAL, SetupError, CheckpointError, PlanError)
"""Errors that are raised on all ranks together."""
_PROMPTS = {True: "def ", False: "The "}  # whether the corpus is program text
_NOISE = 0.6
"""Share of the loss of guessing, the logarithm of the vocabulary's size, above which a model's text
is noise."""
_FEW_CHARACTERS = 60
_SAMPLE_TEMPERATURE = 0.5
"""Of the sample at the end of a run: low, as what a small model finds likely reads best."""


def train(
    config: Config,
    launch: Launch,
    inject: Sequence[str] = (),
    callbacks: Callbacks = SILENT,
    datasets: Mapping[str, Any] = NO_DATASETS,
    is_verbose: bool = False,
) -> Outcome:
    """Trains as `config` says in the job that this process belongs to, from the last checkpoint if
    there is one.

    inject: faults that are to happen, as `train.faults.inject` reads them. datasets: in the stead
    of those that a model of one's own names, by part. is_verbose: whether details are shown.
    Collectives: to be called by all processes of the job.
    Raises: HybridparError (ConfigError, DataError, CheckpointError) on all processes alike, with
        nothing overwritten;
    RankError where training fails on this one.
    """
    config = resolve(config, launch.world_size)
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
        examine_triton(
            warn=launch.local_rank == 0
        )  # now, and not where the first micro-batch finds no compiler
    if device.type == "cpu":
        keep_freed_memory()
    folder = config.run.folder
    num_steps = config.train.num_steps
    first = launch.rank == 0
    flight.phase("opening the run")  # text may take hours to become tokens
    given = config.pipeline.num_microbatches
    config = with_kept_batch(config, job)
    faults = parse_faults(inject, config)
    config = from_mapping(job.decide(lambda: run_folder.measured(config)), config)
    saved, changed = job.decide(lambda: run_folder.find_run(config))
    require_equal_start(config.model, job, resumes=saved > 0)
    if saved >= num_steps:
        if first:
            print(
                f"{folder}: finished, {saved} steps are done; raise train.num_steps to go on",
                file=sys.stderr,
            )
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
        if start or (
            saved and config.train.continue_with
        ):  # else other data are refused, whatever their tokens
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
        place = _Place(job, device, threads, faults, callbacks)
        outcome = _train_on_grid(config, data, place, reporter, _Start(start, held))
        if (
            first
            and config.model.can_generate
            and data.tokenizer is not None
            and not outcome.stopped_by
        ):
            _sample(config, reporter, outcome.loss)
    return outcome


def with_kept_batch(config: Config, job: Job) -> Config:
    """`config` with the batch of the run in its folder, as rank 0 finds it
    (run_folder.with_kept_batch).

    Collectives: on all processes of the job. Raises: ConfigError on all.
    """
    number = job.decide(lambda: run_folder.with_kept_batch(config).pipeline.num_microbatches)
    return replace(config, pipeline=replace(config.pipeline, num_microbatches=number))


def _find_start(config: Config, held: contextlib.ExitStack) -> str:
    """Return the checkpoint to start from, which `held` keeps there while this run is set up."""
    return str(
        held.enter_context(checkpoint.hold_start(config.train.start_from, config.model)).folder
    )


def open_job_data(config: Config, job: Job, datasets: Mapping[str, Any]) -> Data:
    """Lets the first process of each machine prepare the corpus, then opens it on the others."""

    def opened() -> Data:
        return open_data(
            config.model,
            config.data,
            config.cache_folder,
            seed=config.train.seed,
            quiet=job.launch.rank != 0,
            datasets=datasets,
            kept=2 * config.global_batch_size,
            evaluates=config.train.eval_interval > 0,
        )

    first = job.launch.local_rank == 0
    data = job.together(opened, here=first)
    data = job.together(opened, here=not first) or data
    assert data is not None
    if not data.valid and config.train.eval_interval:
        raise config_error(
            "train.eval_interval",
            config.train.eval_interval,
            f"requires validation samples, and {config.model.kind} has none",
            "0",
        )
    require_best_set(config, data.valid)
    return data


@dataclass(frozen=True)
class _Place:
    """Where this process trains, the faults that are to happen there, and who is told."""

    job: Job
    device: torch.device
    threads: int
    faults: tuple[Fault, ...]
    callbacks: Callbacks

    def connect(self, config: Config, flight: Flight) -> ProcessGrid:
        """Starts the process group, and makes the grid of it. Collectives: on all processes of the
        job."""
        flight.phase("connecting", config.faults.start_timeout_s)
        with Waiting(flight, RENDEZVOUS, "world"):
            backend = choose_backend(config.train, self.device)
            wait = config.longest_wait_s
            if backend == "nccl":  # others wait while one compiles; Run says when that is over
                wait = max(wait, config.faults.start_timeout_s)
            self.job.start_group(self.device, backend, wait)
            return ProcessGrid(
                sizes_of(config.parallel), device_type=self.device.type, flight=flight
            )

    def watch_links(self, config: Config, flight: Flight, reporter: Reporter) -> LinkWatch | None:
        """The watch over the links to other hosts; None where all ranks are on this one.

        The first rank of each host says which link is out. Collectives: on all processes of the
        job.
        """
        launch = self.job.launch
        if launch.loopback or launch.world_size == 1:
            return None
        hosts = Hosts.of(self.job.gather(Hosts.introduce()), launch.rank)
        if not hosts.names:
            return None
        files = [run_folder.flight_path(config.run.folder, rank) for rank in hosts.ranks]
        say = (
            reporter.say
            if launch.rank == 0
            else PlainReporter(0).say
            if launch.rank == hosts.ranks[0]
            else None
        )
        return LinkWatch(flight, config.longest_wait_s, hosts, files, say)

    def build(self, build: Callable[[], Engine]) -> Engine:
        """The engine. Raises: SetupError on all processes alike, where one finds that its state has
        no room."""
        try:
            engine = self.job.together(build)
        except HybridparError as error:
            raise SetupError(str(error)) from error
        assert engine is not None
        return engine


@dataclass(frozen=True)
class _Start:
    """The checkpoint whose weights a new run begins with ("": none), and what holds it until they
    are loaded."""

    folder: str
    held: contextlib.ExitStack


def _train_on_grid(
    config: Config, data: Data, place: _Place, reporter: Reporter, start: _Start
) -> Outcome:
    """Builds the engine, loads, and trains.

    Raises: _ON_ALL_RANKS on all ranks alike; RankError, naming this rank, for whatever else goes
        wrong.
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
        options = kernel_options.prepare(
            config, place.job, place.device, reporter.say
        )  # before anything is measured
        if warm_up.is_needed(grid, place.device):
            warm_up.warm_up(config, grid, place.device, place.build)
        config = settle(config, grid, place.device, reporter.say, place.build)
        job_plan = JobPlan(config)
        job_plan.prove()
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
        with contextlib.closing(
            Run(engine, data, reporter, resumed, watch, links, place.callbacks)
        ) as run:
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
        failure = describe_failure(
            error, who, flight.read(), str(links.silence or "") if links else ""
        )
        flight.end(LOST if isinstance(failure, LostContactError) else FAILED, str(failure))
        raise failure from error
    finally:
        if links is not None:
            links.close()


def _load(engine: Engine, data: Data, reporter: Reporter, start: _Start) -> int:
    """Loads the newest checkpoint of the run, else the weights of `start`; returns the step of the
    former, or 0."""
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
    config: Config, place: _Place, grid: ProcessGrid, reporter: Reporter, resumed: int
) -> None:
    """Says what is trained, on which grid, and from where."""
    parallel = config.parallel
    threads = f"{place.threads} thread{'s' * (place.threads != 1)} a process"
    sites = f"{parallel.sites} sites of " if parallel.sites > 1 else ""
    where = (
        f"{sites}tp={parallel.tp} pp={parallel.pp} dp={parallel.dp}, {place.device.type}, {threads}"
    )
    what = f"{config.model.kind}, {config.pipeline.schedule}, {config.train.dtype}"
    how = f"going on after step {resumed}" if resumed else "starting"
    reporter.say(f"{config.run.folder}: {what} on {where}; {how}")
    if grid.world.via_host:
        local = place.job.launch.local_world_size
        gpus = torch.cuda.device_count()
        reporter.say(
            f"train.share_gpus: {local} processes of this machine share {gpus} "
            f"GPU{'s' * (gpus > 1)} and "
            "talk over Gloo, through host memory, which is slow"
        )


def _sample(config: Config, reporter: Reporter, loss: float | None) -> None:
    """Writes text from the checkpoint just saved, and shows it; of a model that hardly knows more
    than to guess only the beginning. loss: of the last step."""
    folder = config.run.folder
    prompt = _PROMPTS["stdlib" in config.data.corpus]
    try:
        generator = Generator.load(folder, reporter.say)
        sampling = replace(Sampling(), temperature=_SAMPLE_TEMPERATURE, seed=config.train.seed)
        text = prompt + "".join(generator.generate(prompt, sampling))
        (folder / "sample.txt").write_text(text, encoding="utf-8")
    except Exception as error:  # a run without a sample is a run
        reporter.say(f"no sample.txt: {in_a_line(error)}")
        return
    guessing = math.log(config.transformer.vocab_size)
    if loss is not None and not loss < _NOISE * guessing:
        text = " ".join(text[:_FEW_CHARACTERS].split())
        reporter.say(
            f"{folder / 'sample.txt'}: {text} ... (still noise: the loss is {loss:.1f}, and "
            "guessing "
            f"has {guessing:.1f})"
        )
    else:
        reporter.say(f"{folder / 'sample.txt'}:\n{text}")
