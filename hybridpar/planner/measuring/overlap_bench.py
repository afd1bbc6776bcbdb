"""Measure how much of a rank's time its state transfers take while it computes, with blocks run as
in training.

a pass              F embedding, F layer, .., F head,  B head, B layer, .., B embedding
with gathers        each block's weights are gathered from shards one block ahead, awaited, and
                    released after it
with sums           its gradients are reduce-scattered after its backward, and awaited one block
                    later
with reads, writes  an item of its size is read from the file one block ahead, and written or
                    dropped after it

The additional time of such a pass, although all transfers overlap with computing, cannot be derived
from a bandwidth: CPU time for calls, copies and page mappings, and time in which ranks wait for
each other. Two things are not counted: time without a core beyond the CPU time, which other
programs cause; and waiting for a link between hosts, whose time is known.

Units: seconds, bytes.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import torch

from hybridpar.comm import Works, barrier, gather_objects
from hybridpar.config import UNCOMPRESSED, Config, OuterConfig, ParallelConfig
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import BlockOptions, build_blocks
from hybridpar.planner.measuring.bench import Bench, Beside
from hybridpar.runtime.stage import Stage
from hybridpar.state import Partition
from hybridpar.state.parameters import StageParameters
from hybridpar.state.reduction.partition import make_routes
from hybridpar.state.residency.chunks import Buffer, cut
from hybridpar.state.residency.pages import Region, SparePages
from hybridpar.state.residency.shares import ShardedMemory, Shares, WholeChunk
from hybridpar.state.residency.store import DiskStore
from hybridpar.state.residency.tiers import Tiers
from hybridpar.state.residency.uses import uses_of

GIB = 1 << 30
_PASSES = 10
_QUICK_PASSES = 4
_ROOM = 4
"""Number of items that have room at a time: one in use, one arriving, and two spare."""


class Moving(Beside):
    """State transfers along with the blocks of a pass; this base class does none.

    At the start of a pass, the state of its first block is resident.

    Args:
        num_bytes: Bytes transferred in a pass.
    """

    num_bytes = 0

    def end(self) -> None:
        """Finish the pass."""


class Shared(Moving):
    """Chunks of some blocks' 'weights' or 'gradients' that the replicas of `grid` share."""

    def __init__(self, config: Config, numbers: Sequence[int], grid: ProcessGrid, kind: str):
        sharing = replace(
            config,
            parallel=ParallelConfig(dp=grid.dp.size, zero=3),
            compression=UNCOMPRESSED,
            outer=OuterConfig(),
        )
        policy = JobPlan(sharing).state_policy(1, 1)
        parameters = StageParameters(
            Stage(
                build_blocks(
                    config.model,
                    Axis("tp"),
                    numbers,
                    options=BlockOptions(config.kernels),
                    dtype=policy.dtype,
                )
            ),
            policy.dtype,
        )
        uses = uses_of(
            [range(n, n + 1) for n in numbers],
            parameters.placements,
            parameters.blocks,
            elementwise=True,
        )
        partition = Partition(
            parameters.layout, make_routes(policy, parameters.placements, grid), uses=uses
        )
        memory = ShardedMemory("cpu", policy.moved_kinds)
        dtype = parameters.dtype if kind == "weights" else parameters.master_dtype
        whole = Buffer(parameters.layout, dtype, memory, cut(parameters.layout, uses), f"{kind}/0")
        self.shares = Shares(partition, whole, memory)
        self.chunks = [
            [chunk for chunk in memory.chunks if chunk.use.parts[0] == i]
            for i in range(len(numbers))
        ]
        self.sizes = [sum(chunk.num_bytes for chunk in chunks) for chunks in self.chunks]
        self.under_way: dict[int, list[Works]] = {}


class Gathers(Shared):
    """All-gathers of weights for every forward and every backward."""

    def __init__(self, config: Config, numbers: Sequence[int], grid: ProcessGrid):
        super().__init__(config, numbers, grid, "weights")
        self.num_bytes = 2 * sum(self.sizes) - self.sizes[0]

    def before(self, place: int, following: int | None, *, backward: bool) -> None:
        for one in (place, following):
            if one is not None and one not in self.under_way:
                self.under_way[one] = [self._gather(chunk) for chunk in self.chunks[one]]
        for works in self.under_way[place]:
            works.wait()

    def after(self, place: int, *, backward: bool) -> None:
        del self.under_way[place]
        for chunk in self.chunks[place]:
            chunk.give_back()

    def _gather(self, chunk: WholeChunk) -> Works:
        chunk.take()
        return self.shares.gather(chunk.use)


class Sums(Shared):
    """Reduce-scatters of gradients after every backward, awaited before the second-next
    backward."""

    def __init__(self, config: Config, numbers: Sequence[int], grid: ProcessGrid):
        super().__init__(config, numbers, grid, "gradients")
        self.num_bytes = sum(self.sizes)

    def before(self, place: int, following: int | None, *, backward: bool) -> None:
        if backward:
            self._complete(1)
            for chunk in self.chunks[place]:
                chunk.take()

    def after(self, place: int, *, backward: bool) -> None:
        if backward:
            self.under_way[place] = [
                self.shares.reduce_scatter(chunk.use) for chunk in self.chunks[place]
            ]

    def end(self) -> None:
        self._complete(0)

    def _complete(self, left: int) -> None:
        """Wait for the oldest reductions, except the last `left`."""
        for place in list(self.under_way)[: len(self.under_way) - left]:
            for chunk, works in zip(self.chunks[place], self.under_way.pop(place), strict=True):
                works.wait()
                self.shares.take(self.shares.names(chunk.use), add=True)
                chunk.give_back()


class InFile(Moving):
    """An item in a file for each block.

    Args:
        changed: Whether items are written back.

    Raises:
        HybridparError: There is no room.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], *, changed: bool):
        self._changed = changed
        store = DiskStore(folder, sizes)
        regions = [Region(size) for size in sizes]
        taken = [len(region.view) for region in regions]
        self.num_bytes = 2 * sum(taken) - taken[0]
        self.tiers = Tiers(regions, frozenset(), _ROOM * max(taken), store, SparePages())
        for i, region in enumerate(regions):
            with self.tiers.changing([i]):
                region.tensor.fill_(1)
            self.tiers.release(i)
        self.end()

    def before(self, place: int, following: int | None, *, backward: bool) -> None:
        for one in (place, following):
            if one is not None and self.tiers.is_absent(one):
                self.tiers.fetch(one)
        self.tiers.await_item(place, changing=self._changed)

    def after(self, place: int, *, backward: bool) -> None:
        self.tiers.release(place)

    def end(self) -> None:
        self.tiers.settle()


def measure_beside(config: Config, world: Axis, folder: Path, *, quick: bool) -> dict[str, float]:
    """Return the seconds of a rank's own time per GiB, by transfer: 'gathers', 'sums', 'reads',
    'writes'.

    Transfers that cannot be measured, with one rank or without room for the file, are left out.

    Collectives: on all ranks of the job.
    """
    bench = Bench(config, config.train.micro_batch_size, Axis("tp"), torch.device("cpu"))
    moves = {"": Moving()}
    if world.size > 1:
        grid = ProcessGrid(dp=world.size)
        moves |= {
            "gathers": Gathers(config, bench.numbers, grid),
            "sums": Sums(config, bench.numbers, grid),
        }
    files = _files(bench, folder)
    if all(gather_objects(bool(files), world)):
        moves |= zip(("reads", "writes"), files, strict=True)
    try:
        return _seconds(bench, moves, world, _QUICK_PASSES if quick else _PASSES)
    finally:
        for file in files:
            file.tiers.close()


def _files(bench: Bench, folder: Path) -> list[InFile]:
    """Return transfers that only read items, and transfers that also write them; none if there is
    no room."""
    files: list[InFile] = []
    sizes = [
        max(1, unit.num_parameters * unit.state.weights.dtype.itemsize) for unit in bench.units
    ]
    try:
        for changed in (False, True):
            files.append(InFile(folder, sizes, changed=changed))
    except HybridparError:
        for file in files:
            file.tiers.close()
        return []
    return files


def _seconds(bench: Bench, moves: dict[str, Moving], world: Axis, passes: int) -> dict[str, float]:
    """Return the seconds of each kind of pass. The kinds take turns, and the first pass of each
    does not count.

    Collectives: on all ranks.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in moves}
    wall = own = 0.0
    for i in range(passes + 1):
        for name, moving in moves.items():
            moving.before(0, None, backward=False)
            barrier(world)
            start = _times(bench)
            busy = time.process_time()
            bench.a_pass(moving)
            there, mine, thread = (b - a for a, b in zip(start, _times(bench), strict=True))
            # training waits later for what is still under way, but it is work all the same
            moving.end()
            if i:
                wall = wall + there
                own = own + mine
                taken[name].append((time.process_time() - busy, mine - thread))
    # share of the time with a core: a process that seldom gets one waits for other programs, or
    # between hosts for the link
    share = own / wall if len(set(gather_objects(platform.node(), world))) == 1 else 0.0
    typical = {
        name: sum(
            median(column) * weight
            for column, weight in zip(zip(*rows, strict=True), (1, share), strict=True)
        )
        for name, rows in taken.items()
    }
    everyone = gather_objects(typical, world)
    took = {name: fmean(rank[name] for rank in everyone) for name in moves}
    return {
        name: max(0.0, took[name] - took["reads" if name == "writes" else ""])
        * GIB
        / max(1, moving.num_bytes)
        for name, moving in moves.items()
        if name
    }


def _times(bench: Bench) -> tuple[float, float, float]:
    """Return the current wall-clock time, the rank's own time, and the CPU time of this thread."""
    return *bench.clock.read(bench.clock.now()), time.thread_time()
