"""The sides of a race over the links of scripts/testbed: a way to train, on one link, with an
engine of its own.

Both ranks hold the sides of all links, each with process groups on its own link, so that they can
run by turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import FixedLoader, Shape, engine_config, over_ranks, summary
from hybridpar.config import from_mapping
from hybridpar.grid import AxisSizes, ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.runtime.recording import HostClock, Recording
from hybridpar.schedules.action import COMPUTE, Action, Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.simulate.simulator import Costs, simulate
from hybridpar.train.engine import Engine, StepResult

# bytes, of which IP and TCP take the second
PACKET = 9000
HEADERS = 52
SENDING = ("send", "all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True)
class Link:
    """A link of the test bed; mbit is 0 where it has no limit, pid that of its emulator."""

    name: str
    mbit: float
    delay_ms: float
    pid: int

    def seconds(self, num_bytes: float) -> float:
        """How long its wire is taken by a message."""
        return num_bytes * 8e-6 / self.mbit * PACKET / (PACKET - HEADERS) if self.mbit else 0.0

    def sent_bytes(self) -> int:
        """Bytes that this host has sent over it, headers included."""
        lines = (line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines())
        return next(
            (int(counts.split()[8]) for name, _, counts in lines if name.strip() == self.name), 0
        )

    def cpu_seconds(self) -> float:
        """CPU time that its emulator has used."""
        if not self.pid:
            return 0.0
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Method:
    """A way to use both ranks. overlaps: whether it computes while it sends, as far as bytes are
    counted.

    pace: seconds that forward and backward of a micro-batch take besides what they compute, during
    which the rank waits as if for an accelerator. slices: whether tp ranks send slices of what goes
    from stage to stage, not all of it each. messages: the codec of what goes from stage to stage.
    gradients: that of replicas' gradients, of which a hundredth is sent, with what is sent whole.
    split: whether backwards are I and W. pieces: micro-batches that the shape's own is cut into.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    warmup: str = "depth"
    overlaps: bool = True
    pace: float = 0.0
    slices: bool = True
    messages: str = "none"
    gradients: str = "none"
    split: bool = False
    pieces: int = 1


class Paced:
    """A stage that takes longer without using the CPU: forward by a third of `seconds`, backward by
    two thirds, half of that for I where it is split (`pace` has the other half)."""

    def __init__(self, stage: nn.Module, seconds: float, *, split: bool = False):
        self.stage = stage
        self.seconds = seconds
        self.recompute = stage.recompute
        self.counters = stage.counters
        self.backward_seconds = seconds * (1 / 3 if split else 2 / 3)

    def __call__(self, *inputs: Any) -> Any:
        out = self.stage(*inputs)
        time.sleep(self.seconds / 3)
        if not isinstance(out, dict):
            return _SlowBackward.apply(out, self.backward_seconds)
        first, *others = out
        return {first: _SlowBackward.apply(out[first], self.backward_seconds)} | {
            name: out[name] for name in others
        }


def pace(engine: Engine, seconds: float) -> None:
    """Has forward and backward of a micro-batch, through all stages of the rank, take `seconds`
    more."""
    executor = engine.executor
    split = engine.config.pipeline.split_backward
    each = seconds / sum(map(len, executor.stages.values()))
    executor.stages = {  # type: ignore[assignment]
        number: [Paced(part, each, split=split) for part in parts]
        for number, parts in executor.stages.items()
    }
    if split:

        def slow(inner: Callable[[Action], None], action: Action) -> None:
            inner(action)
            time.sleep(each / 3)

        for kind in (Kind.W, Kind.B):  # what stayed whole ends with it, too
            executor._table[kind] = partial(slow, executor._table[kind])


class _SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


def grid_on(link: Link, sizes: AxisSizes) -> ProcessGrid:
    """A grid all of whose messages go over one link. Collectives: called on all ranks."""
    assert dist.group.WORLD is not None
    job: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options
    # the groups of a grid take those of the job's own
    before = job._devices
    job._devices = [_socket_thread(link.name)]
    grid = ProcessGrid(sizes)
    job._devices = before
    return grid


@cache
def _socket_thread(interface: str) -> Any:
    """The Gloo device of an interface, which all groups on it share."""
    return dist.ProcessGroupGloo.create_device(interface=interface)  # type: ignore[attr-defined]


@dataclass
class Rounds:
    """Measurements of a side on this rank: seconds of a batch in the steady state; and shares of
    the time: CPU time used, by the process and by the emulator; waiting, for inputs and for others
    (the norm, the reduction before it); ready to go on, but other work of the machine had the core.
    link_bytes: that the host sent for each batch."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    emulator: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    no_core: list[float] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)


class Side:
    """A method on a link, with an engine of its own. Collectives: created and used on all ranks."""

    def __init__(self, method: Method, link: Link, shape: Shape, dtype: str, m: int):
        shape = replace(shape, micro_batch=shape.micro_batch // method.pieces)
        m = m * method.pieces
        config = engine_config(
            shape,
            tp=method.tp,
            pp=method.pp,
            dp=method.dp,
            num_microbatches=m,
            schedule=method.schedule,
            dtype=dtype,
        )
        config = from_mapping(
            {
                "pipeline": {"warmup": method.warmup, "split_backward": method.split},
                "compression": {
                    "messages": method.messages,
                    "gradients": method.gradients,
                    "gradients_kept": 0.005,  # in the mean 0.0075, and with what is sent whole 0.01
                },
            },
            config,
        )
        self.method, self.link, self.m, self.grid = (
            method,
            link,
            m,
            grid_on(link, sizes_of(config.parallel)),
        )
        self.engine = Engine(JobPlan(config), self.grid, torch.device("cpu"))
        if not method.slices:
            self.engine.executor.transport = replace(self.engine.executor.transport, slicing=None)
        if method.pace:
            pace(self.engine, method.pace / method.pieces)
        self.loader = FixedLoader(shape, m, self.grid.dp.rank, self.grid.dp.size)
        self.tokens = m * self.grid.dp.size * shape.microbatch_tokens
        self.losses: list[float] = []
        self.rounds = Rounds()

    def run(self, batches: int) -> None:
        """Trains, and notes how long `batches` took from the update of the first one on."""
        engine = self.engine
        rounds = self.rounds
        ends: list[float] = []

        def note(result: StepResult) -> None:
            ends.append(time.perf_counter())
            self.losses.append(result.loss)

        recording = engine.executor.recording = Recording(HostClock())
        dist.barrier()
        start = time.perf_counter()
        cpu = time.process_time()
        emulator = self.link.cpu_seconds()
        sent = self.link.sent_bytes()
        # 2bw updates batch t when batch t + 2 begins, and the last two in the drain
        engine.train(self.loader, batches + (1 if engine.schedule.flush else 3), note)
        wall = time.perf_counter() - start
        rounds.link_bytes.append((self.link.sent_bytes() - sent) / len(ends))
        rounds.cpu.append((time.process_time() - cpu) / wall)
        rounds.emulator.append((self.link.cpu_seconds() - emulator) / wall)
        steady = ends[batches] - ends[0]
        rounds.seconds.append(steady / batches)
        events = [e for e in recording.events() if ends[0] <= e.start < ends[batches]]
        rounds.inputs.append(sum(e.waited for e in events if e.action.kind in COMPUTE) / steady)
        rounds.others.append(sum(e.waited for e in events if e.action.kind not in COMPUTE) / steady)
        rounds.no_core.append(sum(e.end - e.start - e.waited - e.own for e in events) / steady)

    def wall(self) -> list[float]:
        """Seconds of a batch on the slower rank, of each round."""
        return over_ranks(self.rounds.seconds, "max")

    def sent(self) -> tuple[float, float]:
        """Bytes and messages of a batch that go each way between the hosts: those of the host that
        sends more.

        Of an all-reduce between two, each sends as much as its payload; of two broadcasts one.
        """
        ranks = dist.get_world_size() // 2
        traffic = [
            axis.traffic
            for axis in (self.grid.tp, self.grid.pp, self.grid.pp_reverse, self.grid.dp)
            if len({rank // ranks for rank in axis.ranks}) > 1
        ]
        num_bytes, calls = (
            sum(counts[op] / (1 + (op == "broadcast")) for counts in counters for op in SENDING)
            / len(self.losses)
            for counters in ([t.num_bytes for t in traffic], [t.calls for t in traffic])
        )
        here = dist.get_rank() // ranks
        num_bytes, calls = (
            max(over_ranks([counted * (host == here) for host in range(2)], "sum"))
            for counted in (num_bytes, calls)
        )
        return num_bytes, calls

    def simulated(self, pair_s: float, wire_s: float) -> float:
        """Seconds of a batch, by simulation of the plan that ran; `pair_s`: of forward and backward
        of any stage."""
        delay = self.link.delay_ms * 1e-3
        costs = Costs(
            forward=pair_s / 3,
            backward=pair_s * 2 / 3,
            transfer=wire_s / self.m,
            latency=delay,
            reduce=wire_s if self.method.dp > 1 else 0.0,
            norm=2 * delay,
            blocking_norm=True,
        )
        return simulate(
            make_plan(
                self.engine.schedule.with_options(
                    split=self.method.split, clip=True, gather=False, feedback=False
                ),
                self.engine.shape,
                num_batches=16,
            ),
            costs,
        ).step_time(self.m)

    def numbers(self, free: Side) -> dict[str, Any]:
        """The side as numbers for the result file; `free`: the same method on the link without
        limit."""
        rounds, wall, wall_free, (num_bytes, messages) = (
            self.rounds,
            self.wall(),
            free.wall(),
            self.sent(),
        )
        alone = min(wall_free)
        wire = self.link.seconds(num_bytes)
        numbers = {
            "tokens_per_s": round(self.tokens / statistics.median(wall), 1),
            "best_tokens_per_s": round(self.tokens / min(wall), 1),
            "share": ratio(wall_free, wall),
            "share_by_bytes": round(
                alone / (max(alone, wire) if self.method.overlaps else alone + wire), 3
            ),
        }
        if self.method.tp == 1:
            pair = alone / free.simulated(1.0, 0.0)
            numbers["share_simulated"] = round(alone / self.simulated(pair, wire), 3)
        if (compression := self.engine.state.compression).packed:
            numbers["elements"] = round(
                compression.sent().elements / compression.sent().whole_elements, 5
            )
        return numbers | {
            "bytes_of_a_batch": num_bytes,
            "messages_of_a_batch": messages,
            "wire_ms": round(1e3 * wire, 3),
            "link_bytes_of_a_batch": round(
                max(over_ranks([statistics.median(rounds.link_bytes)], "max"))
            ),
            "waiting_for_inputs": [middle(shares) for shares in of_ranks(rounds.inputs)],
            "waiting_for_norm": [middle(shares) for shares in of_ranks(rounds.others)],
            "without_a_core": [middle(shares) for shares in of_ranks(rounds.no_core)],
            "cpu_cores": {
                "ranks": middle(over_ranks(rounds.cpu, "sum")),
                "emulator": middle(over_ranks(rounds.emulator, "max")),
            },
            "wall_ms": [round(1e3 * t, 3) for t in wall],
        }


def of_ranks(values: Sequence[float]) -> list[list[float]]:
    """The lists of all ranks. Collectives: one all-gather."""
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, list(values))
    return lists


def middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of each round; `best`: the ratio of the fastest rounds,
    least disturbed."""
    return summary([a / b for a, b in zip(over, under, strict=True)]) | {
        "best": round(min(over) / min(under), 4)
    }
