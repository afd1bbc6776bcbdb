"""Tensor-parallel ranks that send their slices of what goes from stage to stage: to the bit what
they do when each sends all of it, for a t-th of the bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import pytest
import torch
from engines import gpt
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid, Traffic
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.nn.placement import split_sizes
from hybridpar.runtime.recording import Recording
from hybridpar.runtime.stage_transport import StageTransport
from hybridpar.schedules.kinds import Kind
from hybridpar.state.audit import bit_hash
from hybridpar.state.compression.codec import Codec
from hybridpar.train.engine import Engine, StepResult

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
ODD = {"hidden_size": 21, "num_heads": 3, "seq_length": 11, "num_layers": 4}
STEPS = 3


def make(tp: int, pp: int, dp: int = 1, **sections: dict[str, Any]) -> Config:
    own = {
        "model": DROPOUT,
        "parallel": {"tp": tp, "pp": pp, "dp": dp},
        "train": {"micro_batch_size": 1},
        "optim": {"clip_grad": 0.5},
    }
    return gpt((3, 32, 4, 12, 37), own, sections)


@dataclass(frozen=True)
class Whole(StageTransport):
    """A lane on which each rank sends all that it holds; `sent`: hashes of that."""

    sent: list[int] = field(default_factory=list)

    def cut(self, x: Tensor, codec: Codec | None = None) -> Tensor:
        self.sent.append(int(bit_hash(x)))
        return super().cut(x, codec)


def train(config: Config) -> list[tuple[Any, dict[str, Traffic], list[int]]]:
    """Numbers, weights and evaluation; traffic of training by axis; hashes of what was sent:
    sliced, and whole."""
    parallel = config.parallel
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    found = []
    for sliced in (True, False):
        engine = Engine(JobPlan(config), grid, torch.device("cpu"))
        lane = engine.executor.transport
        sent = []
        if not sliced:
            whole = replace(lane, slicing=None)
            engine.executor.transport = Whole(
                **{f.name: getattr(whole, f.name) for f in fields(whole)}, sent=sent
            )
        loader = SyntheticLoader(
            config.model,
            config.train.micro_batch_size,
            config.pipeline.num_microbatches,
            grid.dp.rank,
            grid.dp.size,
        )
        steps: list[StepResult] = []
        gradients: list[dict[str, int]] = []
        for name in ("tp", "pp", "pp_reverse"):
            grid.axis(name).traffic.clear()
        engine.train(
            loader,
            STEPS,
            steps.append,
            lambda batch, tensors, kept=gradients: kept.append(  # type: ignore[misc]
                {name: int(bit_hash(x)) for name, x in tensors.items()}
            ),
        )
        traffic = {
            name: replace(one, calls=one.calls.copy(), num_bytes=one.num_bytes.copy())
            for name in ("tp", "pp", "pp_reverse")
            for one in [grid.axis(name).traffic]
        }
        weights = {name: int(bit_hash(x)) for name, x in engine.state.tensors().items()}
        numbers = [(s.losses, s.grad_norm, s.stage_norms) for s in steps]
        found.append(((numbers, gradients, weights, engine.evaluate(loader, 1)), traffic, sent))
    return found


def same(config: Config) -> None:
    """Equal bits; of the bytes over links each rank has its share, and its gathers over tp are of
    what it received."""
    parallel = config.parallel
    train_ = config.train
    t = parallel.tp
    numel = prod((train_.micro_batch_size, config.model.seq_length, config.model.hidden_size))
    item = DTYPES[train_.dtype].itemsize
    ranks = run_ranks(train, t * parallel.pp * parallel.dp, config)
    for rank, ((numbers, traffic, _), (expected, before, sent)) in enumerate(ranks):
        assert numbers == expected
        part = item * split_sizes(numel, t)[rank % t]
        received = 0
        for axis in ("pp", "pp_reverse"):
            assert traffic[axis].calls == before[axis].calls
            for op, calls in before[axis].calls.items():
                assert before[axis].num_bytes[op] == calls * item * numel
                assert traffic[axis].num_bytes[op] == calls * part
                received += calls * (op == "recv")
        assert traffic["tp"].calls - before["tp"].calls == {"all_gather": received}
        assert traffic["tp"].num_bytes - before["tp"].num_bytes == {"all_gather": received * part}
        assert sent
        assert sent == ranks[rank - rank % t][1][2], (
            "activations and gradients are equal on all ranks of tp"
        )


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {"recompute": "stage"}),
        ("1f1b", {"split_backward": True}),
        ("interleaved", {}),
        ("2bw", {"warmup": "bandwidth"}),
        ("pipedream", {}),
    ],
    ids=str,
)
def test_on_every_schedule(schedule: str, options: dict[str, Any]) -> None:
    same(make(2, 2, pipeline={"schedule": schedule, **options}))


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tp", "pp", "model", "dtype"),
    [
        (3, 2, {"hidden_size": 20}, "bf16"),
        (3, 2, ODD | {"kind": "bert"}, "fp32"),
        (
            2,
            3,
            {"norm": "rms_norm", "position": "rotary", "num_kv_heads": 1, "hidden_size": 24},
            "fp16",
        ),
    ],
    ids=str,
)
def test_odd_sizes(tp: int, pp: int, model: dict[str, Any], dtype: str) -> None:
    """Slices of unequal length, heads that several ranks have, and the two together."""
    same(make(tp, pp, model=model, train={"dtype": dtype}, pipeline={"schedule": "2bw"}))


@pytest.mark.thorough
@pytest.mark.ranks
def test_beside_replicas() -> None:
    same(
        make(
            2,
            2,
            2,
            parallel={"zero": 1},
            pipeline={"schedule": "interleaved", "num_microbatches": 4},
        )
    )


class Counted:
    """A clock that stands still, but while messages are joined."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def read(self, stamp: float) -> tuple[float, float]:
        return stamp, stamp


@dataclass(frozen=True)
class Slow(StageTransport):
    """A lane on which gathering takes a second of `clock`."""

    clock: Counted = field(default_factory=Counted)

    def join(self, part: Tensor, codec: Codec | None = None) -> Tensor:
        self.clock.seconds += 1.0
        return super().join(part, codec)


@pytest.mark.ranks
def test_gathering_is_the_actions_own_time_and_no_transfer() -> None:
    gathers = [(1.0, 0.0)] * (3 * STEPS)
    others = [(0.0, 0.0)] * (3 * STEPS)
    assert run_ranks(_recorded, 2, make(1, 2)) == [
        {Kind.F: others, Kind.B: gathers},
        {Kind.F: gathers, Kind.B: others},
    ]


def _recorded(config: Config) -> dict[Kind, list[tuple[float, float]]]:
    """Own time and waits of each action by kind."""
    grid = ProcessGrid(pp=2)
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    lane = engine.executor.transport
    clock = Counted()
    engine.executor.transport = Slow(
        **{f.name: getattr(lane, f.name) for f in fields(lane)}, clock=clock
    )
    recording = engine.executor.recording = Recording(clock)
    engine.train(SyntheticLoader(config.model, 1, 3, 0, 1), STEPS, lambda step: None)
    return {
        kind: [(e.own, e.waited) for e in recording.events() if e.action.kind is kind]
        for kind in (Kind.F, Kind.B)
    }
