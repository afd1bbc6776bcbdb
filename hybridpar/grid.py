"""The 3D process grid (pp x dp x tp) and its axes.

Rank order: tp fastest, then dp, then pp, so tensor parallelism stays on the fastest links. There is no current
grid: whoever communicates is handed the Axis it needs, and an axis of size 1 works without a process group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hybridpar.errors import config_error

AXIS_ORDER = ("pp", "dp", "tp")  # slowest to fastest


@dataclass(slots=True)
class Traffic:
    """What went over one axis: calls and payload bytes of this rank, by operation name."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, op: str, num_bytes: int) -> None:
        self.calls[op] += 1
        self.num_bytes[op] += num_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.num_bytes.clear()


@dataclass(frozen=True, slots=True)
class Axis:
    """One line of ranks that communicate, and this process's place on it.

    `ranks` are global ranks in axis order, `rank` is the index of this process among them. `group` is None where no
    communication can happen (size 1).
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), f"axis {self.name}: rank {self.rank} of {len(self.ranks)}"
        assert self.group is not None or len(self.ranks) == 1, f"axis {self.name} of size {self.size} needs a group"

    @property
    def size(self) -> int:
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


class ProcessGrid:
    """A pp x dp x tp grid over all processes of the job.

    Axes: `tp`, `dp`, `pp`; `pp_reverse` (the same line as pp with a communicator of its own, for gradients that flow
    against the activations); `ends` (all replicas of the first and the last pipeline stage, which share tied
    embeddings; size 1 in between, and where pp is 1); `world` (every rank).

    Collectives: creating a grid of more than one process is collective over all processes of the job.
    Raises: ConfigError if tp * pp * dp is not the number of processes.
    """

    def __init__(self, *, tp: int = 1, pp: int = 1, dp: int = 1, device_type: str = "cpu"):
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
        self.device_type = device_type
        self.sizes = sizes
        if num_ranks == 1:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._set(*(Axis(name, 0, (rank,)) for name in ("tp", "dp", "pp", "pp_reverse", "ends", "world")))
            return
        rank = dist.get_rank()
        mesh = init_device_mesh(device_type, tuple(sizes[a] for a in AXIS_ORDER), mesh_dim_names=AXIS_ORDER)
        axes = {}
        for name in AXIS_ORDER:
            group = mesh.get_group(name)
            axes[name] = _axis(name, rank, tuple(dist.get_process_group_ranks(group)), group)
        lines = [
            tuple((s * dp + d) * tp + t for s in range(pp)) for d, t in product(range(dp), range(tp))
        ]  # the ranks of each pipeline, stage by stage
        ends = [
            tuple((s * dp + d) * tp + t for s in (0, pp - 1) for d in range(dp)) for t in range(tp)
        ] if pp > 1 else []
        self._set(
            axes["tp"], axes["dp"], axes["pp"],
            _new_axis("pp_reverse", rank, lines),
            _new_axis("ends", rank, ends),
            _new_axis("world", rank, [tuple(range(num_ranks))]),
        )

    def _set(self, tp: Axis, dp: Axis, pp: Axis, pp_reverse: Axis, ends: Axis, world: Axis) -> None:
        self.tp, self.dp, self.pp, self.pp_reverse, self.ends, self.world = tp, dp, pp, pp_reverse, ends, world

    @property
    def rank(self) -> int:
        return self.world.ranks[self.world.rank]

    def describe(self) -> str:
        """Where this process stands, for messages: 'rank 5 (stage 2, replica 0, tensor part 1)'."""
        return f"rank {self.rank} (stage {self.pp.rank}, replica {self.dp.rank}, tensor part {self.tp.rank})"


def _axis(name: str, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
    return Axis(name, ranks.index(rank), ranks, group if len(ranks) > 1 else None)


def _new_axis(name: str, rank: int, lines: list[tuple[int, ...]]) -> Axis:
    """Every rank creates every group, in the same order, as torch.distributed requires; returns this rank's own."""
    mine = Axis(name, 0, (rank,))
    for line in lines:
        group = dist.new_group(list(line)) if len(line) > 1 else None
        if rank in line:
            mine = _axis(name, rank, line, group)
    return mine
