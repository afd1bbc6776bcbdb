"""A model of the order in which NCCL and CUDA run what the ranks of a job issue. Nothing is
computed.

    host            issues calls, and orders the compute stream behind them (`Work.wait`). It waits
                    for the device only where it reads numbers, and at the first call between two
                    ranks, which connects them
    communicator    one stream on each rank. A call starts when the call before it on that stream is
                    over, and when the compute stream has got to where it was issued
    transfer        over when both ranks have started it: nothing is buffered. The i-th send from
                    one rank to another meets the i-th receive there
    collective      over when all ranks have started it

So a receive that was posted early holds up a later send on the same communicator. In one hardware
queue (see `Device`) it holds up everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hybridpar.config import Config
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.recording.memory_trace import SampleLoader
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_chunks import ghost_memory
from hybridpar.schedules.kinds import COMPUTE
from hybridpar.train.engine import Actions, Engine, Residency, StepResult

Group = tuple[str, tuple[int, ...]]
"""A communicator: the name of its axis, and its global ranks."""


@dataclass(frozen=True)
class Call:
    """A call of a rank on a communicator. `source` and `target`: ranks in the group, of a transfer
    only."""

    group: Group
    operation: str
    source: int = -1
    target: int = -1

    @property
    def is_transfer(self) -> bool:
        return self.source >= 0

    def __str__(self) -> str:
        ends = f" {self.source} -> {self.target}" if self.is_transfer else ""
        return f"{self.operation}{ends} on {self.group[0]}"


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the call with this index in the rank's events."""

    call: int


class Read:
    """The host waits for the compute stream."""

    def __str__(self) -> str:
        return "numbers are read"


Event = Call | Wait | Read


@dataclass(frozen=True)
class Device:
    """How calls are laid out on streams.

    Attributes:
        stream: The stream of a call. None: its communicator's, as where init_process_group was
            given a `device_id`.
        one_queue: All streams of a rank share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS = 1):
            whatever was issued first starts first.
    """

    stream: Callable[[Call], Any] = lambda call: call.group
    one_queue: bool = False


def by_pair(call: Call) -> Any:
    """The streams without `device_id`: transfers have a communicator for each pair of ranks."""
    return (call.group, frozenset((call.source, call.target))) if call.is_transfer else call.group


def shared_direction(call: Call) -> Any:
    """A bad arrangement: activations and gradients have the same communicator."""
    name, ranks = call.group
    return name.replace("pp_reverse", "pp"), ranks


def find_deadlock(events: Sequence[Sequence[Event]], device: Device = Device()) -> str:
    """Return what each rank that cannot end waits for; empty if all ranks end.

    Args:
        events: What each rank issues, in order.
    """
    job = _Job([_Rank(own, device) for own in events], device)
    while job.advance():
        pass
    return "; ".join(
        f"rank {number}: {rank.stuck_at()}"
        for number, rank in enumerate(job.ranks)
        if not rank.is_over
    )


@dataclass
class _Rank:
    events: Sequence[Event]
    device: Device
    host: int = 0
    """Number of events that the host has issued."""
    compute: int = 0
    """Number of events that the compute stream has passed."""
    waiting: list[int] = field(default_factory=list)
    """Calls that have not started."""
    over: set[int] = field(default_factory=set)
    before: dict[int, int] = field(default_factory=dict)
    """For each call the one before it on its stream."""
    reached: set[Any] = field(default_factory=set)
    """Connections that the host is at, or has made."""

    def __post_init__(self) -> None:
        newest: dict[Any, int] = {}
        for index, event in enumerate(self.events):
            if isinstance(event, Call):
                stream = self.device.stream(event)
                if stream in newest:
                    self.before[index] = newest[stream]
                newest[stream] = index
                self.waiting.append(index)

    @property
    def is_over(self) -> bool:
        return self.compute == len(self.events) and all(
            index in self.over for index, event in enumerate(self.events) if isinstance(event, Call)
        )

    def stuck_at(self) -> str:
        waiting = [
            str(event)
            for index, event in enumerate(self.events[: self.host])
            if isinstance(event, Call) and index not in self.over
        ]
        place = f"host at event {self.host} of {len(self.events)}"
        if self.host < len(self.events):
            place += f" ({self.events[self.host]})"
        return f"{place}, unfinished: {', '.join(waiting[:4])}"


@dataclass
class _Job:
    ranks: list[_Rank]
    device: Device

    def __post_init__(self) -> None:
        self._ends: dict[Any, list[tuple[_Rank, int]]] = defaultdict(list)
        """Both ends of a transfer, or all of a collective: ranks with the indices of the calls."""
        self._keys: dict[tuple[int, int], Any] = {}
        for rank in self.ranks:
            count: dict[Any, int] = defaultdict(int)
            for index, event in enumerate(rank.events):
                if isinstance(event, Call):
                    key = (event.group, event.source, event.target)
                    self._ends[key, count[key]].append((rank, index))
                    self._keys[id(rank), index] = key, count[key]
                    count[key] += 1
        self._missing = {key: self._size(key[0]) for key in self._ends}
        """Ends that have not started."""

    def advance(self) -> bool:
        """Let every rank go as far as it can; return whether one has moved."""
        moved = [self._host(rank) | self._compute(rank) | self._start(rank) for rank in self.ranks]
        return any(moved)

    def _host(self, rank: _Rank) -> bool:
        begin = rank.host
        while rank.host < len(rank.events):
            event = rank.events[rank.host]
            if isinstance(event, Read) and rank.compute < rank.host:
                break
            if isinstance(event, Call) and not self._is_connected(rank, event):
                break
            rank.host += 1
        return rank.host > begin

    def _is_connected(self, rank: _Rank, call: Call) -> bool:
        """Whether the hosts of all ranks that a call connects have got to it."""
        connection = (self.device.stream(call), call.source, call.target)
        rank.reached.add(connection)
        members = [call.source, call.target] if call.is_transfer else range(len(call.group[1]))
        return all(connection in self.ranks[call.group[1][member]].reached for member in members)

    def _compute(self, rank: _Rank) -> bool:
        begin = rank.compute
        while rank.compute < rank.host:
            event = rank.events[rank.compute]
            if isinstance(event, Wait) and event.call not in rank.over:
                break
            if (
                self.device.one_queue
                and isinstance(event, Call)
                and not self._can_start(rank, rank.compute)
            ):
                break
            rank.compute += 1
        return rank.compute > begin

    def _can_start(self, rank: _Rank, index: int) -> bool:
        before = rank.before.get(index)
        return before is None or before in rank.over

    def _start(self, rank: _Rank) -> bool:
        ready = [
            index for index in rank.waiting if index < rank.compute and self._can_start(rank, index)
        ]
        for index in ready:
            rank.waiting.remove(index)
            key = self._keys[id(rank), index]
            self._missing[key] -= 1
            if not self._missing[key]:
                for member, call in self._ends[key]:
                    member.over.add(call)
        return bool(ready)

    @staticmethod
    def _size(key: tuple[Group, int, int]) -> int:
        group, source, _ = key
        return 2 if source >= 0 else len(group[1])


# -- what an engine issues


class _Handle(dist.Work):
    def __init__(self, events: list[Event], call: int):
        super().__init__()
        self._events = events
        self._call = call

    def wait(self, *args: Any) -> bool:
        self._events.append(Wait(self._call))
        return True

    def is_completed(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """A communicator that notes the calls of its rank."""

    events: list[Event]
    group: Group

    def _note(self, call: Call) -> _Handle:
        self.events.append(call)
        return _Handle(self.events, len(self.events) - 1)

    def send(self, tensors: Any, target: int, tag: int) -> Any:
        return self._note(Call(self.group, "transfer", self.rank(), target))

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._note(Call(self.group, "transfer", source, self.rank()))


def _collective(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._note(Call(self.group, name))


for _name in (
    "allreduce",
    "broadcast",
    "reduce",
    "alltoall_base",
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
):
    setattr(_Group, _name, _collective(_name))


def issued(config: Config, rank: int, steps: int) -> list[Event]:
    """Return what a rank issues in the first steps of training, from its own engine on ghosts."""
    events: list[Event] = []

    def group(name: str, ranks: list[int]) -> _Group:
        made = _Group(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        made.events = events
        made.group = (name, tuple(ranks))
        return made

    grid = ProcessGrid.imagined(sizes_of(config.parallel), rank, group)
    with Tracker(torch.device("cpu")) as tracker:

        def watched(actions: Actions) -> Iterable[Any]:
            for action in actions:
                tracker.make_ghosts_of_integers(action.kind in COMPUTE)
                yield action

        job = JobPlan(config)
        states = job.state_policy(1, 1)
        memory = ghost_memory(states, tracker.device, stays=True)
        engine = Engine(job, grid, tracker.device, wrap_plan=watched, residency=Residency(memory))
        take = engine.batch_actions.results.take

        def noting_the_read(batch: int) -> StepResult:
            """Note where the host reads numbers of the device."""
            result = take(batch)
            events.append(Read())
            return result

        with patch.object(engine.batch_actions.results, "take", noting_the_read):
            engine.train(SampleLoader(config), steps, lambda result: None)
    return events


def all_issued(config: Config, steps: int) -> list[list[Event]]:
    """Return what each rank of the configuration's grid issues, in rank order."""
    return [issued(config, rank, steps) for rank in range(config.parallel.num_ranks)]
