"""The 3D process grid (pp x dp x tp) and its axes.

Rank order: tp fastest, then dp, then pp, so tensor parallelism stays on the fastest links. There is no current
grid: whoever communicates is handed the Axis it needs, and an axis of size 1 works without a process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.errors import config_error
from hybridpar.flight import NO_FLIGHT, NOBODY, Flight, Waiting


@dataclass(slots=True)
class Traffic:
    """What went over one axis: calls and payload bytes of this rank, by operation name."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, op: str, num_bytes: int) -> None:
        """Counts one call."""
        self.calls[op] += 1
        self.num_bytes[op] += num_bytes

    def clear(self) -> None:
        """Begins to count from zero."""
        self.calls.clear()
        self.num_bytes.clear()


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of ranks that communicate, and this process's place on it.

    `ranks` are global ranks in axis order, `rank` is the index of this process among them. `group` is None where no
    communication can happen (size 1). `via_host`: the group takes host memory only (Gloo), and the ranks' tensors are
    elsewhere, so messages go through copies there.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    flight: Flight = field(default=NO_FLIGHT, compare=False)
    via_host: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), f"axis {self.name}: rank {self.rank} of {len(self.ranks)}"
        assert self.group is not None or len(self.ranks) == 1, f"axis {self.name} of size {self.size} needs a group"

    @property
    def size(self) -> int:
        """How many ranks are on the axis."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def prev(self) -> int:
        """Global rank of the predecessor on this axis (the axis is a ring)."""
        return self.ranks[(self.rank - 1) % self.size]

    @property
    def next(self) -> int:
        """Global rank of the successor on this axis (the axis is a ring)."""
        return self.ranks[(self.rank + 1) % self.size]

    def waiting(self, operation: str, peer: int = NOBODY) -> Waiting:
        """While entered, this rank waits for the axis, or for one of its ranks (a global one)."""
        return Waiting(self.flight, operation, self.name, peer)


_AXES = ("tp", "dp", "pp", "pp_reverse", "ends", "world")


class ProcessGrid:
    """A pp x dp x tp grid over all processes of the job.

    Axes: `tp`, `dp`, `pp`; `pp_reverse` (the same line as pp with a communicator of its own, for gradients that flow
    against the activations); `ends` (all replicas of the first and the last pipeline stage, which share tied
    embeddings; size 1 in between, and where pp is 1); `world` (every rank).

    `device_type`: where the tensors are that its axes are given; `flight`: where these note what this rank waits for.
    Collectives: creating a grid of more than one process is collective over all processes of the job.
    Raises: ConfigError if tp * pp * dp is not the number of processes.
    """

    def __init__(self, *, tp: int = 1, pp: int = 1, dp: int = 1, device_type: str = "cpu",
                 flight: Flight = NO_FLIGHT):
        sizes = {"pp": pp, "dp": dp, "tp": tp}
        for name, size in sizes.items():
            if size < 1:
                raise config_error(f"parallel.{name}", size, "must be at least 1", "1")
        num_ranks = prod(sizes.values())
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks not in (1, world_size):
            raise config_error(
                "parallel", f"tp={tp} pp={pp} dp={dp}", f"tp * pp * dp is {num_ranks} but the job has {world_size} "
                "processes", f"torchrun --nproc-per-node {num_ranks}",
            )
        self.device_type, self.flight = device_type, flight
        self.sizes = sizes
        if num_ranks == 1:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._set(*(Axis(name, 0, (rank,), flight=flight) for name in _AXES))
            return
        rank = dist.get_rank()
        lines = lines_of(tp, pp, dp)
        via_host = device_type != "cpu" and dist.get_backend() == "gloo"
        self._set(*(_axis(name, rank, lines[name], flight, via_host) for name in _AXES))

    def _set(self, tp: Axis, dp: Axis, pp: Axis, pp_reverse: Axis, ends: Axis, world: Axis) -> None:
        self.tp, self.dp, self.pp, self.pp_reverse, self.ends, self.world = tp, dp, pp, pp_reverse, ends, world

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.ranks[self.world.rank]

    def describe(self, chunks: int = 1) -> str:
        """Where this process stands, for messages: 'rank 5 (stage 2, replica 0, tensor part 1)'.

        `chunks`: of the model, that each rank holds.
        """
        stages = range(self.pp.rank, chunks * self.pp.size, self.pp.size)
        return describe(self.rank, stages, self.dp.rank, self.tp.rank)


def describe(rank: int, stages: Sequence[int], replica: int, tensor_part: int) -> str:
    """A process and its place on the grid, for messages: 'rank 5 (stages 2 and 5, replica 0, tensor part 1)'."""
    *others, last = map(str, stages)
    where = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
    return f"rank {rank} ({where}, replica {replica}, tensor part {tensor_part})"


def place_of(rank: int, tp: int, dp: int) -> tuple[int, int, int]:
    """(stage, replica, tensor part) of a rank."""
    return rank // (tp * dp), rank // tp % dp, rank % tp


def lines_of(tp: int, pp: int, dp: int) -> dict[str, list[list[int]]]:
    """The global ranks along every axis, by its name: a list for each line of the grid that has one."""
    lines = {
        "tp": [[(s * dp + d) * tp + t for t in range(tp)] for s, d in product(range(pp), range(dp))],
        "dp": [[(s * dp + d) * tp + t for d in range(dp)] for s, t in product(range(pp), range(tp))],
        "pp": [[(s * dp + d) * tp + t for s in range(pp)] for d, t in product(range(dp), range(tp))],
        "ends": [[(s * dp + d) * tp + t for s in (0, pp - 1) for d in range(dp)] for t in range(tp) if pp > 1],
        "world": [list(range(tp * pp * dp))],
    }
    return lines | {"pp_reverse": lines["pp"]}


def _axis(name: str, rank: int, lines: list[list[int]], flight: Flight, via_host: bool) -> Axis:
    """This rank's line of those, with a group. Every rank creates every group in the same order, as torch requires."""
    mine = Axis(name, 0, (rank,), flight=flight)
    for line in lines:
        group = _new_group(name, line) if len(line) > 1 else None
        if rank in line:
            mine = Axis(name, line.index(rank), tuple(line), group, flight=flight, via_host=via_host)
    return mine


def _new_group(name: str, ranks: list[int]) -> dist.ProcessGroup:
    """A group with the timeout of the job's own."""
    backend = str(dist.get_backend())
    options = _of_the_job("cuda" if backend == "nccl" else "cpu")
    return dist.new_group(ranks, options._timeout, _SHARED_GLOO if backend == "gloo" else backend, group_desc=name)


def _of_the_job(device_type: str) -> Any:
    """The options of the job's own group, for tensors of that device."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device(device_type)).options


def _shared_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Gloo on the thread that the job's own group has for its sockets.

    Otherwise each group brings one, which wakes up a hundred times a second and takes that time from whoever computes.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = _of_the_job("cpu")._devices, timeout
    return dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[call-arg]


_SHARED_GLOO = "shared_gloo"
if dist.is_gloo_available():
    dist.Backend.register_backend(_SHARED_GLOO, _shared_gloo, devices="cpu")
