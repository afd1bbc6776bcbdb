"""`hybridpar train CONFIG.toml --ranks 4`: starts the ranks, watches them, says who failed, and
starts them again.

    ranks      run as under torchrun, and note what they do (hybridpar.flight)
    watching   ten times a second: has one ended; does one hang; do all wait (limits of [faults])
    failure    diagnose.py names the rank; a save under way gets some seconds to end; all ranks are
               ended
    again      from the last good checkpoint; on fewer ranks where one has failed twice in a row
               without a new one and the grid allows it; not at all after faults.restarts times
               without a new one

torchrun's agent (torch.distributed.elastic) starts and ends the processes, and starts them again;
here it is told when, by `_monitor_workers`. torchrun itself could do it (--max-restarts; its ranks
go on from the last checkpoint, too), but it sees only processes that end: neither a rank that hangs
nor, of several that end, the one that was to blame. And its rendezvous listens on every interface,
this one on loopback alone. A job of several machines uses torchrun.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hybridpar import flight
from hybridpar.checkpoint import saved_steps
from hybridpar.checkpoint.folders import half_written
from hybridpar.config import JOB, Config, pass_on_signals
from hybridpar.train.faults.agent import RankAgent
from hybridpar.train.faults.diagnose import Diagnosis, Seen, diagnose, find_stall
from hybridpar.train.faults.inject import Fault, parse_faults
from hybridpar.train.faults.out_of_memory import OomKiller
from hybridpar.train.faults.shrink import shrink
from hybridpar.train.faults.starting import StartWatch, waiting
from hybridpar.train.faults.watchdog import ORPHAN_S, SAVING, is_stopped, record_name
from hybridpar.train.folder import CHECKPOINTS, FAILURES, FLIGHT
from hybridpar.train.launch import LOOPBACK
from hybridpar.train.reporting.records import Records
from hybridpar.train.stop import numbers_of
from hybridpar.validate import resolve

_LOOK_EVERY_S = 0.1
_ASLEEP_S = 2.0
_LONG_S = 1.0
_SETTLE_S = 0.3
"""Ranks that end together are seen together."""
_REFUSED_S = 5.0
"""How long the first rank may take to say what others have refused with it."""
_LAST_SAVE_S = 3.0
HANDLED_SIGNALS = ("HUP", "INT", "QUIT", "TERM")
"""Signals that are passed on in any case, so that no rank is left behind."""
_STOP_S = round(ORPHAN_S)
"""How long ranks may take to finish and save after Ctrl-C."""


def supervise(
    config: Config,
    num_ranks: int,
    args: Sequence[str],
    inject: Sequence[str] = (),
    advise: Callable[[Config], str] | None = None,
) -> int:
    """Runs `python -m hybridpar *args` on so many ranks until it has ended well, or must be given
    up; the exit code.

    advise: Returns what makes a resolved configuration need less memory, for a rank that had too
    little.
    Raises: ConfigError, before anything is started.
    """
    config = resolve(config, num_ranks)
    agent = Supervisor(config, args, parse_faults(inject, config), advise)
    handled = sorted({*HANDLED_SIGNALS, *config.train.stop_signals})
    pass_on_signals(number.name for number in numbers_of(handled))
    try:
        code = run_agent(agent)
    finally:
        agent.close()
    return agent.exit_code if code == 1 else code


def run_ranks(num_ranks: int, args: Sequence[str]) -> int:
    """Runs `python -m hybridpar *args` on so many ranks of this machine, once; the exit code."""
    return run_agent(RankAgent(_spec(num_ranks, args, restarts=0), 0), logging.CRITICAL)


def _spec(num_ranks: int, args: Sequence[str], restarts: int) -> WorkerSpec:
    return WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=Loopback(),
        entrypoint=sys.executable,
        args=("-m", "hybridpar", *args),
        max_restarts=restarts,
        monitor_interval=_LOOK_EVERY_S,
    )


def run_agent(agent: RankAgent, log_level: int = logging.ERROR) -> int:
    """Runs an agent to its end; 0, 1 where its ranks have failed, 128 + n where signal n has ended
    them."""
    for name in ("agent.server.api", "multiprocessing.api"):  # each has a level of its own
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(log_level)
    try:
        return 1 if agent.run().is_failed() else 0
    except SignalException as stopped:
        return 128 + stopped.sigval.value
    finally:
        agent.end_ranks()


class Supervisor(RankAgent):
    """The agent of one job, which is on this machine."""

    def __init__(
        self,
        config: Config,
        args: Sequence[str],
        faults: Sequence[Fault],
        advise: Callable[[Config], str] | None = None,
    ):
        self._config = config
        self._args = tuple(args)
        self._faults = faults
        self._folder = config.run.folder
        self._ranks = config.parallel.num_ranks
        self._watch = Watch(self._folder, config.faults.patience_s, config.faults.start_timeout_s)
        self._oom = OomKiller()
        self._advise = advise
        self._is_short = False
        self._start: StartWatch | None = None
        self._records = Records(self._folder, self._say)
        self._records.begin(FAILURES)
        self._unwritten: list[bytes] = []
        self._newest = self._saved()
        self._blamed = -1
        self._left: set[tuple[str, int]] = set()  # checkpoints that will not be published
        self.exit_code = 1
        self.last_failure: Diagnosis | None = None
        super().__init__(_spec(self._ranks, args, config.faults.restarts), _STOP_S)

    def close(self) -> None:
        """Waits some seconds where failures.jsonl cannot be written."""
        self._records.finish()
        self._records.close()
        self._oom.close()
        self._watch.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._records.retry()
        self._oom.look()
        assert self._start is not None
        seen, began = self._look(), time.time()
        self._start.look(seen)
        if self._unwritten and all(one.record is not None for one in seen):
            self._write_failures()
        if all(one.exit_code == 0 for one in seen):
            return super()._monitor_workers(worker_group)
        failed = any(one.failed for one in seen)
        if not failed and not find_stall(seen):
            return RunResult(
                WorkerState.HEALTHY
            )  # torch's own look would end all where it finds one that has failed
        if failed:
            time.sleep(_SETTLE_S)
        found = diagnose(self._look())
        end = time.monotonic() + _REFUSED_S
        while found.kind == "refused" and found.rank > 0 and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
            found = diagnose(self._look())
        found = self._explain_kill(found)
        if found.rank != 0:  # which publishes
            self._await_save()
        self.last_failure = found
        smaller = self._account(found)
        self._note(found, began, smaller)
        if smaller is not None:
            self._resize(smaller)
        return RunResult(WorkerState.FAILED)

    def _look(self) -> list[Seen]:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._watch.look(
            {rank: one.proc for rank, one in self._pcontext.subprocess_handlers.items()}
        )

    def _explain_kill(self, found: Diagnosis) -> Diagnosis:
        """Adds what the kernel knows of a SIGKILL that nobody of ours has sent."""
        injected = any(
            fault.rank == found.rank and fault.kind in ("kill", "lose") for fault in self._faults
        )
        if found.kind != "died" or found.exit_code != -signal.SIGKILL or injected:
            return found
        assert isinstance(self._pcontext, SubprocessContext)
        evidence = self._oom.evidence(self._pcontext.subprocess_handlers[found.rank].proc.pid)
        self._is_short = self._is_short or evidence.startswith("out of memory")
        return replace(found, text=f"{found.text}; {evidence}") if evidence else found

    def _account(self, found: Diagnosis) -> Config | None:
        """Counts the restarts that are left; returns the configuration of a smaller job where a
        rank stays away."""
        newest = self._saved()
        before = self._newest
        smaller = None
        if newest > before:
            self._newest = newest
            self._remaining_restarts = self._worker_group.spec.max_restarts
        elif self._blamed == found.rank >= 0:
            smaller = shrink(self._config, self._ranks - 1)
        self._blamed = found.rank
        self.exit_code = found.exit_code if found.kind == "stopped" else 1
        if found.is_final:
            self._remaining_restarts = 0
        return smaller if self._remaining_restarts else None

    def _resize(self, config: Config) -> None:
        self._config = config
        self._ranks = config.parallel.num_ranks
        self._blamed = -1
        fitting = [
            fault.text for fault in self._faults if max(fault.rank, fault.peer) < self._ranks
        ]
        flags = (
            "--parallel.dp",
            config.parallel.dp,
            "--parallel.sites",
            config.parallel.sites,
            "--pipeline.num_microbatches",
            config.pipeline.num_microbatches,
            "--inject",
            *fitting,
        )
        spec = self._worker_group.spec
        spec.local_world_size = self._ranks
        spec.args = (
            "-m",
            "hybridpar",
            *self._args,
            *map(str, flags),
        )  # of a flag that is there twice the last counts

    def _note(self, found: Diagnosis, began: float, smaller: Config | None) -> None:
        """Reports a failure on stderr and in failures.jsonl."""
        left = self._remaining_restarts
        what = (
            ""
            if found.is_final
            else (
                f"; starting again after step {self._saved()}"
                if left
                else "; no restarts are left (faults.restarts)"
            )
        )
        lines = [f"{found.text}{what}", *(f"  meanwhile {victim}" for victim in found.victims)]
        if smaller is not None:
            lines.append(
                f"  without rank {found.rank}, which has failed twice and saved nothing: on "
                f"{smaller.parallel.num_ranks} ranks, parallel.dp = {smaller.parallel.dp}, "
                + f"parallel.sites = {smaller.parallel.sites}, " * (self._config.parallel.sites > 1)
                + f"pipeline.num_microbatches = {smaller.pipeline.num_microbatches}"
            )
        if found.kind != "refused" or found.rank > 0:  # the first rank has said it, as that of all
            self._say("\n".join(lines))
        line = found.as_json() | {
            "time": began,
            "saved": self._saved(),
            "ranks": self._ranks,
            "restarts_left": left,
        }
        begun = (
            found.kind != "refused" or found.record is not None
        )  # else the folder may be another job's
        if begun:
            self._unwritten.append(f"{json.dumps(line)}\n".encode())
        self._write_failures()

    def _write_failures(self) -> None:
        """Write what failed to failures.jsonl; before the first ranks make the folder it waits."""
        if not self._folder.is_dir():
            return
        for line in self._unwritten:
            self._records.append(FAILURES, line)
        self._unwritten.clear()

    def _await_save(self) -> None:
        """Gives ranks that live some seconds to publish the checkpoint that they are writing."""
        end = time.monotonic() + _LAST_SAVE_S
        while time.monotonic() < end and half_written(self._folder / CHECKPOINTS) - self._left:
            time.sleep(_LOOK_EVERY_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._begin_start()
        return super()._start_workers(worker_group)

    def _begin_start(self) -> None:
        self._left = half_written(self._folder / CHECKPOINTS)
        self._oom.begin()
        self._start = StartWatch(self._ranks, self._say)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGKILL)  # those that are left wait for the one that failed
        if (
            self._is_short and self._advise is not None
        ):  # a prediction takes memory, which is free now, and seconds
            advise = self._advise
            self._advise = None
            self._say(advise(self._config))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks, at once if some have not begun to train: then none has anything to
        save."""
        if death_sig is not signal.SIGKILL and self._pcontext is not None and waiting(self._look()):
            saved = self._saved()
            kept = f"; the run is at step {saved}" if saved else ""
            self._say(
                f"{death_sig.name}: ending all {self._ranks} ranks, which had not begun to "
                f"train{kept}"
            )
            death_sig = signal.SIGKILL
        super()._shutdown(death_sig, timeout)

    def _saved(self) -> int:
        return max(saved_steps(self._folder / CHECKPOINTS), default=0)

    @staticmethod
    def _say(text: str) -> None:
        print(f"hybridpar: {text}", file=sys.stderr, flush=True)


class Watch:
    """Reads the flight records of the running processes and of their threads that save, and how
    long they stand still.

    After a long pause that time begins anew: the machine was perhaps asleep, or this process was
    stopped together with its ranks.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0, start_timeout_s: float = 0.0):
        self.folder = folder / FLIGHT
        self.patience_s = patience_s
        self.start_timeout_s = start_timeout_s
        self._looked = 0.0
        self._observers: dict[str, flight.Observer] = {}

    def close(self) -> None:
        """Closes the records."""
        for observer in self._observers.values():
            observer.close()
        self._observers.clear()

    def look(self, processes: Mapping[int, Popen[Any]]) -> list[Seen]:
        """The state of all processes, in the order of their ranks."""
        now = time.monotonic()
        found = []
        if now - self._looked > _ASLEEP_S:
            for observer in self._observers.values():
                observer.restart()
        self._looked = now
        for rank, process in sorted(processes.items()):
            # first the one: what it then has noted was its last
            code = process.poll()
            pid = process.pid
            record, idle_s = self._read(record_name(rank), pid)
            saving, saving_idle_s = self._read(record_name(rank, SAVING), pid)
            saves = code is None and saving is not None and saving.limit_s > 0
            saver = Seen(rank, saving, None, saving_idle_s) if saves else None
            stopped = code is None and idle_s > _LONG_S and is_stopped(pid)
            early = record if record is not None and "place" not in record.who else None
            # without records in memory a rank that prepares its text for hours looks like one that
            # hangs
            start_timeout_s = self.start_timeout_s if flight.HAS_MEMORY else 0.0
            found.append(
                Seen(
                    rank,
                    None if early else record,
                    code,
                    idle_s,
                    saver,
                    self.patience_s,
                    stopped,
                    early,
                    start_timeout_s,
                )
            )
        return found

    def _read(self, name: str, pid: int) -> tuple[flight.Record | None, float]:
        """The record of this name that the process `pid` has written, and for how long it has not
        changed."""
        observer = self._observers.get(name)
        if observer is None or observer.pid != pid:
            if observer is not None:
                observer.close()
            observer = self._observers[name] = flight.Observer(pid, name, self.folder)
        return observer.look()


class Loopback(StaticTCPRendezvous):
    """The rendezvous of one agent on this machine: every round has a store of its own, on the
    loopback interface."""

    def __init__(self) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, f"{JOB}{os.getpid()}", timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        listening = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))
