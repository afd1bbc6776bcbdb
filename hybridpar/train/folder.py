"""The run folder: its files, its lock, and what it says about an earlier start.

    runs/<name>/
        config.toml       the configuration, complete      metrics.jsonl    a line a step, and a line an evaluation
        plan.svg          the schedule, simulated          trace.json       a few batches on all ranks (ui.perfetto.dev)
        executed.svg      the same batches, drawn          loss.png         where matplotlib is installed
        tokenizer.json    of the corpus                    sample.txt       GPT: text from the trained model
        costs.json        what its steps cost, measured    tensorboard/     where tensorboard is installed
        anomalies/        steps to be run again by replay  checkpoints/     the newest ones, and the best
        flight/           what each rank is doing, or did  injected/        faults that were injected
        failures.jsonl    supervised jobs: a line each     notes.jsonl      a console or disk that was lost for a while
        changes.jsonl     where train.continue_with was used  trackers.json  who it is for
                          run.trackers
        memory/           events of train.record_memory    expert_loads.svg  tokens of each expert, of the last steps
        model_folder      of a custom model: where its module is found
        kernels.json      on GPUs: launch options of attention's kernels, measured
                          (kernel_options.py)

Next to tokenizer.json are the tokenizer's other files: special tokens, settings, chat template.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from hybridpar.checkpoint import check_compatible, read_manifest, saved_steps
from hybridpar.checkpoint.compatible import BATCH
from hybridpar.checkpoint.folders import folder_of
from hybridpar.checkpoint.format.files import as_bytes, write_text
from hybridpar.checkpoint.load import check_files
from hybridpar.config import (
    FOUND,
    MODEL_FOLDER,
    Config,
    Launch,
    from_plain,
    import_rule,
    read_run_config,
    spec_folder,
    to_mapping,
    to_toml,
)
from hybridpar.data import Tokenizer
from hybridpar.errors import FULL_DISK, CheckpointError, ConfigError, config_error
from hybridpar.flight import Flight
from hybridpar.grid import describe, lines_of, place_of, sizes_of
from hybridpar.job import JobPlan
from hybridpar.reading import parse_json
from hybridpar.train.faults.watchdog import ORPHAN_S, record_name
from hybridpar.train.launching.launch import Job
from hybridpar.train.reporting.console import say
from hybridpar.train.reporting.run_metrics import last_step
from hybridpar.validate import problems

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
COSTS = "costs.json"
LOADS_PICTURE = "expert_loads.svg"
FLIGHT = "flight"
FAILURES = "failures.jsonl"
INJECTED = "injected"
NOTES = "notes.jsonl"
CHANGES = "changes.jsonl"
MEMORY = "memory"
_MEASURED = {
    ("pipeline", "schedule"): str,
    ("pipeline", "early_switch"): int,
    ("memory", "offload_activations"): list,
}
"""Settings that may be "auto", and the type of the measured value."""
_WITH = {("pipeline", "schedule"): FOUND}
"""Further settings that are measured with them."""
_KILL_S = 10.0
"""Time until a killed process has gone."""
_LOOK_AGAIN_S = 0.5
_MOST_OF_LOCK = 2**20
_SEEN_AFTER_S = 75.0
"""Time until a file of another machine appears on a shared file system: NFS caches for 60 s."""


def measured(config: Config) -> dict[str, dict[str, Any]]:
    """Return values that an earlier start of this run measured for "auto" settings, by section.

    The result is empty if the grid, the pipeline or the memory settings have changed since.
    """
    path = config.run.folder / CONFIG
    now = to_mapping(config)
    automatic = [(section, key) for section, key in _MEASURED if now[section][key] == "auto"]
    if not automatic or not path.exists():
        return {}
    try:
        before = to_mapping(read_run_config(path))
    except ConfigError:  # find_run reports it
        return {}
    found: dict[str, dict[str, Any]] = {}
    for section, key in automatic:
        value = before[section][key]
        # a value of another type was set by the user, not measured
        if value == "auto" or not isinstance(value, _MEASURED[section, key]):
            return {}
        keys = (key, *_WITH.get((section, key), ()))
        found[section] = found.get(section, {}) | {name: before[section][name] for name in keys}
    alike = all(
        before[name] == now[name] | found.get(name, {})
        for name in ("parallel", "pipeline", "memory")
    )
    if not alike or before["train"]["micro_batch_size"] != now["train"]["micro_batch_size"]:
        return {}
    return found


def with_kept_batch(config: Config) -> Config:
    """Return `config` with the number of micro-batches that keeps the run's global batch size.

    The result is `config` itself if no run has begun, if train.continue_with names a setting of the
    batch, or if no number of micro-batches keeps the batch size, which `find_run` refuses.

    Raises:
        ConfigError: That number of micro-batches conflicts with other settings.
    """
    folder = config.run.folder
    path = folder / CONFIG
    if not path.exists() or set(config.train.continue_with) & set(BATCH):
        return config
    if not _has_begun(folder, saved_steps(folder / CHECKPOINTS)):
        return config
    try:
        samples = read_run_config(path).global_batch_size
    except ConfigError:  # find_run reports it
        return config
    samples_at_once = config.train.micro_batch_size * config.parallel.replicas
    if samples <= 0 or samples % samples_at_once or samples == config.global_batch_size:
        return config
    number = samples // samples_at_once
    kept = replace(config, pipeline=replace(config.pipeline, num_microbatches=number))
    if found := problems(kept, config.parallel.num_ranks):
        rule = (
            f"the run in {folder} has batches of {samples} samples, which takes {number} "
            f"micro-batches here; "
        )
        works = (
            f'train.continue_with = ["pipeline.num_microbatches"] to continue with batches of '
            f"{config.global_batch_size} samples, or the grid and schedule that the run had"
        )
        raise ConfigError(*(replace(one, rule=rule + one.rule, suggestion=works) for one in found))
    return kept


def _has_begun(folder: Path, steps: Sequence[int]) -> bool:
    """Return whether the run in the folder has made a step. steps: saved checkpoints."""
    return bool(steps) or last_step(folder / METRICS) > 0


def find_run(config: Config) -> tuple[int, list[str]]:
    """Return the newest saved step of the run's folder, and the changed settings since, as lines.

    The step is 0 if there is none. If earlier starts failed before the first step, any
    configuration may begin. A checkpoint at or after the last step is verified against its
    checksums, and ignored if it is damaged. Nothing is written.

    Raises:
        CheckpointError: The folder holds a run that `config` cannot continue.
    """
    folder = config.run.folder
    if folder.exists() and not folder.is_dir():
        raise config_error("run.name", config.run.name, f"{folder} is a file")
    steps = saved_steps(folder / CHECKPOINTS)
    path = folder / CONFIG
    if not path.exists():
        if steps:
            raise CheckpointError(
                f"{folder} has checkpoints but no {CONFIG}; choose another run.name"
            )
        return 0, []
    has_begun = _has_begun(folder, steps)
    try:
        before = read_run_config(path)
        if before.parallel.dp < 1:
            raise config_error(
                "parallel.dp", before.parallel.dp, "must be positive in the folder of a run"
            )
    except ConfigError as error:
        if not has_begun:
            return 0, []
        raise CheckpointError(
            f"{path} not a valid configuration ({error}); choose another run.name"
        ) from None
    if has_begun:
        check_compatible(before, config, folder)
    old = to_mapping(before)
    new = to_mapping(config)
    changed = [
        f"{section}.{key}: {old[section].get(key)!r} -> {value!r}"
        for section, table in new.items()
        if section != "run"
        for key, value in table.items()
        if old[section].get(key) != value
    ]
    return _newest_step(folder / CHECKPOINTS, steps, config.train.num_steps), changed


def _newest_step(root: Path, steps: list[int], num_steps: int) -> int:
    """Return the newest step that can be loaded; 0 if there is none.

    Only checkpoints that would end the run are verified here; loading verifies the others.

    steps: newest first.
    """
    for step in steps:
        try:
            if step >= num_steps:
                check_files(folder_of(root, step), read_manifest(folder_of(root, step)))
            return step
        except CheckpointError:  # loading the checkpoint before it reports the damage
            continue
    return 0


def begin(config: Config, tokenizer: Tokenizer | None) -> None:
    """Write the files that a run folder has from the start."""
    folder = config.run.folder
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    files = tokenizer.files() if tokenizer is not None else {}
    _remove_left_files(folder, (CONFIG, MODEL_FOLDER, CHANGES, "kernels.json", *files))
    write_changed(folder / CONFIG, to_toml(config))
    own: list[type] = [type(config.model)] if config.model.spec else []
    own += [import_rule(config.optim.spec)] if config.optim.spec else []
    if own:
        write_changed(
            folder / MODEL_FOLDER,
            "".join(f"{path}\n" for path in dict.fromkeys(map(spec_folder, own))),
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_changed(folder / name, text)


def _remove_left_files(folder: Path, names: Iterable[str]) -> None:
    """Remove half-written files of a killed job: of `write_changed` and of Records."""
    asides = (folder / name for name in names)
    left = [path.with_name(f".{path.name}.part") for path in asides]
    # from Records, from write_text in their folders, and from require_shared
    for pattern in (".part.*", "..part.*.part", ".job-*"):
        left += [*folder.glob(pattern), *folder.glob(f"*/{pattern}")]
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_changed(path: Path, text: str) -> None:
    """Write a file unless it has this text: jobs restart on full disks. Raises: OSError."""
    if not path.is_file() or path.read_bytes() != as_bytes(text):
        write_text(path, text)


def flight_path(folder: Path, rank: int, thread: str = "") -> Path:
    """Return the path of the flight recorder of a rank, or of one of its threads."""
    return folder / FLIGHT / record_name(rank, thread)


def open_flight(job: JobPlan, rank: int, flight: Flight, thread: str = "") -> None:
    """Move the flight recorder of a rank, or of one of its threads, into the run folder.

    On a full disk the recorder stays in memory, where processes of this machine can read it.
    """
    config = job.config
    sizes = sizes_of(config.parallel)
    place = place_of(rank, sizes)
    axes = {name: line for name, lines in lines_of(sizes).items() for line in lines if rank in line}
    path = flight_path(config.run.folder, rank, thread)
    path.parent.mkdir(exist_ok=True)
    stages = job.shape.stages_of(place["pp"])
    who = {
        "rank": rank,
        "name": describe(rank, stages, place),
        "stage": place["pp"],
        "stages": list(stages),
        "place": place,
        "pid": os.getpid(),
        "timeout_s": config.faults.timeout_s,
        "num_microbatches": config.pipeline.num_microbatches,
        "axes": axes,
    }
    try:
        flight.move(path, who)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        flight.move_to_memory(path.name, who)


@dataclass(frozen=True)
class _Holder:
    """The job that has a run folder's lock.

    Attributes:
        pid: Process to end: the launcher, or rank 0 if there is no launcher that ends with it.
        rank_pid: Process id of rank 0.
        launcher: Process id of the launcher; 0 if there is none that ends with the job.
        launcher_began: Start time of the launcher in Linux clock ticks.
    """

    pid: int
    host: str
    since: float
    command: str
    rank_pid: int
    launcher: int
    launcher_began: str

    @staticmethod
    def of_this_process(launch: Launch) -> _Holder:
        launcher = (launch.supervisor or os.getppid()) if launch.elastic else 0
        command = shlex.join(["hybridpar", *launch.args] if launch.args else sys.argv)
        return _Holder(
            launcher or os.getpid(),
            platform.node(),
            time.time(),
            command,
            os.getpid(),
            launcher,
            _began(launcher),
        )

    @staticmethod
    def read(file: TextIO) -> _Holder | None:
        """Return the holder that a lock file names, or None if it names none."""
        file.seek(0)
        try:
            holder: _Holder = from_plain(_Holder, parse_json(file.read(_MOST_OF_LOCK)), "holder")
            return holder
        except (OSError, ValueError):
            return None

    def write(self, file: TextIO) -> None:
        """Write this job's data into its lock file; on a full disk the file stays empty."""
        with contextlib.suppress(OSError):
            file.truncate(0)
            # unbuffered: closing the file would repeat a failed write
            os.write(file.fileno(), json.dumps(asdict(self)).encode())

    @property
    def is_orphan(self) -> bool:
        """Whether the launcher has ended; False if unknown, as for a job of another host."""
        if not self.launcher or self.host != platform.node() or sys.platform != "linux":
            return False
        return not self.launcher_began or _began(self.launcher) != self.launcher_began

    def __str__(self) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        pid = self.rank_pid if self.is_orphan else self.pid
        return f"process {pid} on {self.host}, since {clock}, `{self.command}`"


def _began(pid: int) -> str:
    """Return the start time of a process in Linux clock ticks; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except OSError:
        return ""


@contextlib.contextmanager
def in_use(folder: Path, launch: Launch | None = None) -> Iterator[None]:
    """Lock the folder for one job at a time, where the file system has locks.

    The lock of a killed job is free at once. A job whose launcher has ended is waited for, because
    its watchdog ends it soon.

    Args:
        launch: This process's launch, which the lock file then names.

    Raises:
        ConfigError: Another job holds the folder, or the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # no links: a link in a copied folder may lead to any file
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(folder / ".lock", flags, 0o666)
    except OSError as error:
        raise config_error(
            "run.dir", str(folder.parent), f"cannot be written to ({error.strerror})", "runs"
        ) from None
    with os.fdopen(descriptor, "a+", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(file, folder)
            _Holder.of_this_process(launch or Launch(0, 0, 1, 1)).write(file)
        yield


def _lock(file: TextIO, folder: Path) -> None:
    """Take the lock. Raises: ConfigError if another job has it; OSError if there are no locks."""
    end = time.monotonic() + ORPHAN_S + _KILL_S
    said = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _Holder.read(file)
        if holder is None or not holder.is_orphan or time.monotonic() > end:
            rule = f"another job is training in {folder} right now"
            works = "another name, or wait until it has ended"
            if holder:
                rule = f"{rule}: {holder}"
                works = f"{works}, or end it: kill {holder.pid}"
            raise config_error("run.name", folder.name, rule, works)
        if not said:
            say(
                f"waiting for {holder}, whose launcher has ended: it saves, and ends within "
                f"{ORPHAN_S:.0f} s"
            )
            said = True
        time.sleep(_LOOK_AGAIN_S)


def require_shared(folder: Path, job: Job) -> None:
    """Check that every machine sees the run folder: rank 0 creates a file that the others look for.

    Collectives: on all processes of the job.
    Raises: ConfigError on all processes, naming each that does not find the file.
    """
    mark = folder / f".job-{job.decide(lambda: secrets.token_hex(8))}"

    def leave() -> bool:
        try:
            mark.touch()
        except OSError:  # for example a full disk, on which a run continues
            return False
        return True

    try:
        if job.decide(leave):
            job.together(lambda: _find(mark), here=job.launch.local_rank == 0)
    finally:
        if job.launch.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _find(mark: Path) -> None:
    end = time.monotonic() + _SEEN_AFTER_S
    while not os.path.exists(mark):
        if time.monotonic() > end:
            rule = (
                f"must be a folder that this machine shares with rank 0 (rank 0's has "
                f"{mark.parent.name}/{mark.name} in it): all machines write their part of a "
                f"checkpoint there"
            )
            raise config_error(
                "run.dir", str(mark.parent.parent), rule, "a folder on a shared file system"
            )
        time.sleep(0.1)
