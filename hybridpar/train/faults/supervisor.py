"""Supervise the ranks of a job on this machine: `hybridpar train CONFIG.toml --ranks 4`.

    ranks      run as under torchrun, and record their progress (hybridpar.flight)
    watching   ten times a second: has one ended; does one hang; do all wait (limits of [faults])
    failure    diagnose.py names the rank; a save in progress gets some seconds to end; all ranks
               are ended
    restart    from the last good checkpoint; on fewer ranks if one has failed twice in a row
               without a new checkpoint and the grid allows it; not at all after faults.restarts
               times without a new checkpoint

torchrun's agent (torch.distributed.elastic) starts, ends and restarts the processes;
`_monitor_workers` tells it when. torchrun itself could restart ranks (--max-restarts), and they
would resume from the last checkpoint, but it sees only processes that end: neither a rank that
hangs, nor which of several ended ranks was the cause. Its rendezvous also listens on every
interface, and the one here on loopback only. A job of several machines uses torchrun.
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
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hybridpar import flight
from hybridpar.checkpoint import saved_steps
from hybridpar.checkpoint.folders import half_written
from hybridpar.config import JOB, Config, pass_on_signals
from hybridpar.train.faults.agent import RankAgent, run_agent
from hybridpar.train.faults.diagnose import Diagnosis, Seen, diagnose, find_stall
from hybridpar.train.faults.inject import Fault, parse_faults
from hybridpar.train.faults.out_of_memory import OomKiller
from hybridpar.train.faults.shrink import shrink
from hybridpar.train.faults.starting import StartWatch, waiting
from hybridpar.train.faults.watchdog import ORPHAN_S, SAVING, is_stopped, record_name
from hybridpar.train.folder import CHECKPOINTS, FAILURES, FLIGHT
from hybridpar.train.launching.launch import LOOPBACK
from hybridpar.train.reporting.console import say
from hybridpar.train.reporting.records import Records
from hybridpar.train.stop import numbers_of
from hybridpar.validate import resolve

_LOOK_EVERY_S = 0.1
_ASLEEP_S = 2.0
_LONG_S = 1.0
_SETTLE_S = 0.3
"""Pause after a failure, so that ranks that end together are seen together."""
_REFUSED_S = 5.0
"""Time that the first rank has to report an error that other ranks refused to start with, too."""
_LAST_SAVE_S = 3.0
HANDLED_SIGNALS = ("HUP", "INT", "QUIT", "TERM")
"""Signals that are always passed on, so that no rank is left running."""
_STOP_S = round(ORPHAN_S)
"""Time that ranks have to finish and save after Ctrl-C."""


def supervise(
    config: Config,
    num_ranks: int,
    args: Sequence[str],
    inject: Sequence[str] = (),
    advise: Callable[[Config], str] | None = None,
) -> int:
    """Run `python -m hybridpar *args` on ranks of this machine; restart them after failures.

    Args:
        args: Arguments of each rank.
        advise: Returns advice for a resolved configuration that needs too much memory.

    Returns the exit code. Raises: ConfigError, before anything is started.
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
    """Run `python -m hybridpar *args` once on ranks of this machine, and return the exit code."""
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


class Supervisor(RankAgent):
    """The agent of a job on this machine."""

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
        self._records = Records(self._folder, say)
        self._records.begin(FAILURES)
        self._unwritten: list[bytes] = []
        self._newest = self._saved()
        self._blamed = -1
        self._left: set[tuple[str, int]] = set()  # checkpoints that will not be published
        self.exit_code = 1
        self.last_failure: Diagnosis | None = None
        super().__init__(_spec(self._ranks, args, config.faults.restarts), _STOP_S)

    def close(self) -> None:
        """Close all files; wait some seconds if failures.jsonl cannot be written."""
        self._records.finish()
        self._records.close()
        self._oom.close()
        self._watch.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._records.retry()
        self._oom.look()
        assert self._start is not None
        seen = self._look()
        began = time.time()
        self._start.look(seen)
        if self._unwritten and all(one.record is not None for one in seen):
            self._write_failures()
        if all(one.exit_code == 0 for one in seen):
            return super()._monitor_workers(worker_group)
        failed = any(one.failed for one in seen)
        if not failed and not find_stall(seen):
            # torch's own check would end all ranks when it finds one that has failed
            return RunResult(WorkerState.HEALTHY)
        if failed:
            time.sleep(_SETTLE_S)
        found = diagnose(self._look())
        end = time.monotonic() + _REFUSED_S
        while found.kind == "refused" and found.rank > 0 and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
            found = diagnose(self._look())
        found = self._explain_kill(found)
        if found.rank != 0:  # rank 0 publishes checkpoints
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
        """Add the kernel's evidence about a SIGKILL that nobody here has sent."""
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
        """Count the restarts that are left; return a smaller grid's configuration if need be."""
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
        # the last of repeated flags counts
        spec.args = ("-m", "hybridpar", *self._args, *map(str, flags))

    def _note(self, found: Diagnosis, began: float, smaller: Config | None) -> None:
        """Report a failure on stderr and in failures.jsonl."""
        left = self._remaining_restarts
        what = "; no restarts are left (faults.restarts)"
        if found.is_final:
            what = ""
        elif left:
            what = f"; starting again after step {self._saved()}"
        lines = [f"{found.text}{what}", *(f"  meanwhile {victim}" for victim in found.victims)]
        if smaller is not None:
            lines.append(
                f"  without rank {found.rank}, which has failed twice and saved nothing: on "
                f"{smaller.parallel.num_ranks} ranks, parallel.dp = {smaller.parallel.dp}, "
                + f"parallel.sites = {smaller.parallel.sites}, " * (self._config.parallel.sites > 1)
                + f"pipeline.num_microbatches = {smaller.pipeline.num_microbatches}"
            )
        if found.kind != "refused" or found.rank > 0:  # rank 0 has reported a refusal itself
            say("\n".join(lines))
        line = found.as_json() | {
            "time": began,
            "saved": self._saved(),
            "ranks": self._ranks,
            "restarts_left": left,
        }
        # after a refusal without a record the folder may belong to another job
        if found.kind != "refused" or found.record is not None:
            self._unwritten.append(f"{json.dumps(line)}\n".encode())
        self._write_failures()

    def _write_failures(self) -> None:
        """Write pending lines to failures.jsonl, once the first ranks have created the folder."""
        if not self._folder.is_dir():
            return
        for line in self._unwritten:
            self._records.append(FAILURES, line)
        self._unwritten.clear()

    def _await_save(self) -> None:
        """Give living ranks some seconds to publish the checkpoint that they are writing."""
        end = time.monotonic() + _LAST_SAVE_S
        while time.monotonic() < end and half_written(self._folder / CHECKPOINTS) - self._left:
            time.sleep(_LOOK_EVERY_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._begin_start()
        return super()._start_workers(worker_group)

    def _begin_start(self) -> None:
        self._left = half_written(self._folder / CHECKPOINTS)
        self._oom.begin()
        self._start = StartWatch(self._ranks, say)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGKILL)  # the remaining ranks wait for the one that failed
        if self._is_short and self._advise is not None:
            # only now, because the prediction takes seconds, and memory that is free again
            advise = self._advise
            self._advise = None
            say(advise(self._config))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks, at once if some do not train yet: then there is nothing to save."""
        if death_sig is not signal.SIGKILL and self._pcontext is not None and waiting(self._look()):
            saved = self._saved()
            kept = f"; the run is at step {saved}" if saved else ""
            say(
                f"{death_sig.name}: ending all {self._ranks} ranks, which had not begun to "
                f"train{kept}"
            )
            death_sig = signal.SIGKILL
        super()._shutdown(death_sig, timeout)

    def _saved(self) -> int:
        return max(saved_steps(self._folder / CHECKPOINTS), default=0)


class Watch:
    """Reads the flight records of running processes and their saving threads.

    The time without progress restarts after a long pause, in which the machine was probably asleep,
    or this process was stopped together with its ranks.
    """

    def __init__(self, folder: Path, patience_s: float = 0.0, start_timeout_s: float = 0.0):
        self.folder = folder / FLIGHT
        self.patience_s = patience_s
        self.start_timeout_s = start_timeout_s
        self._looked = 0.0
        self._observers: dict[str, flight.Observer] = {}

    def close(self) -> None:
        """Close the records."""
        for observer in self._observers.values():
            observer.close()
        self._observers.clear()

    def look(self, processes: Mapping[int, Popen[Any]]) -> list[Seen]:
        """Return the state of all processes in the order of their ranks."""
        now = time.monotonic()
        found = []
        if now - self._looked > _ASLEEP_S:
            for observer in self._observers.values():
                observer.restart()
        self._looked = now
        for rank, process in sorted(processes.items()):
            # the exit code first: a record that is read afterwards is then final
            code = process.poll()
            pid = process.pid
            record, idle_s = self._read(record_name(rank), pid)
            saving, saving_idle_s = self._read(record_name(rank, SAVING), pid)
            saves = code is None and saving is not None and saving.limit_s > 0
            saver = Seen(rank, saving, None, saving_idle_s) if saves else None
            stopped = code is None and idle_s > _LONG_S and is_stopped(pid)
            early = record if record is not None and "place" not in record.who else None
            # without records in memory, a rank that tokenizes for hours looks like one that hangs
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
        """Return a record of the process `pid`, and how long it has not changed."""
        observer = self._observers.get(name)
        if observer is None or observer.pid != pid:
            if observer is not None:
                observer.close()
            observer = self._observers[name] = flight.Observer(pid, name, self.folder)
        return observer.look()


class Loopback(StaticTCPRendezvous):
    """The rendezvous of an agent on this machine: each round has its own store on loopback."""

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
