"""Streaming batch PCA: the numbers of one process that has the factors of all replicas, and what
the method holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grids import engines, fill, load_all
from engines import start
from ranks import run_ranks
from state.test_compression import PCA, SKIPPED, Skips, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar import random
from hybridpar.checkpoint.folders import begin, publish
from hybridpar.checkpoint.format.manifest import TrainingState
from hybridpar.checkpoint.format.part import Part, is_writer
from hybridpar.checkpoint.save import make_manifest
from hybridpar.config import CompressionConfig, Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.nn.matmul import Product
from hybridpar.nn.placement import Init, Placement, split_ranges
from hybridpar.state import Partition, Route, StatePolicy, find_divergence
from hybridpar.state.compression import BatchGradients, Compression
from hybridpar.state.compression.stream import BlockStream
from hybridpar.state.gradients import BlockParts
from hybridpar.state.layout import Bucket, FlatLayout
from hybridpar.state.residency.chunks import Memory

Factors = list[tuple[Tensor, Tensor]]
Estimate = tuple[Tensor, Tensor, Tensor]
"""X, D and s."""


@dataclass
class Ran:
    """One rank's gradients of every batch, by parameter, and its state before each, and at the
    end."""

    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: list[dict[str, Factors]] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    learned: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: Any = None
    traffic: int = 0
    dense: int = 0
    diverged: str = ""


def run(
    config: Config,
    steps: int,
    skips: bool = False,
    watch: Callable[[Any], None] = lambda state: None,
) -> Ran:
    engine, samples = start(config, policy=Skips(JobPlan(config)) if skips else None)
    state, compression, ran = engine.state, engine.state.compression, Ran()
    assert compression.packed
    watch(state)
    methods = compression._methods.values()
    ran.dense = sum(entry.numel for method in methods for entry in method.dense)
    ran.axes = {name: state.partition.axis_of(name).ranks for name in compression.packed}
    begin, take, opened = state.begin, state.gradients.take, compression.feedback.open

    def note_begin(*args: Any) -> None:
        ran.parts.append({})
        begin(*args)

    def note_part(name: str, part: Any, *args: Any) -> None:
        if name in compression.packed:
            ran.parts[-1].setdefault(name, []).append((part.dy.double(), part.x.double()))
        take(name, part, *args)

    def note_learned(*args: Any) -> None:
        ran.learned.append({key: x.clone() for key, x in compression.feedback.learned.items()})
        opened(*args)

    state.begin = note_begin  # type: ignore[method-assign]
    state.gradients.take = note_part  # type: ignore[method-assign]
    compression.feedback.open = note_learned  # type: ignore[method-assign]
    before = engine.grid.dp.traffic.num_bytes["broadcast"]
    engine.train(
        samples,
        steps,
        lambda step: ran.losses.append(step.loss),
        lambda batch, gradients: ran.sums.append(
            {name: x.clone() for name, x in gradients.items()}
        ),
    )
    ran.traffic = engine.grid.dp.traffic.num_bytes["broadcast"] - before
    ran.learned.append({key: x.clone() for key, x in compression.feedback.learned.items()})
    ran.sent, ran.diverged = compression.sent(), find_divergence(state.placed(), engine.grid)
    return ran


def of(learned: dict[str, Tensor], name: str) -> Estimate:
    x, d, s = (learned[f"{name}.{what}"].double() for what in ("basis_in", "basis_out", "scale"))
    return x, d, s


def orthonormal(x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x)
    return q @ torch.diag(torch.sign(torch.diag(r)))


def oracle(replicas: list[Factors], before: Estimate, num_blocks: int) -> tuple[Tensor, Estimate]:
    """The sum that is taken for that of a batch, and what is learned from it; of gradients that are
    whole."""
    (x, d, s), more = before, int(before[2].any())
    for i, (a, b) in enumerate(split_ranges(len(replicas[0]), num_blocks), start=more):
        g = sum(dy.t() @ rows for own in replicas for dy, rows in own[a:b])
        if i == 0:
            m, k = d.shape
            d = orthonormal(
                random.normal(
                    0,
                    random.site(f"sbpca {m} {k}"),
                    random.CounterBlock(m, k, stride=k, start=0),
                    torch.float64,
                )
            )
            x = orthonormal(g.t() @ d)
            d = orthonormal(g @ x)
        else:
            x = orthonormal(i * x + g.t() @ d / s)
            d = orthonormal(i * d + g @ x / s)
        s = (i * s + torch.diag(d.t() @ g @ x)) / (i + 1)
    return num_blocks * d @ torch.diag(s) @ x.t(), (x, d, s)


DEEP = {
    "model": {"num_layers": 4, "hidden_size": 24, "num_heads": 3, "seq_length": 8, "vocab_size": 31}
}
FP64 = {"train": {"dtype": "fp64"}}
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "2bw, three replicas, a step is skipped": (
        {"dp": 3},
        "2bw",
        FP64 | {"pipeline": {"num_microbatches": 3}},
    ),
    "1f1b, tp": ({"dp": 2, "tp": 2}, "1f1b", FP64),
    "2bw, split backward, bf16": (
        {"dp": 2, "pp": 2},
        "2bw",
        {"pipeline": {"split_backward": True}, "train": {"dtype": "bf16"}},
    ),
    "interleaved, ZeRO-1": ({"dp": 2, "pp": 2, "zero": 1}, "interleaved", DEEP | FP64),
    "ZeRO-3": ({"dp": 2, "zero": 3}, "2bw", FP64),
    "on the host": ({"dp": 2}, "2bw", {"memory": {"host_optimizer": True}} | FP64),
    "pipedream": ({"dp": 2, "pp": 2}, "pipedream", {"optim": {"clip_grad": 0.0}} | FP64),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_one_process_with_all_factors(case: str) -> None:
    parallel, schedule, more = CASES[case]
    config = make(PCA, parallel, schedule, **more)
    skips = "skipped" in case
    ran = run_ranks(run, config.parallel.num_ranks, config, 4, skips)
    assert {one.diverged for one in ran} == {""}
    exact = (
        {"rtol": 1e-9, "atol": 1e-11}
        if config.train.dtype == "fp64"
        else {"rtol": 1e-3, "atol": 1e-4}
    )
    for name, ranks in {name: of for one in ran for name, of in one.axes.items()}.items():
        group = [ran[rank] for rank in ranks]
        for batch in range(4):
            before = of(group[0].learned[batch], name)
            total, after = oracle([one.parts[batch][name] for one in group], before, 3)
            for one in group:
                torch.testing.assert_close(one.sums[batch][name].double(), total, **exact)
            wanted = before if skips and batch == SKIPPED else after
            for tensor, expected in zip(of(group[0].learned[batch + 1], name), wanted, strict=True):
                torch.testing.assert_close(tensor, expected, **exact)
    assert sum(len(one.axes) for one in ran) >= 4 * config.model.num_layers
    if parallel == {"dp": 3}:
        check_bytes(ran)


def check_bytes(ran: list[Ran]) -> None:
    """Ranks send two thin matrices for each block, and what goes with them unchanged."""
    shapes = [ran[0].sums[0][name].shape for name in ran[0].axes]
    whole = ran[0].dense
    assert {one.sent.num_bytes for one in ran} == {
        4 * 8 * (whole + sum(3 * 3 * (m + n) for m, n in shapes))
    }
    assert {one.sent.elements * 8 for one in ran} == {ran[0].sent.num_bytes}
    assert {one.traffic for one in ran} == {sum(one.sent.num_bytes for one in ran)}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("start_at", "model"),
    [
        (2, DEEP["model"] | {"num_layers": 2}),
        (0, DEEP["model"] | {"kind": "bert", "hidden_size": 48}),
    ],
    ids=["gpt", "bert"],
)
def test_shares_have_the_bits_of_whole_sums_without_a_buffer_of_them(
    start_at: int, model: dict[str, Any]
) -> None:
    """Any ZeRO, and the first batches, which are sent whole: two addends have one order.
    BERT's have other places in messages with ZeRO-3, some of them not aligned."""
    of_stages = [
        run_ranks(
            run_and_look,
            2,
            make(
                PCA | {"gradients_start": start_at},
                {"dp": 2, "zero": zero},
                model=model,
                optim={"clip_grad": 0.0},
            ),
        )
        for zero in (0, 1, 2, 3)
    ]
    for zero, ranks in enumerate(of_stages):
        for (ran, buffered), (one, _) in zip(ranks, of_stages[0], strict=True):
            assert ran.losses == one.losses
            assert len(ran.axes) >= 8
            absent = ran.axes.keys() if zero > 1 or not start_at else ()
            assert sorted([*absent, *buffered]) == sorted(one.sums[0])
            for batch, sums in enumerate(one.sums):
                assert all(torch.equal(ran.sums[batch][name], x) for name, x in sums.items()), batch


def run_and_look(config: Config) -> tuple[Ran, set[str]]:
    """Parameters whose gradients are in buffers, too."""
    engine, _ = start(config)
    return run(config, 4), {name for i in range(2) for name in engine.state.gradients.views(i)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "parallel", "more"),
    [
        ("1f1b", {"dp": 2}, {}),
        ("1f1b", {"dp": 2, "pp": 2, "zero": 3}, {}),
        ("gpipe", {"dp": 2, "zero": 3}, {"model": DEEP["model"] | {"tie_embeddings": False}}),
        ("1f1b", {"dp": 2, "pp": 2}, {"pipeline": {"split_backward": True}}),
    ],
    ids=["1f1b", "segments", "segment by segment", "split"],
)
def test_factors_of_one_block_are_held(
    schedule: str, parallel: dict[str, int], more: dict[str, Any]
) -> None:
    """Exchanged block by block they have the bits that they have at the end of the batch. Blocks of
    two micro-batches, of six."""
    sections = {"model": DEEP["model"], **more}
    sections["pipeline"] = {"num_microbatches": 6} | more.get("pipeline", {})
    config = make(PCA, parallel, schedule, **sections)
    streamed, waiting = (
        run_ranks(run_and_count, config.parallel.num_ranks, config, on) for on in (True, False)
    )
    for (one, most), (other, most_waiting) in zip(streamed, waiting, strict=True):
        assert (most, most_waiting) == (1, 3)
        assert one.losses == other.losses
        for sums, expected in zip(one.sums, other.sums, strict=True):
            assert all(torch.equal(sums[name], x) for name, x in expected.items())


def run_and_count(config: Config, streams: bool) -> tuple[Ran, int]:
    """Most blocks of one parameter that are held between two backwards."""
    most = 0

    def watch(state: Any) -> None:
        if not streams:
            state.compression.stream = BlockStream({}, lambda bucket: None)
        end = state.end_backward

        def count() -> None:
            nonlocal most
            end()
            held = Counter(name for name, _ in state.gradients.parts(0))
            most = max(most, *held.values(), 0)

        state.end_backward = count

    return run(config, 3, watch=watch), most


class Fake:
    """The exchange of a block of one bucket, which notes its messages."""

    def __init__(self, name: str, log: list[str]):
        self._name = name
        self._log = log
        self.rounds = 2
        log.append(f"{name} P")

    def proceed(self) -> None:
        if self.rounds == 2:
            self.rounds = 1
            self._log.append(f"{self._name} S")

    def wait(self) -> None:
        self.proceed()
        self.rounds = 0
        self._log.append(f"{self._name} done")


def test_blocks_wait_for_the_update_and_then_for_each_other() -> None:
    a, b = Bucket(0, 1, ("a",)), Bucket(1, 2, ("b",))
    log: list[str] = []
    may_start = True
    stream = BlockStream(
        {bucket: (0, frozenset(bucket.names)) for bucket in (a, b)},
        lambda bucket: Fake(bucket.names[0], log) if may_start else None,
    )

    def block(*names: str) -> list[str]:
        stream.proceed()
        stream.arm(0)
        for name in names:
            stream.ready(name)
        stream.end()
        found = log.copy()
        log.clear()
        return found

    stream.begin()
    assert block("b", "a") == ["a P", "a S", "b P"], "in the order of the buckets"
    assert block("a") == ["b S", "a done", "a P", "b done", "a S", "b P"], "b has no factors"
    stream.finish(a)
    stream.finish(b)
    assert log == ["a done", "b S", "b done"]
    log.clear()
    stream.begin()
    may_start = False
    assert block("a", "b") == []
    may_start = True
    assert block("a", "b")[:2] == ["a P", "a S"]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ({"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, True),
        ({"dp": 2}, {"dp": 4, "pp": 2, "zero": 1}, True),
        ({"dp": 2, "tp": 2}, {"dp": 2}, False),
    ],
    ids=str,
)
def test_another_number_of_replicas_goes_on_with_what_was_learned(
    tmp_path: Path, before: dict[str, int], after: dict[str, int], stays: bool
) -> None:
    config = make(PCA, before)
    wanted = dict[tuple[str, int], Tensor]()
    written = []
    aside = begin(tmp_path, 5)
    for engine in engines(config):
        fill(engine, 5)
        for key, x in engine.state.tensors().items():
            if key.startswith("basis/"):
                draw = torch.Generator().manual_seed(sum(map(ord, key)) + engine.grid.tp.rank)
                wanted[key, engine.grid.tp.rank] = x.copy_(
                    torch.randn(x.shape, generator=draw)
                ).clone()
        assert is_writer(engine) == engine.grid.dp.is_first
        if is_writer(engine):
            written.append(Part.of(engine).write(aside))
    folder = publish(
        aside, make_manifest(config, "corpus", TrainingState.of(engine.state_meta()), written)
    )
    found = [
        (key, engine.grid.tp.rank, x)
        for engine in load_all(folder, make(PCA, after))
        for key, x in engine.state.tensors().items()
        if key.startswith("basis/")
    ]
    assert {key for key, _, _ in found} == {key for key, _ in wanted}
    for key, rank, x in found:
        if stays:
            assert torch.equal(x, wanted[key, rank]), key
        elif "attention.qkv" in key:
            assert not x.any(), key


class Large(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in (*args, *(kwargs or {}).values())
            if isinstance(x, Tensor)
        }
        for x in out if isinstance(out, tuple | list) else (out,):
            if (
                isinstance(x, Tensor)
                and x.untyped_storage().data_ptr() not in given
                and x.numel() > self.numel
            ):
                self.numel = x.numel()
                self.name = str(func)
        return out


class Alone:
    """The method for one matrix of [64, 48] in one process."""

    def __init__(self, rank: int = 3, num_blocks: int = 8, dtype: torch.dtype = torch.float64):
        layout = FlatLayout({"w": (64, 48)}, dtype)
        name = "w"
        settings = CompressionConfig(
            gradients="sbpca", gradients_rank=rank, gradients_blocks=num_blocks
        )
        placements = {
            name: Placement((64, 48), Init("zeros"), matrices=(((0, 64),),), factored=True)
        }
        grid = ProcessGrid(dp=1)
        self.flat = layout.zeros()
        self.batch = 0
        partition = Partition(layout, {name: Route(grid.dp)})
        partition.axis_of = lambda name: Several  # type: ignore[assignment, method-assign, return-value]
        config = from_mapping({"pipeline": {"num_microbatches": num_blocks}})
        policy = StatePolicy(replace(config, compression=settings), 1, 1)
        self.compression = Compression(partition, placements, policy, Memory())
        self.bucket = partition.buckets[0]

    def expect(self, parts: Factors) -> None:
        blocks = split_ranges(len(parts), len(self.compression.blocks))
        factors = [Product(dy, x) for dy, x in parts]
        found: BlockParts = {("w", i): [*factors[a:b]] for i, (a, b) in enumerate(blocks)}
        self.compression.expect(BatchGradients(self.batch, found))
        self.compression.open()

    def sum(self, parts: Factors) -> Tensor:
        self.expect(parts)
        self.compression.start(self.bucket, self.flat).wait()
        total = self.compression.total("w")
        self.compression.close(made=bool(total.isfinite().all()))
        self.batch += 1
        return total


class Several:
    """Stands for an axis of several ranks, as far as it is asked whether it is one."""

    size = 2


def blocks_of(x: Tensor, dy: Tensor, rows: int) -> Factors:
    return list(zip(dy.split(rows), x.split(rows), strict=True))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("rank", "true_rank", "first", "least"),
    [(3, 3, 0.9, 0.996), (3, 8, 0.8, 0.9), (48, 8, 0.95, 0.98)],
)
def test_a_stream_is_followed(rank: int, true_rank: int, first: float, least: float) -> None:
    """Energy that arrives, beside what the best matrix of that rank has: of the first batch, and of
    later ones. Batches of 256 rows of one distribution in blocks of 32. Even with as many columns
    as there are it is not all, since an estimate is in part that of the batches before."""
    draw = torch.Generator().manual_seed(1)
    left, right, mixed = (
        torch.randn(n, true_rank, generator=draw, dtype=torch.float64) for n in (64, 48, true_rank)
    )
    alone = Alone(rank)
    shares = []
    for _ in range(8):
        z = torch.randn(256, true_rank, generator=draw, dtype=torch.float64)
        x = z @ right.t()
        dy = 1e-4 * z @ mixed @ left.t()
        taken = alone.sum(blocks_of(x, dy, 32))
        whole = dy.t() @ x
        squares = torch.linalg.svdvals(whole).square()
        lost = float((whole - taken).square().sum() / squares.sum())
        shares.append((1 - lost) / float(squares[:rank].sum() / squares.sum()))
    assert 1 > shares[0] > first
    assert 1 > min(shares[4:]) > least, shares
    if rank == true_rank:
        assert max(shares[:5]) > 0.999**2  # a cosine of .999 by the fifth


def test_nothing_as_large_as_the_gradient_is_made_beside_it() -> None:
    draw = torch.Generator().manual_seed(0)
    alone = Alone(num_blocks=2)
    factors = blocks_of(
        torch.randn(12, 48, generator=draw, dtype=torch.float64),
        torch.randn(12, 64, generator=draw, dtype=torch.float64),
        6,
    )
    alone.expect(factors)
    with Large() as large:
        alone.compression.start(alone.bucket, alone.flat).wait()
    assert alone.compression.total("w").any()
    assert 0 < large.numel <= 6 * 64 < 64 * 48, large.name


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_fewer_directions_or_none_or_no_numbers(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    alone = Alone(num_blocks=3, dtype=dtype)
    none = [(torch.zeros(4, 64, dtype=dtype), torch.zeros(4, 48, dtype=dtype))] * 4
    one = [
        (
            torch.randn(1, 64, generator=draw, dtype=dtype),
            torch.randn(1, 48, generator=draw, dtype=dtype),
        )
    ] * 4
    assert not alone.sum(none).any()
    assert not alone.sum([]).any()
    alone.sum(none[:2] + one)  # begins in the middle
    for _ in range(3):
        taken = alone.sum(one)
    torch.testing.assert_close(taken, 4 * one[0][0].t() @ one[0][1], rtol=0.05, atol=0.05)
    before = {key: x.clone() for key, x in alone.compression.feedback.learned.items()}
    assert (
        alone.sum([(x.log(), y) for x, y in one]).isnan().any()
    )  # the logarithm of what is negative
    assert all(torch.equal(x, before[key]) for key, x in alone.compression.feedback.learned.items())
    alone.sum(none)
    for _ in range(5):
        taken = alone.sum([(-x, y) for x, y in one])  # the other way round
    torch.testing.assert_close(taken, -4 * one[0][0].t() @ one[0][1], rtol=0.05, atol=0.05)
