"""The process grid: its axes by name, and the lines of ranks along them.

A grid is an ordered mapping of axis names to sizes, the outermost first. The default is pp, dp, cp,
tp: tp is fastest, so tensor parallelism stays on the fastest links, and context parallelism comes
next. There is no global current grid:
code that communicates is passed the Axis it needs, and an axis of size 1 works without a process
group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import gcd, prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.config import ParallelConfig
from hybridpar.errors import config_error
from hybridpar.flight import NO_FLIGHT, NOBODY, Flight, Waiting

AxisSizes = Mapping[str, int]
"""Sizes of a grid's axes by name, the outermost first."""
Place = Mapping[str, int]
"""Index of a rank along every axis, by name; 0 along an axis that is not named."""
ALONE: Place = MappingProxyType({})
"""Place of a rank without other ranks."""

MODEL = ("pp", "tp")
"""Axes that divide the model: ranks along them hold different parameters, or different shards of
them."""
_USUAL = ("pp", "dp", "tp")
"""Axes that every grid has, the outermost first."""
_ORDER = ("pp", "dp", "cp", "tp")
"""The order of the axes whose sizes are given by keyword."""
EXPERTS = "experts"
"""Axis inside of dp whose ranks hold different experts (parallel.ep)."""
CONTEXT_EXPERTS = "context_experts"
"""Axis inside of cp whose ranks hold different experts (parallel.ep)."""
EXPERT_AXES = (EXPERTS, CONTEXT_EXPERTS)
"""Axes whose ranks hold different experts: neighbours of cp first, then replicas."""
BATCH = ("dp", EXPERTS, "cp", CONTEXT_EXPERTS)
"""Axes that divide a batch, the first two by samples and the others by the tokens of each sample:
ranks along them hold the same parameters, except that ranks along `EXPERT_AXES` hold different
experts, and each computes a part of the gradient."""
APART = ("site",)
"""Axes whose ranks train apart: each has different weights, which only the outer step
(state/reduction/outer.py) averages."""
_WORDS = {
    "site": "site",
    "dp": "replica",
    EXPERTS: "expert part",
    "cp": "context part",
    CONTEXT_EXPERTS: "expert part of the context",
    "tp": "tensor part",
}


@dataclass(slots=True)
class Traffic:
    """Calls and payload bytes of this rank over one axis, by operation name."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, op: str, num_bytes: int) -> None:
        """Add one call to the counts."""
        self.calls[op] += 1
        self.num_bytes[op] += num_bytes

    def copy(self) -> Traffic:
        """Return a copy of the counts."""
        return Traffic(self.calls.copy(), self.num_bytes.copy())

    def restore(self, counts: Traffic) -> None:
        """Set all counts to the counts of a copy."""
        self.calls = counts.calls
        self.num_bytes = counts.num_bytes

    def add_since(self, before: Traffic, now: Traffic) -> None:
        """Add the counts between two copies."""
        self.calls += now.calls - before.calls
        self.num_bytes += now.num_bytes - before.num_bytes

    def clear(self) -> None:
        """Set all counts to zero."""
        self.calls.clear()
        self.num_bytes.clear()


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of ranks that communicate, and this process's place on it.

    Attributes:
        name: Name of the axis.
        rank: Index of this process in `ranks`.
        ranks: Global ranks in axis order.
        group: The process group; None if there is no communication (size 1).
        traffic: Counts the calls.
        flight: Notes the waits.
        via_host: The group accepts host memory only (Gloo) and the tensors are on a device, so they
            are copied to the host.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    flight: Flight = field(default=NO_FLIGHT, compare=False)
    via_host: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), (
            f"axis {self.name}: rank {self.rank} of {len(self.ranks)}"
        )
        assert self.group is not None or len(self.ranks) == 1, (
            f"axis {self.name} of size {self.size} needs a group"
        )

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def next(self) -> int:
        """Global rank of the successor on this axis (the axis is a ring)."""
        return self.ranks[(self.rank + 1) % self.size]

    def call(self, operation: str, num_bytes: int, peer: int = NOBODY) -> Waiting:
        """Count a call; return a context in which this rank waits for it."""
        self.traffic.add(operation, num_bytes)
        return self.waiting(operation, peer)

    def waiting(self, operation: str, peer: int = NOBODY) -> Waiting:
        """Return a context in which this rank waits for the axis, or for the global rank `peer` on
        it.
        """
        return Waiting(self.flight, operation, self.name, peer)


_JOIN = " x "
_DIVIDED = (("dp", EXPERTS), ("cp", CONTEXT_EXPERTS), EXPERT_AXES)
"""Axes whose joined line stands for dp, cp and experts on a grid that has both."""
EXPERT_DP = "expert_dp"
"""Line of the ranks that hold the same experts, if the grid has an axis of them."""


class ProcessGrid:
    """A grid over all processes of the job: `ProcessGrid(tp=2, pp=4)`, or `ProcessGrid({"x": 2,
    "tp": 2})`.

    `axis("tp")` is this rank's line along an axis, `axis("dp", "x")` its line along the `joined`
    axes together. By attribute: `tp`, `cp`, `dp`, `pp`; `experts` (the ranks of dp and cp that share
    the experts of a layer; `dp` is then the line of all replicas, along which samples differ, and
    `cp` the line of all ranks that share a sample); `dp_cp` (dp and cp together, over which
    gradients are summed; dp itself if the grid has no axis cp); `expert_dp` (the ranks of dp_cp
    that hold the same experts); `pp_reverse` (pp with a separate communicator, for gradients that
    flow against the activations); `embedding_group` (the first and last pipeline stage with all
    their replicas, which share tied embeddings; size 1 in between, and if pp is 1); `site` (the
    ranks that hold the same parameters at other sites); `site_group` (all ranks of this rank's
    site); `world` (all ranks).

    NCCL runs the operations that a rank issues on one communicator in that order, on one stream. If
    init_process_group was given a `device_id`, as the launcher does, this holds for transfers with
    all neighbours and for collectives alike, so a receive that was posted ahead holds up all later
    sends there. Therefore activations and gradients have separate communicators. With stage_layout
    "v" each turn has a separate pair (`again`). No collective uses a communicator of pp.
    tests/nccl_order.py models this: no plan deadlocks so, and all plans of the gallery do if both
    directions share one. Groups are split from the job's group (ncclCommSplit), which is a call of
    all ranks: each rank creates all groups of all lines, in one order.

    Args:
        sizes: Sizes by axis, the outermost first; missing tp, cp, pp and dp have size 1.
        axes: Sizes of tp, cp, pp and dp by keyword, in place of `sizes`; pp is the outermost, tp
            the innermost.
        joined: Groups of axes that are used together.
        device_type: Type of device of the tensors that communicate.
        flight: Notes what this rank waits for.

    Attributes:
        place: This rank's index along every axis.

    Collectives: creating a grid of more than one process is collective over all processes of the
    job.
    Raises: ConfigError if the sizes do not multiply to the number of processes.
    """

    place: dict[str, int]
    tp: Axis
    cp: Axis
    dp: Axis
    experts: Axis
    dp_cp: Axis
    expert_dp: Axis
    pp: Axis
    pp_reverse: Axis
    embedding_group: Axis
    world: Axis
    site: Axis
    site_group: Axis
    _lines: Mapping[str, list[list[int]]]
    _group: Callable[[str, list[int]], Any]
    _again: dict[tuple[str, int], Axis]
    _axes: dict[str, Axis]

    def __init__(
        self,
        sizes: AxisSizes | None = None,
        *,
        joined: Sequence[tuple[str, ...]] = (),
        device_type: str = "cpu",
        flight: Flight = NO_FLIGHT,
        **axes: int,
    ):
        self.sizes = _complete(_ordered(axes) if sizes is None else sizes)
        self.device_type = device_type
        self.flight = flight
        num_ranks = prod(self.sizes.values())
        rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks not in (1, world_size):
            given = " ".join(f"{name}={size}" for name, size in self.sizes.items())
            raise config_error(
                "parallel",
                given,
                f"{' * '.join(self.sizes)} = {num_ranks} does not match the job's {world_size} "
                f"processes",
                f"torchrun --nproc-per-node {num_ranks}",
            )
        via_host = num_ranks > 1 and device_type != "cpu" and dist.get_backend() == "gloo"
        self._connect(rank, lines_of(self.sizes, joined), _new_group, via_host)

    @classmethod
    def imagined(
        cls, sizes: AxisSizes, rank: int, group: Callable[[str, list[int]], Any]
    ) -> ProcessGrid:
        """Return the grid as its rank `rank` sees it, outside of any job. `group(axis, ranks)`
        returns a substitute for a communicator.
        """
        grid = cls.__new__(cls)
        grid.sizes = _complete(sizes)
        grid.device_type = "cpu"
        grid.flight = NO_FLIGHT
        lines = lines_of(grid.sizes).items()
        grid._connect(
            rank,
            {name: [x for x in of_name if rank in x] for name, of_name in lines},
            group,
            via_host=False,
        )
        return grid

    @classmethod
    def of(cls, axis: Axis) -> ProcessGrid:
        """Return the grid that consists of this line: all other axes have size 1."""
        grid = cls.imagined({axis.name: axis.size}, axis.rank, lambda _, ranks: axis.group)
        setattr(grid, axis.name, axis)
        grid._axes[axis.name] = axis
        if axis.name in BATCH:
            grid.dp_cp = axis
        return grid

    def _connect(
        self,
        rank: int,
        lines: Mapping[str, list[list[int]]],
        group: Callable[[str, list[int]], Any],
        via_host: bool,
    ) -> None:
        """Take this rank's line of each name. Every rank creates every group in the same order, as
        torch requires.
        """
        self.place = place_of(rank, self.sizes)
        self._lines = lines
        self._group = group
        self._again = {}
        self._axes = {name: Axis(name, 0, (rank,), flight=self.flight) for name in lines}
        for name, line in [
            (name, line) for name, of_name in lines.items() for line in of_name if len(line) > 1
        ]:
            made = group(name, line)
            if rank in line:
                at = line.index(rank)
                self._axes[name] = Axis(
                    name, at, tuple(line), made, flight=self.flight, via_host=via_host
                )
        self.tp, self.dp, self.pp, self.pp_reverse, self.embedding_group, self.world = map(
            self._axes.__getitem__, ("tp", "dp", "pp", "pp_reverse", "embedding_group", "world")
        )
        self.dp, self.cp, self.experts = (self._line(axes) for axes in _DIVIDED)
        self.dp_cp = self._axes[_joined_batch(self.sizes)]
        self.expert_dp = self._axes.get(EXPERT_DP, self.dp_cp)
        self.site = self._axes.get("site", Axis("site", 0, (rank,), flight=self.flight))
        self.site_group = self._axes.get("site_group", self.world)

    def _line(self, axes: Sequence[str]) -> Axis:
        """Return this rank's line along the named axes that the grid has."""
        present = [name for name in axes if name in self.sizes]
        return self._axes.get(
            _JOIN.join(present), Axis(axes[0], 0, (self.rank,), flight=self.flight)
        )

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of communication from now on. Ranks that compile need a longer one at
        first.
        """
        axes = (*self._axes.values(), *self._again.values())
        for group in {
            id(axis.group): axis.group for axis in axes if axis.group is not None
        }.values():
            device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
            group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))

    def axis(self, *names: str) -> Axis:
        """Return this rank's line along an axis, or along several that were joined."""
        return self._axes[_JOIN.join(names)]

    def again(self, name: str, number: int = 1) -> Axis:
        """Return this rank's line along an axis with another communicator, by number, whose
        transfers wait for no others.

        Collectives: the first time, as creating a grid.
        """
        if (name, number) not in self._again:
            axis = self._axes[name]
            made = {
                tuple(line): self._group(f"{name} {number}", line)
                for line in self._lines[name]
                if len(line) > 1
            }
            self._again[name, number] = replace(axis, group=made.get(axis.ranks))
        return self._again[name, number]

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.ranks[self.world.rank]

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of the ranks that run the same micro-batches on the same
        stage.
        """
        others = {"pp", *BATCH, *APART}
        return all(index == 0 for name, index in self.place.items() if name not in others)

    @property
    def replica(self) -> int:
        """Index of this rank's replica among the replicas of all sites."""
        return self.site.rank * self.dp.size + self.dp.rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas at all sites; each has different samples in a batch."""
        return self.site.size * self.dp.size

    def describe(self, stages: Sequence[int] = ()) -> str:
        """Return this rank and its place, for messages: 'rank 5 (stage 2, replica 0, tensor part
        1)'.

        `stages`: the stages that this rank holds; empty: the stage with the number of its pp rank.
        """
        return describe(self.rank, stages or [self.pp.rank], self.place)


def describe(rank: int, stages: Sequence[int], place: Place) -> str:
    """Return a rank and its place on the grid, for messages: 'rank 5 (stages 2 and 5, replica 0,
    tensor part 1)'.
    """
    return f"rank {rank} ({where_of(stages, place)})"


def where_of(stages: Sequence[int], place: Place) -> str:
    """Return a place on the grid, for messages: 'stages 2 and 5, replica 0, tensor part 1'."""
    *others, last = map(str, stages)
    where = [f"stages {', '.join(others)} and {last}" if others else f"stage {last}"]
    return ", ".join(
        where
        + [f"{_WORDS.get(name, name)} {index}" for name, index in place.items() if name != "pp"]
    )


def sizes_of(parallel: ParallelConfig) -> dict[str, int]:
    """Return the axes of the grid that a configuration asks for; the axis of sites only if there
    are several, and cp and axes of experts only if they are used.

    parallel.dp is the product of dp and experts, and parallel.cp of cp and context_experts. Experts
    are divided within cp as far as its size allows, and the rest within dp.
    """
    within_cp = gcd(parallel.ep, parallel.cp)
    within_dp = parallel.ep // within_cp
    sites = {"site": parallel.sites} if parallel.sites > 1 else {}
    replicas = {"dp": parallel.dp // within_dp}
    replicas |= {EXPERTS: within_dp} if within_dp > 1 else {}
    context = {"cp": parallel.cp // within_cp} if parallel.cp > 1 else {}
    context |= {CONTEXT_EXPERTS: within_cp} if within_cp > 1 else {}
    return sites | {"pp": parallel.pp} | replicas | context | {"tp": parallel.tp}


def place_of(rank: int, sizes: AxisSizes) -> dict[str, int]:
    """Return the place of a rank on a grid."""
    place = {}
    for name, size in reversed(list(sizes.items())):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in sizes}


def lines_of(
    sizes: AxisSizes, joined: Sequence[tuple[str, ...]] = ()
) -> dict[str, list[list[int]]]:
    """Return the global ranks along every axis, by its name: a list for each line of the grid that
    has one.

    The order is the one in which a grid creates the groups: its axes from the innermost on, then
    the joined ones.
    """
    names = list(sizes)
    ranks = torch.arange(prod(sizes.values())).view(*sizes.values())

    def along(*moving: str, of: torch.Tensor = ranks) -> list[list[int]]:
        dims = [names.index(name) for name in sorted(moving, key=names.index)]
        return (
            of.movedim(dims, list(range(-len(dims), 0)))
            .reshape(-1, prod(of.shape[dim] for dim in dims))
            .tolist()
        )

    lines = {name: along(name) for name in reversed(names)}
    lines["pp_reverse"] = lines["pp"]
    last = sizes["pp"] - 1
    ends = ranks.index_select(names.index("pp"), torch.tensor([0, last]))
    batch = [name for name in BATCH if name in names]
    lines["embedding_group"] = along("pp", *batch, of=ends) if last else []
    if any(name in EXPERT_AXES for name in names):
        divided = [axes for axes in _DIVIDED if all(name in names for name in axes)]
        lines |= {_JOIN.join(axes): along(*axes) for axes in divided}
        lines[EXPERT_DP] = along(*(name for name in batch if name not in EXPERT_AXES))
    if len(batch) > 1:
        lines[_joined_batch(names)] = along(*batch)
    if any(name in APART for name in names):
        lines["site_group"] = along(*(name for name in names if name not in APART))
    return lines | {_JOIN.join(group): along(*group) for group in joined} | {"world": along(*names)}


def _joined_batch(names: Iterable[str]) -> str:
    """Return the name of the line of the ranks that share a batch, of a grid with these axes."""
    present = set(names)
    return _JOIN.join(name for name in BATCH if name in present)


def _ordered(by_keyword: Mapping[str, int]) -> AxisSizes:
    """Return sizes of pp, dp, cp and tp in the order of a grid.

    Raises:
        ConfigError: There are others, whose place in the order is unknown.
    """
    for name in by_keyword:
        if name not in _ORDER:
            raise config_error(
                "axis",
                name,
                "must be pp, dp, cp or tp; give the sizes of other axes in a dict, the outermost first",
                f'ProcessGrid({{"{name}": 2, "tp": 2}})',
            )
    return {
        name: by_keyword.get(name, 1) for name in _ORDER if name in _USUAL or name in by_keyword
    }


def _complete(sizes: AxisSizes) -> dict[str, int]:
    """Return sizes with pp, dp and tp added if they are missing.

    Raises:
        ConfigError: A size is not a number of ranks.
    """
    if not isinstance(sizes, Mapping):
        raise config_error(
            "sizes",
            sizes,
            "must map names of axes to their sizes",
            '{"pp": 2, "tp": 2}, or pp=2, tp=2',
        )
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise config_error(
                f"parallel.{name}", size, "must be a whole number of at least 1", "1"
            )
    return {name: 1 for name in _USUAL if name not in sizes} | dict(sizes)


def _new_group(name: str, ranks: list[int]) -> dist.ProcessGroup:
    """Create a communicator with the timeout of the job's group."""
    backend = str(dist.get_backend())
    options = _of_the_job("cuda" if backend == "nccl" else "cpu")
    return dist.new_group(
        ranks, options._timeout, _SHARED_GLOO if backend == "gloo" else backend, group_desc=name
    )


def _of_the_job(device_type: str) -> Any:
    """Return the options of the job's group, for tensors of a device."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device(device_type)).options


def _shared_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a Gloo group on the socket thread of the job's group.

    Otherwise each group brings a thread, which wakes up a hundred times a second and takes that
    time from computation.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _of_the_job("cpu")._devices
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[call-arg]


_SHARED_GLOO = "shared_gloo"
if dist.is_gloo_available():
    dist.Backend.register_backend(_SHARED_GLOO, _shared_gloo, devices="cpu")
