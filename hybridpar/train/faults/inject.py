"""Inject faults, each once in a job's life even if the job restarts:
`--inject "kill rank 3 at step 20"`.

    kill rank 3 at step 20              SIGKILL
    lose rank 3 at step 20              the same, and the rank never restarts (on a grid of that
                                        size)
    hang rank 1 at step 7               it stops, and stays alive
    hang save rank 1 at step 10         the same for the thread that writes the next checkpoint
    slow link 0-1 at step 5 for 3 s     one message from rank 0 to rank 1 is delayed
    cut link 0-1 at step 5              ... and never sent
    outage rank 1 at step 5 for 3 s     the kernel drops all packets to rank 1, and TCP resends them
    corrupt shard at step 10            one bit flips in rank 0's file of the next checkpoint
    disk full at step 10                that file cannot be written: training continues without the
                                        checkpoint
    nan gradient rank 2 at step 4       the gradient of one of its micro-batches is not finite

`stage 1` stands for the first rank that holds the stage. File faults accept a rank:
`disk full rank 2 at ...`. Steps count from 1 and mean the step in progress; `micro-batch 0` selects
its first micro-batch. kill, lose and hang also accept step 0, the set-up. The next checkpoint is
the checkpoint of the step, or the first one after it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridpar import sockets
from hybridpar.checkpoint import Saver, saved_steps
from hybridpar.checkpoint.background import Write
from hybridpar.checkpoint.handover import Written, writers
from hybridpar.config import Config
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.flight import Flight
from hybridpar.grid import Axis, place_of, sizes_of
from hybridpar.schedules.action import PER_BATCH, PER_ITEM, Action, Kind
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.train.engine import Engine
from hybridpar.train.folder import CHECKPOINTS, INJECTED

_WHO = r"(?P<where>rank|stage) (?P<rank>\d+)"
_WHEN = r"at step (?P<step>\d+)(?: micro-batch (?P<microbatch>\d+))?"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?P<kind>kill|lose|hang|nan gradient) {_WHO} {_WHEN}",
        rf"(?P<kind>slow link) (?P<rank>\d+)-(?P<peer>\d+) {_WHEN} for "
        rf"(?P<seconds>\d+(?:\.\d+)?) s",
        rf"(?P<kind>outage) {_WHO} {_WHEN} for (?P<seconds>\d+(?:\.\d+)?) s",
        rf"(?P<kind>cut link) (?P<rank>\d+)-(?P<peer>\d+) {_WHEN}",
        rf"(?P<kind>corrupt shard|disk full|hang save)(?: {_WHO})? {_WHEN}",
    )
)
_SAVING = ("corrupt shard", "disk full", "hang save")
_ANYWHERE = ("kill", "lose", "hang")
"""Faults that need no action to happen in."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        rank: Rank that has the fault; of a link the sender.
        step: Step of the fault, from 1; 0 for the set-up.
        microbatch: Micro-batch of the step; -1: its first action.
        peer: Receiver of a link; -1 for other faults.
        seconds: Duration of a slow link or an outage.
    """

    text: str
    kind: str
    rank: int
    step: int
    microbatch: int = -1
    peer: int = -1
    seconds: float = math.inf

    @property
    def name(self) -> str:
        """Name of its marker file in the run folder."""
        return re.sub(r"[^a-z0-9.]+", "-", self.text)


def parse_faults(texts: Sequence[str], config: Config) -> tuple[Fault, ...]:
    """Parse faults for the resolved grid of `config`. Raises: ConfigError with all problems."""
    found: list[Fault] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            found.append(parse_fault(text, config))
            if texts.count(text) > 1:
                rule = "given twice; a fault happens once"
                raise config_error("inject", text, rule, "another step for one of them")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return tuple(found)


def parse_fault(text: str, config: Config) -> Fault:
    """Parse one fault. Raises: ConfigError."""
    match = next(
        (match for form in _FORMS if (match := form.fullmatch(" ".join(text.split())))), None
    )
    if match is None:
        raise config_error(
            "inject",
            text,
            "must be one of 'kill|lose|hang rank R at step S', 'slow link A-B at step S for T s', "
            "'cut link A-B at step S', 'outage rank R at step S for T s', "
            "'corrupt shard|disk full|hang save at step S', 'nan gradient rank R at step S'",
            '"kill rank 0 at step 2"',
        )
    parts: dict[str, Any] = match.groupdict()
    parallel = config.parallel
    m = config.pipeline.num_microbatches
    ranks = parallel.num_ranks
    stages = parallel.pp * config.pipeline.num_virtual_stages

    def wrong(rule: str, works: str) -> ConfigError:
        return config_error("inject", text, rule, works)

    rank = int(parts["rank"] or 0)
    if parts.get("where") == "stage":
        if rank >= stages:
            raise wrong(
                f"the pipeline has {stages} stages, 0 to {stages - 1}", f"stage {stages - 1}"
            )
        rank = rank % parallel.pp * parallel.tp * parallel.dp_cp
    fault = Fault(
        text,
        parts["kind"],
        rank,
        int(parts["step"]),
        int(parts.get("microbatch") or -1),
        int(parts.get("peer") or -1),
        float(parts.get("seconds") or math.inf),
    )
    first = 0 if fault.kind in _ANYWHERE and fault.microbatch < 0 else 1
    last = config.train.num_steps
    if max(rank, fault.peer) >= ranks:
        rule = f"the job has {ranks} ranks, 0 to {ranks - 1}, on {parallel.pp} stages"
        raise wrong(rule, "rank 0")
    if fault.kind == "outage" and sys.platform != "linux":
        raise wrong("the kernel must be Linux", "cut link 0-1 at step 5")
    if "link" in fault.kind and rank == fault.peer:
        raise wrong("a link is between two ranks", f"{fault.kind} 0-1")
    if not first <= fault.step <= last:
        raise wrong(f"steps are {first} to train.num_steps = {last}", f"step {last}")
    if fault.microbatch >= m:
        raise wrong(f"micro-batches of a step are 0 to {m - 1}", f"micro-batch {m - 1}")
    sizes = sizes_of(parallel)
    writing = writers(sizes, config.replicas_differ)
    if fault.kind in _SAVING and place_of(rank, sizes) not in writing:
        rule = f"rank {rank} writes no checkpoint file; only ranks of replica 0 do"
        raise wrong(rule, "rank 0")
    return fault


class Injector:
    """Injects the faults of one rank that have not happened yet."""

    def __init__(self, faults: Iterable[Fault], folder: Path, rank: int, flight: Flight):
        self.pending: list[Fault] = []
        self._folder = folder
        self._flight = flight
        self._attached: Engine | None = None
        for fault in (fault for fault in faults if fault.rank == rank):
            if not (folder / INJECTED / fault.name).exists():
                self.pending.append(fault)
            elif fault.kind == "lose":  # permanently
                os.kill(os.getpid(), signal.SIGKILL)

    def attach(self, engine: Engine, saver: Saver) -> None:
        """Enable faults from now on; the faults of step 0 happen at once."""
        if self.pending:
            self._attached = engine
            saver.write_with(self._wrap)
        for fault in [fault for fault in self.pending if fault.step == 0]:
            self._mark(fault)
            self._stop_here(fault)

    @property
    def _engine(self) -> Engine:
        assert self._attached is not None, "faults happen to an engine that is attached"
        return self._attached

    def wrap_plan(self, actions: Iterator[Action]) -> Iterator[Action]:
        """Inject the faults into an engine's plan."""
        return self._faulty(actions) if self.pending else actions

    def _faulty(self, actions: Iterator[Action]) -> Iterator[Action]:
        for action in actions:
            due = [fault for fault in self.pending if self._is_due(fault, action)]
            hooks: list[Any] = []
            for fault in due:
                self._mark(fault)
                self._flight.action(action.kind, action.stage, action.microbatch, action.version)
                hooks += self._happen(fault, action)
            yield action
            for hook in hooks:
                hook.remove()

    def _is_due(self, fault: Fault, action: Action) -> bool:
        m = self._engine.shape.num_microbatches
        batch = action.microbatch
        index = -1
        if action.kind not in PER_BATCH:
            batch, index = divmod(action.microbatch, m)
        if action.kind in PER_ITEM or fault.kind in _SAVING or batch + 1 != fault.step:
            return False
        if fault.microbatch >= 0 and index != fault.microbatch:
            return False
        if "link" in fault.kind:
            return _is_over_link(action, self._engine.grid.pp, self._engine.shape, fault.peer)
        return fault.kind != "nan gradient" or action.kind in (Kind.B, Kind.I)

    def _happen(self, fault: Fault, action: Action) -> list[Any]:
        """Inject a fault; return the hooks to remove after the action."""
        if fault.kind == "nan gradient":
            leaves = self._engine.state.weights.leaves_of(action.version)
            return [
                leaf.register_hook(lambda gradient: gradient * math.nan) for leaf in leaves.values()
            ]
        if fault.kind == "outage":
            threading.Thread(target=_be_deaf, args=[fault.seconds], daemon=True).start()
            return []
        if "link" in fault.kind:
            self._flight.wait("send", "world", fault.peer)
        self._stop_here(fault)
        self._flight.go_on()
        return []

    @staticmethod
    def _stop_here(fault: Fault) -> None:
        """End this process, or block this thread for the fault's time."""
        if fault.kind in ("kill", "lose"):
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + fault.seconds
        while time.monotonic() < end:
            time.sleep(min(end - time.monotonic(), 1.0))

    def _wrap(self, write: Write) -> Write:
        fault = next(
            (f for f in self.pending if f.kind in _SAVING and f.step <= self._engine.batches_done),
            None,
        )
        if fault is None:
            return write
        self._mark(fault)

        def corrupt(tensors: dict[str, Tensor]) -> Written:
            written = write(tensors)
            (part,) = (self._folder / CHECKPOINTS).glob(f".step_*.part/{written[0].name}")
            with part.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
                os.fsync(file.fileno())
            return written

        def fail(tensors: dict[str, Tensor]) -> Written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def hang(tensors: dict[str, Tensor]) -> Written:
            self._stop_here(fault)
            return write(tensors)

        return {"corrupt shard": corrupt, "disk full": fail, "hang save": hang}[fault.kind]

    def _mark(self, fault: Fault) -> None:
        """Record in the run folder that a fault happens now, so that it will not happen again."""
        self.pending.remove(fault)
        path = self._folder / INJECTED / fault.name
        path.parent.mkdir(exist_ok=True)
        mark = {
            "fault": fault.text,
            "kind": fault.kind,
            "rank": fault.rank,
            "time": time.time(),
            "done": self._engine.batches_done,
            "saved": saved_steps(self._folder / CHECKPOINTS),
        }
        with path.open("x", encoding="utf-8") as file:
            json.dump(mark, file)
            file.flush()
            os.fsync(file.fileno())


def _is_over_link(action: Action, axis: Axis, shape: PipelineShape, peer: int) -> bool:
    """Return whether this rank sends to a peer in an action.

    If it never sends to that peer, return whether all ranks meet in the action.
    """
    ends = [
        (kind, shape.peer(stage, row.peer_offset))
        for stage in shape.stages_of(axis.rank)
        for kind, row in ACTION_SPECS.items()
        if row.matching_recv
    ]
    if all(end is None or axis.ranks[end] != peer for _, end in ends):
        return action.kind in (Kind.NORM, Kind.UPDATE)
    spec = ACTION_SPECS[action.kind]
    if not spec.matching_recv:
        return False
    end = shape.peer(action.stage, spec.peer_offset)
    return end is not None and axis.ranks[end] == peer


def _be_deaf(seconds: float) -> None:
    with sockets.deaf():
        time.sleep(seconds)
