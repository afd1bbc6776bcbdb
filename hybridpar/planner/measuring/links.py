"""Measure links: time of point-to-point messages and all-reduces by size.

to and fro between two ranks                        half of a round trip
there alone, and back alone                         once, a large message: rates may differ by
                                                    direction
all-reduce over two, four, .. ranks of a level      on the rank that takes the longest
gather and reduce-scatter over them                 likewise, as ZeRO uses them

CPU time is measured in addition to wall-clock time: on CPUs, threads that transfer messages compete
with the threads that compute. A `MeasuredLink` has the methods of `hardware.Link`.

Units: seconds, bytes.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import median
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm import (
    Parts,
    all_gather_async,
    all_reduce,
    barrier,
    gather_objects,
    irecv,
    isend,
    reduce_scatter_async,
)
from hybridpar.grid import Axis
from hybridpar.nn.placement import split_ranges

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
QUICK_SIZES = (1 << 10, 1 << 17, 1 << 21)
_LEAST_S = 0.02
_MOST_REPEATS = 50
"""Largest number of repetitions of one size; the time per size is limited, too."""
_WAY_REPEATS = 3
_WAY_S = 1.0
"""Seconds for measuring a one-way message: limits the number of repetitions, and each message."""
_UNEVEN = 0.15
"""Smallest relative difference between a direction and the mean of both that counts; less is
noise."""
_LEAST_WAY = 0.01
"""Smallest credible time of a direction, as a share of the mean: on a busy machine a large message
may take no longer than the smallest one did."""
_TOO_LONG_S = 2.0
"""Seconds of a message after which larger ones are not measured."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes: linear between the points, and extrapolated from the last two."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        assert self.points, "a curve needs a point"
        assert sizes == sorted(set(sizes)), f"sizes of a curve rise: {sizes}"

    def __call__(self, num_bytes: float) -> float:
        points = self.points
        if num_bytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        i = min(bisect_left(points, (num_bytes, 0.0)), len(points) - 1)
        x0, y0 = points[i - 1]
        x1, y1 = points[i]
        return max(0.0, y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0))

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes per second above the second-largest size."""
        (x0, y0), (x1, y1) = ((0.0, 0.0), *self.points)[-2:]
        return (x1 - x0) / max(y1 - y0, 1e-12)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A measured link between the ranks of one level: the ranks of a server, or servers.

    Args:
        send: Half of a round trip, so the mean of both directions.
        there: Time per byte from an earlier rank to a later one, relative to the mean; the other
            direction takes 2 - `there`.
        reduce: All-reduces, by number of ranks.
        gather: All-gathers by number of ranks, against the total bytes; empty: half of an
            all-reduce.
        scatter: Reduce-scatters, as for gather.
        call: Seconds to issue a send or a receive.

    Each `.._work` is CPU time, which the transfer takes from computing threads.
    """

    name: str
    send: Curve
    reduce: Mapping[int, Curve]
    send_work: Curve = Curve(((1.0, 0.0),))
    reduce_work: Mapping[int, Curve] = field(default_factory=dict)
    call: float = 0.0
    gather: Mapping[int, Curve] = field(default_factory=dict)
    gather_work: Mapping[int, Curve] = field(default_factory=dict)
    scatter: Mapping[int, Curve] = field(default_factory=dict)
    scatter_work: Mapping[int, Curve] = field(default_factory=dict)
    there: float = 1.0
    half_duplex: ClassVar[bool] = False
    """Always False: unknown, because each direction was measured alone."""

    def transfer_time(self, num_bytes: float, flows: float = 1, way: int = 1) -> float:
        """Return the seconds of a message; see `hardware.Link.transfer_time`."""
        one_way = self.there if way > 0 else 2 - self.there
        return self.send.latency + (self.send(num_bytes) - self.send.latency) * one_way * max(
            flows, 1
        )

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second of large messages, in each direction."""
        return self.send.bandwidth / self.there, self.send.bandwidth / (2 - self.there)

    def transfer_work(self, num_bytes: float) -> float:
        """Return the CPU time of a message, on both ends together."""
        return self.send_work(num_bytes)

    def ring_time(self, num_bytes: float, ranks: int, rings: float = 1) -> float:
        """Return the seconds of an all-reduce; see `hardware.Link.ring_time`. More ranks than were
        measured count as a ring with more steps."""
        return self._seconds(self.reduce, num_bytes, ranks, rings)

    def ring_work(self, num_bytes: float, ranks: int) -> float:
        """Return the CPU time of an all-reduce on each rank."""
        return self._work(self.reduce_work, num_bytes, ranks)

    def half_ring(
        self, op: str, num_bytes: float, ranks: int, rings: float = 1
    ) -> tuple[float, float]:
        """Return the seconds of an all-gather or a reduce-scatter, and its CPU time on each
        rank."""
        if seconds := getattr(self, op):
            return (
                self._seconds(seconds, num_bytes, ranks, rings),
                self._work(getattr(self, f"{op}_work"), num_bytes, ranks),
            )
        return self.ring_time(num_bytes, ranks, rings) / 2, self.ring_work(num_bytes, ranks) / 2

    def _seconds(
        self, curves: Mapping[int, Curve], num_bytes: float, ranks: int, rings: float
    ) -> float:
        if ranks == 1:
            return 0.0
        measured, scale = self._nearest(curves, ranks)
        bytes_part = measured(num_bytes) - measured.latency
        return measured.latency * scale[0] + bytes_part * scale[1] * max(rings, 1)

    def _work(self, curves: Mapping[int, Curve], num_bytes: float, ranks: int) -> float:
        if ranks == 1 or not curves:
            return 0.0
        measured, scale = self._nearest(curves, ranks)
        return measured(num_bytes) * scale[1]

    @staticmethod
    def _nearest(curves: Mapping[int, Curve], ranks: int) -> tuple[Curve, tuple[float, float]]:
        """Return the curve of the nearest measured number of ranks, and the factors of steps and
        bytes from it to a ring of `ranks`."""
        near = min(curves, key=lambda n: abs(n - ranks))
        return curves[near], ((ranks - 1) / (near - 1), (ranks - 1) / ranks * near / (near - 1))


# -- measuring

Times = tuple[float, float, float]
"""Seconds, CPU time, and seconds to issue a message; zeros on ranks that do not take part."""
_NO_PART: Times = (0.0, 0.0, 0.0)


def measure_links(
    world: Axis, device: torch.device, *, sizes: Sequence[int] = SIZES
) -> dict[str, MeasuredLink]:
    """Return the links by level: `local` between ranks of one host, `network` between hosts. Empty
    for a single rank.

    Collectives: on all ranks of the job.
    """
    if world.size == 1:
        return {}
    hosts = gather_objects(platform.node(), world)
    levels = {}
    for level, same in (("local", True), ("network", False)):
        pairs = [
            pair
            for pair in combinations(range(world.size), 2)
            if (hosts[pair[0]] == hosts[pair[1]]) == same
        ]
        if pairs:
            levels[level] = _measure_level(
                level, pairs[0], _groups_of(level, hosts), world, device, sizes
            )
    return levels


def _groups_of(level: str, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return groups of ranks that reduce together, by size: on the host with the most ranks, or one
    rank per host."""
    fullest = max(hosts, key=hosts.count)
    here = (
        [rank for rank, host in enumerate(hosts) if host == fullest]
        if level == "local"
        else [hosts.index(name) for name in dict.fromkeys(hosts)]
    )
    sizes = [n for n in (2, 4, 8, 16, len(here)) if n <= len(here)]
    return [tuple(here[:n]) for n in sorted(set(sizes))]


def _measure_level(
    name: str,
    pair: tuple[int, int],
    groups: Sequence[tuple[int, ...]],
    world: Axis,
    device: torch.device,
    sizes: Sequence[int],
) -> MeasuredLink:
    send, send_work, calls = _sweep(sizes, lambda n, k: _ping(n, k, pair, world, device), world)
    there = _there(send, pair, world, device)
    found: dict[str, tuple[dict[int, Curve], dict[int, Curve]]] = {
        op: ({}, {}) for op in _COLLECTIVES
    }
    for ranks in groups:
        group = world.group if len(ranks) == world.size else dist.new_group(list(ranks))
        axis = (
            Axis("tp", ranks.index(world.rank), ranks, group, via_host=world.via_host)
            if world.rank in ranks
            else None
        )
        for op, call in _COLLECTIVES.items():
            seconds, work = found[op]
            measure = partial(_timed, call, axis, device)
            seconds[len(ranks)], work[len(ranks)], _ = _sweep(sizes, measure, world)
    (reduce, reduce_work), (gather, gather_work), (scatter, scatter_work) = found.values()
    return MeasuredLink(
        name,
        send,
        reduce,
        send_work,
        reduce_work,
        calls,
        gather,
        gather_work,
        scatter,
        scatter_work,
        there,
    )


def _there(send: Curve, pair: tuple[int, int], world: Axis, device: torch.device) -> float:
    """Return the time per byte of a large message to the later rank, relative to the mean of both
    directions; 1 if they hardly differ."""
    if len(send.points) == 1:
        return 1.0
    (small, _), (next_size, _), *_ = send.points
    small = int(small)
    large = int(max((n for n, took in send.points[1:] if took < _WAY_S), default=next_size))
    seconds = []
    for sizes in ((large, small), (small, large)):
        barrier(world)
        took = max(
            gather_objects(_ping(sizes[0], _WAY_REPEATS, pair, world, device, sizes[1])[0], world)
        )
        seconds.append(
            max(2 * took - 2 * send.latency, 1e-9)
        )  # of a round trip, without the two latencies
    there = 2 * seconds[0] / sum(seconds)
    return min(max(there, _LEAST_WAY), 2 - _LEAST_WAY) if abs(there - 1) > _UNEVEN else 1.0


def _sweep(
    sizes: Sequence[int], once: Callable[[int, int], Times], world: Axis
) -> tuple[Curve, Curve, float]:
    """Return curves of seconds and CPU time by size, and the seconds of issuing a call.

    Collectives: on all ranks.
    """
    seconds: list[tuple[float, float]] = []
    work: list[tuple[float, float]] = []
    calls: list[float] = []
    for num_bytes in sizes:
        barrier(world)
        first = max(gather_objects(once(num_bytes, 1)[0], world))
        repeats = int(min(_MOST_REPEATS, max(3, _LEAST_S / max(first, 1e-6))))
        barrier(world)
        everyone = [t for t in gather_objects(once(num_bytes, repeats), world) if t[0]]
        slowest = max(t[0] for t in everyone)
        seconds.append((float(num_bytes), slowest))
        work.append((float(num_bytes), median(t[1] for t in everyone)))
        calls.append(median(t[2] for t in everyone))
        if first > _TOO_LONG_S:
            break
    return Curve(rising(seconds)), Curve(tuple(work)), min(calls)


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points without any that took as long as a larger size, because another program
    delayed them."""
    kept: list[tuple[float, float]] = []
    for size, seconds in reversed(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((size, seconds))
    return tuple(reversed(kept))


def _ping(
    num_bytes: int,
    repeats: int,
    pair: tuple[int, int],
    world: Axis,
    device: torch.device,
    back_bytes: int = 0,
) -> Times:
    """Send a message to the later rank and one of `back_bytes` back (0: of the same size), and
    return the times."""
    if world.rank not in pair:
        return _NO_PART
    first = world.rank == pair[0]
    other = pair[1] if first else pair[0]
    there, back = (
        torch.zeros(size // 4, device=device) for size in (num_bytes, back_bytes or num_bytes)
    )
    message, answer = (there, back) if first else (back, there)
    seconds = []
    calls = []
    cpu = time.process_time()
    thread = time.thread_time()
    for _ in range(repeats):
        start = time.perf_counter()
        received = irecv(answer, other, world)
        if not first:
            received.wait()
        before = time.thread_time()
        sent = isend(message, other, world)
        calls.append(time.thread_time() - before)
        received.wait()
        sent.wait()
        _finish(device)
        seconds.append((time.perf_counter() - start) / 2)
    beside = (time.process_time() - cpu) - (time.thread_time() - thread)
    return median(seconds), max(0.0, beside) / repeats, median(calls)


def _gather(x: Tensor, axis: Axis) -> None:
    all_gather_async(x, _even_parts(x, axis), axis).wait()


def _scatter(x: Tensor, axis: Axis) -> None:
    reduce_scatter_async(x, _even_parts(x, axis), axis).wait()


def _even_parts(x: Tensor, axis: Axis) -> Parts:
    """Return a tensor in equal shards, one for each rank."""
    return tuple((owner, a, b) for owner, (a, b) in enumerate(split_ranges(x.numel(), axis.size)))


_COLLECTIVES: dict[str, Callable[[Tensor, Axis], object]] = {
    "reduce": all_reduce,
    "gather": _gather,
    "scatter": _scatter,
}


def _timed(
    call: Callable[[Tensor, Axis], object],
    axis: Axis | None,
    device: torch.device,
    num_bytes: int,
    repeats: int,
) -> Times:
    if axis is None:
        return _NO_PART
    x = torch.zeros(num_bytes // 4, device=device)
    seconds = []
    cpu = time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        call(x, axis)
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds), (time.process_time() - cpu) / repeats, 0.0


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
