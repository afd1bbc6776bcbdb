"""Backwards in two parts: losses, norms and weights equal to the bit those of whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from engines import gpt, start
from ranks import run_ranks
from torch import Tensor, nn

from hybridpar import SequentialSpec
from hybridpar.config import Config, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.lowering import split_backward
from hybridpar.state.audit import bit_hash
from hybridpar.train.engine import StepResult
from hybridpar.verify.run import verify

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


def make(split: bool, tp: int = 1, pp: int = 1, dp: int = 1, **sections: dict[str, Any]) -> Config:
    own = {"parallel": {"tp": tp, "pp": pp, "dp": dp}, "pipeline": {"split_backward": split}}
    return gpt((3, 32, 4, 12, 37), own, sections)


def train(config: Config, late: bool = False) -> tuple[list[Any], dict[str, int], set[str]]:
    """Numbers of each step and hashes of the gradients; of the weights; and which kinds of action
    ran."""
    steps: list[StepResult] = []
    gradients: list[dict[str, int]] = []
    ran: set[str] = set()

    def watched(actions: Iterator[Action]) -> Iterator[Action]:
        for action in held_back(actions) if late else actions:
            ran.add(action.kind.value)
            yield action

    engine, loader = start(config, wrap_plan=watched)
    engine.train(
        loader,
        3,
        steps.append,
        lambda batch, tensors: gradients.append(
            {name: int(bit_hash(x)) for name, x in tensors.items()}
        ),
    )
    numbers = [(s.losses, s.grad_norm, s.stage_norms) for s in steps]
    return (
        [numbers, gradients],
        {name: int(bit_hash(x)) for name, x in engine.state.tensors().items()},
        ran,
    )


def both(whole: Config, split: Config, late: bool = False) -> tuple[Any, Any]:
    return train(whole), train(split, late)


def held_back(actions: Iterator[Action]) -> Iterator[Action]:
    """W as late as can be: before the reduction of their batch."""
    waiting: list[Action] = []
    for action in split_backward(actions):
        if action.kind is Kind.W:
            waiting.append(action)
            continue
        if action.kind is Kind.REDUCE:
            yield from waiting
            waiting.clear()
        yield action


def same(num_ranks: int, zero_bubble: bool = False, late: bool = False, **settings: Any) -> None:
    """On the last stage, of which others wait for gradients, all backwards are in two parts;
    `late`: on all stages."""
    whole = make(False, **settings)
    settings["pipeline"] = settings.get("pipeline", {}) | {"zero_bubble": zero_bubble}
    found = run_ranks(both, num_ranks, whole, make(True, **settings), late)
    for (expected, expected_weights, before), (numbers, weights, ran) in found:
        assert numbers == expected
        assert weights == expected_weights
        assert "B" in before
        assert ran - before <= {"I", "W"}
    assert late or settings.get("pp", 1) == 1 or {"I", "W"} <= found[-1][1][2]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("naive", {}),
        ("gpipe", {}),
        ("1f1b", {"warmup": "latency"}),
        ("interleaved", {}),
        ("2bw", {"early_switch": 1}),
        ("2bw", {"gradient_buffers": 1}),
        ("2bw", {"warmup": "bandwidth"}),
        ("2bw", {"sync_steps": 2}),
        ("2bw", {"virtual_stages": 2}),
        ("pipedream", {"sync_steps": 1}),
    ],
    ids=str,
)
def test_on_every_schedule(schedule: str, options: dict[str, Any]) -> None:
    same(2, pp=2, model=DROPOUT, pipeline={"schedule": schedule, **options})


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("pp", [1, 2])
def test_in_every_precision_with_tied_embeddings(dtype: str, pp: int) -> None:
    same(
        pp, late=pp == 1, pp=pp, model=DROPOUT, train={"dtype": dtype}, pipeline={"schedule": "2bw"}
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("recompute", ["all", "0", "stage"])
def test_recomputation(recompute: str) -> None:
    same(
        2,
        pp=2,
        model=DROPOUT | {"kind": "bert"},
        pipeline={"schedule": "1f1b", "recompute": recompute},
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "model",
    [
        {"logits_chunk": 5},
        {"kind": "bert", "logits_chunk": 5},
        {"tie_embeddings": False, "activation": "swiglu"},
        {"position": "rotary", "norm": "rms_norm", "parallel_residual": True, "bias": False},
    ],
    ids=str,
)
def test_other_models(model: dict[str, Any]) -> None:
    same(2, pp=2, model=model, train={"dtype": "bf16"})


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "schedule"),
    [(2, 1, 1, "1f1b"), (1, 1, 2, "2bw"), (1, 2, 2, "2bw"), (2, 2, 1, "interleaved")],
)
def test_tensor_and_data_parallelism(tp: int, pp: int, dp: int, schedule: str, zero: int) -> None:
    same(
        tp * pp * dp,
        tp=tp,
        pp=pp,
        dp=dp,
        model=DROPOUT,
        parallel={"zero": zero},
        pipeline={"schedule": schedule, "num_microbatches": 4},
        optim={"clip_grad": 0.5},
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "options", "sections"),
    [
        (1, 4, 1, {}, {"train": {"dtype": "bf16"}}),
        (
            1,
            2,
            1,
            {"schedule": "interleaved", "num_microbatches": 5},
            {"model": {"kind": "bert"} | DROPOUT},
        ),
        (1, 3, 1, {"warmup": "latency", "recompute": "stage"}, {}),
        (2, 2, 1, {"schedule": "interleaved"}, {"parallel": {"sequence": True}}),
        (1, 2, 2, {"num_microbatches": 4}, {"parallel": {"zero": 1}}),
    ],
    ids=str,
)
def test_filling_the_drain(
    tp: int, pp: int, dp: int, options: dict[str, Any], sections: dict[str, dict[str, Any]]
) -> None:
    same(tp * pp * dp, True, tp=tp, pp=pp, dp=dp, pipeline=options, **{"model": DROPOUT} | sections)


@pytest.mark.ranks
def test_gradients_of_weights_may_wait_for_the_end_of_their_batch() -> None:
    settings = {"pp": 2, "dp": 2, "model": DROPOUT, "pipeline": {"schedule": "2bw"}}
    for whole, late in run_ranks(both, 4, make(False, **settings), make(True, **settings), True):
        assert late[:2] == whole[:2]


class Again(nn.Module):
    """A layer with one weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


@dataclass(frozen=True)
class Twice(SequentialSpec):
    inputs = "x"

    def layers(self) -> list[nn.Module]:
        return [nn.Linear(4, 6), Again(), Again(), nn.Linear(6, 3)]

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out, batch["label"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng([seed, number])
        return {"x": random.normal(size=4).astype(np.float32), "label": random.integers(3)}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "1f1b", "zero_bubble": True},
        {"schedule": "1f1b", "stage_layout": "v"},
        {"schedule": "2bw", "virtual_stages": 2},
    ],
    ids=str,
)
def test_a_weight_that_a_stage_uses_twice(pipeline: dict[str, Any]) -> None:
    """In a model of one's own, against one process in float64."""
    report = verify(
        Config(
            model=Twice(),
            parallel=ParallelConfig(pp=2, dp=1),
            train=TrainConfig(micro_batch_size=2),
            pipeline=PipelineConfig(num_microbatches=3, split_backward=True, **pipeline),
        ),
        {"pp": 2},
        3,
    )
    assert report.ok, report.first_divergence
