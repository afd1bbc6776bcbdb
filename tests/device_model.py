"""Runs a plan's action lists as GPUs with NCCL would, without torch: hosts, streams and kernels
that wait.

    host      takes its actions one after the other and only launches, unless an action says that it
              waits
    stream    runs what was launched on it in order: one stream computes, one for each axis
              transfers
    receive   a kernel that waits for its send, and starts once what the host had launched before it
              is done

A transfer holds its stream at both ends until both have reached it, as a rendezvous of large
messages does. That is stricter than NCCL is with small ones, and so is one stream for all
neighbours on an axis, where NCCL may have one each.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.schedule_table import Schedule


class Wait(Enum):
    """Events that a host waits for before it captures."""

    NOTHING = "nothing"
    STREAM = "stream"
    """All that was launched on the stream that computes."""
    DEVICE = "device"
    """All that was launched, posted receives included."""


_End = tuple[Kind, int, int]
"""A transfer, as its receive: kind, stage and micro-batch."""


@dataclass
class _Kernel:
    is_done: bool = False


@dataclass
class _Transfer(_Kernel):
    behind: int = 0
    """Kernels of the stream that computes which come before it."""
    end: _End = (Kind.F, 0, 0)


@dataclass
class _Join(_Kernel):
    """The stream that computes waits for a transfer, or for a sum over all ranks."""

    of: _Transfer | None = None
    batch: int = -1


@dataclass
class _Rank:
    actions: deque[Action]
    compute: list[_Kernel] = field(default_factory=list)
    num_computed: int = 0
    transfers: dict[tuple[int, int], list[_Transfer]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by axis
    num_done: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    received: dict[_End, _Transfer] = field(default_factory=dict)
    sends: deque[_Transfer] = field(default_factory=deque)

    def is_idle(self, wait: Wait) -> bool:
        if wait is Wait.NOTHING:
            return True
        has_computed = self.num_computed == len(self.compute)
        return has_computed and (
            wait is Wait.STREAM
            or all(
                self.num_done[axis] == len(transfers) for axis, transfers in self.transfers.items()
            )
        )


def captures(
    actions: Iterable[Action], schedule: Schedule, sizes: PipelineShape, rank: int, num_places: int
) -> set[Action]:
    """Return the actions of a rank that capture, by the rules of MicroBatchGraphs.

    The first micro-batch of a kind runs kernel by kernel. After that each place captures a kind
    once: its F, B, I, W.
    """
    versions = schedule.max_live_versions(sizes, rank)
    seen = set()
    recorded = set()
    found = set()
    places: dict[tuple[int, int], int] = {}
    captured: set[tuple[int, int]] = set()  # in flight
    for action in actions:
        if action.kind not in COMPUTE:
            continue
        key = action.stage, action.microbatch
        batch, index = divmod(action.microbatch, sizes.num_microbatches)
        if action.kind is Kind.F:
            kind = (
                action.stage,
                action.version % versions,
                batch % schedule.num_gradient_buffers,
                index == 0,
            )
            taken = {place for (stage, _), place in places.items() if stage == action.stage}
            place = next((place for place in range(num_places) if place not in taken), None)
            if place is None:
                continue
            if kind not in seen:
                seen.add(kind)
                continue
            places[key] = place
            if (kind, place) in recorded:
                continue
            recorded.add((kind, place))
            captured.add(key)
            found.add(action)
        else:
            if key in captured:
                found.add(action)
            if ACTION_SPECS[action.kind].holds < 0:
                captured.discard(key)
                places.pop(key, None)
    return found


def stuck(
    plan: Plan,
    schedule: Schedule,
    sizes: PipelineShape,
    wait: Wait,
    num_places: int = 0,
    window: int = 0,
    where: Callable[[Action], bool] | None = None,
) -> dict[int, Action]:
    """Return the action that each rank's host or device does not get past, by rank; none if the
    plan runs to its end.

    Args:
        wait: what a host waits for before each capture.
        num_places: micro-batches in flight on a stage that are captured (0: as many as ranks).
        window: unfinished sends of a rank (0: twice the ranks).
        where: the computations before which a host waits (None: those that capture).
    """
    capturing = {
        rank: captures(actions, schedule, sizes, rank, num_places or sizes.num_ranks)
        if where is None
        else set(filter(where, actions))
        for rank, actions in plan.items()
    }
    ranks = {rank: _Rank(deque(actions)) for rank, actions in plan.items()}
    window = window or 2 * sizes.num_ranks
    sums: dict[int, set[int]] = defaultdict(
        set
    )  # ranks that have reached the sum over all, by batch
    met: dict[_End, int] = defaultdict(int)

    def launch(number: int, rank: _Rank, action: Action) -> bool:
        """Do what the host does with the action; False: it waits."""
        row = ACTION_SPECS[action.kind]
        if row.peer_offset:
            end = (
                (row.matching_recv, action.stage + row.peer_offset)
                if row.matching_recv
                else (action.kind, action.stage)
            )
            transfer = _Transfer(behind=len(rank.compute), end=(*end, action.microbatch))
            turn = sizes.turn(action.stage)
            rank.transfers[turn, row.flow].append(transfer)
            if row.matching_recv is None:
                rank.received[transfer.end] = transfer
                return True
            rank.sends.append(transfer)
            if len(rank.sends) > window:
                rank.compute.append(_Join(of=rank.sends.popleft()))
            return True
        if action.kind in COMPUTE:
            if row.receive is not None:
                received = rank.received.pop((row.receive, action.stage, action.microbatch), None)
                if received is not None:
                    rank.compute.append(_Join(of=received))
            if action in capturing[number] and not rank.is_idle(wait):
                capturing_waits.add(number)
                return False
            rank.compute.append(_Kernel())
        elif action.kind is Kind.NORM:
            rank.compute.append(_Kernel())
            norms[number, action.microbatch] = len(rank.compute)
        elif action.kind is Kind.UPDATE and (number, action.microbatch) in norms:
            rank.compute.append(_Join(batch=action.microbatch))
            host_waits.add(number)
        return True

    norms: dict[tuple[int, int], int] = {}
    capturing_waits: set[int] = set()
    host_waits: set[int] = set()  # for the numbers of a batch
    has_moved = True
    while has_moved:
        has_moved = False
        for number, rank in ranks.items():
            has_moved |= _run(number, rank, norms, sums, met, len(ranks))
            while rank.actions:
                if number in capturing_waits:
                    if not rank.is_idle(wait):
                        break
                    capturing_waits.discard(number)
                    rank.compute.append(_Kernel())
                elif number in host_waits and not rank.is_idle(Wait.STREAM):
                    break
                else:
                    host_waits.discard(number)
                    if not launch(number, rank, rank.actions[0]):
                        has_moved = True
                        break
                rank.actions.popleft()
                has_moved = True
    return {
        number: rank.actions[0] if rank.actions else plan[number][-1]
        for number, rank in ranks.items()
        if rank.actions or not rank.is_idle(Wait.DEVICE)
    }


def _run(
    number: int,
    rank: _Rank,
    norms: dict[tuple[int, int], int],
    sums: dict[int, set[int]],
    met: dict[_End, int],
    num_ranks: int,
) -> bool:
    """Run the kernels of a rank as far as they come; return whether one has ended."""
    has_moved = False
    progress = True
    while progress:
        progress = False
        for (at, batch), behind in norms.items():
            if at == number and rank.num_computed >= behind and number not in sums[batch]:
                sums[batch].add(number)
                progress = True
        while rank.num_computed < len(rank.compute):
            kernel = rank.compute[rank.num_computed]
            if isinstance(kernel, _Join):
                if kernel.of is not None and not kernel.of.is_done:
                    break
                if kernel.of is None and len(sums[kernel.batch]) < num_ranks:
                    break
            rank.num_computed += 1
            progress = True
        for axis, transfers in rank.transfers.items():
            while rank.num_done[axis] < len(transfers):
                transfer = transfers[rank.num_done[axis]]
                if rank.num_computed < transfer.behind:
                    break
                if not met[transfer.end] & (1 << number):
                    met[transfer.end] |= 1 << number
                    progress = True
                if met[transfer.end].bit_count() < 2:
                    break
                transfer.is_done = True
                rank.num_done[axis] += 1
                progress = True
        has_moved |= progress
    return has_moved
