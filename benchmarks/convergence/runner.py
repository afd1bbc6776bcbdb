"""Trains what has no result yet, a process a run, a few at a time.

results/<model>/<run>.json    done: skipped from now on           outdated: of another configuration, trained anew
<work>/<model>/<run>/         under way: the run folder, removed once its result is written; goes on
                              after a stop
<work>/<model>/<run>.log      what the training printed
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.convergence import results
from benchmarks.convergence.study import Variant, changes_of, comparable, config_of
from hybridpar.checkpoint.format.files import write_text
from hybridpar.config import Config, load_toml, to_toml
from hybridpar.errors import ConfigError
from hybridpar.train.folder import CONFIG, METRICS
from hybridpar.train.reporting.run_metrics import read_metrics

_POLL_S = 0.2
DONE = "done"
OUTDATED = "outdated"
LEFT = "left"


@dataclass(frozen=True)
class Item:
    """One run of the study. `config` knows no folders yet."""

    variant: str
    config: Config
    changes: Mapping[str, Any]

    @property
    def model(self) -> str:
        return self.config.model.kind

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"


@dataclass(frozen=True)
class Folders:
    """Folders of the study: `results` stay, and runs train below `work`."""

    results: Path
    work: Path

    def config_of(self, item: Item) -> Config:
        """The configuration of `item` with its folders, which the runs of a model share the
        prepared corpus of."""
        config = item.config
        work = self.work.resolve()
        return replace(
            config,
            run=replace(config.run, name=item.name, dir=str(work / item.model)),
            data=replace(config.data, cache=config.data.cache or str(work / "data")),
        )


def items_of(
    base: Config, variants: Sequence[Variant], seeds: Sequence[int] | None = None
) -> Iterator[Item]:
    """The runs of `variants`, those of one seed together; `seeds`: only these."""
    for seed in sorted({seed for variant in variants for seed in variant.seeds}):
        if seeds is None or seed in seeds:
            for variant in variants:
                if seed in variant.seeds:
                    yield Item(
                        variant.name, config_of(base, variant, seed), changes_of(base, variant)
                    )


def state_of(item: Item, folder: Path) -> str:
    """DONE, OUTDATED (the result is of another configuration) or LEFT."""
    path = results.path_of(folder, item.model, item.variant, item.seed)
    if not path.exists():
        return LEFT
    return DONE if results.is_of(results.read(path), item.config) else OUTDATED


def run_all(
    items: Sequence[Item], folders: Folders, workers: int, say: Callable[[str], None]
) -> list[str]:
    """Trains `items`, `workers` at a time, and writes their results; returns the names of those
    that failed.

    SIGINT and SIGTERM: lets the runs save and leave, then raises KeyboardInterrupt.
    """
    waiting = list(items)
    failed = []
    running: dict[subprocess.Popen[bytes], Item] = {}
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                item = waiting.pop(0)
                running[_start(item, folders)] = item
                say(f"{item.model} {item.name}: started, {len(waiting)} more to start")
            time.sleep(_POLL_S)
            for process in [p for p in running if p.poll() is not None]:
                item = running.pop(process)
                problem = _finish(item, process.returncode, folders)
                say(f"{item.model} {item.name}: {problem or 'done'}")
                failed += [item.name] if problem else []
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _start(item: Item, folders: Folders) -> subprocess.Popen[bytes]:
    config = folders.config_of(item)
    forget_other_run(config)
    config.run.folder.parent.mkdir(parents=True, exist_ok=True)
    toml = config.run.folder.with_name(f"{item.name}.toml")
    write_text(toml, to_toml(config))
    environment = os.environ | {"OMP_NUM_THREADS": str(max(config.train.threads, 1))}
    with config.run.folder.with_name(f"{item.name}.log").open("ab") as log:
        # a session of its own: Ctrl-C reaches it once, through us
        return subprocess.Popen(
            [sys.executable, "-m", "hybridpar", "train", str(toml)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def forget_other_run(config: Config) -> None:
    """Removes a run folder that was begun with a configuration of other numbers, so that it is not
    gone on with."""
    folder = config.run.folder
    if not folder.exists():
        return
    try:
        begun = load_toml(folder / CONFIG)
        same = comparable(replace(begun, parallel=config.parallel)) == comparable(config)
    except ConfigError:
        same = False
    if not same:
        shutil.rmtree(folder)


def _finish(item: Item, exit_code: int, folders: Folders) -> str:
    """Writes the result of a run that has ended and removes its folder; says what is wrong, if
    something is."""
    config = folders.config_of(item)
    folder = config.run.folder
    if exit_code:
        return f"exit code {exit_code}, see {folder.with_name(f'{item.name}.log')}"
    try:
        result = results.harvest(
            read_metrics(folder / METRICS), item.config, item.changes, machine(), item.variant
        )
    except ValueError as error:
        return str(error)
    results.write(result, folders.results)
    shutil.rmtree(folder)
    return ""
