"""Bits that the documents promise, on three replicas and uneven sizes, and training that is equal
up to rounding.

With three ranks Gloo's order of addition depends on an element's place in the message. So bits are
equal only if the same gradients are sent together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import Outcome, Sections, gpt, start, train
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.train.engine import StepResult

pytestmark = pytest.mark.ranks

BY_BLOCK = {"memory": {"parts": 6}}
"""One part a block, which is what a budget and a host optimizer do by default."""
BUDGET = {"memory": {"budget": 900_000}}
HOST = {"memory": {"host_optimizer": True}}
PIPELINE = {"parallel": {"pp": 2}}
NO_CLIP = {"optim": {"clip_grad": 0.0}}


def make(dp: int, *each: Sections) -> Config:
    """A GPT of odd sizes with dropout and tied embeddings."""
    return gpt(
        (4, 24, 3, 7, 61),
        {
            "model": {"dropout": 0.1},
            "parallel": {"dp": dp},
            "pipeline": {"num_microbatches": 4, "schedule": "1f1b"},
        },
        *each,
    )


def trained(config: Config) -> Outcome:
    """Steps and evaluation of a rank, and all of its weights."""
    engine, _ = start(config)
    try:
        outcome = train(engine, 2, 1)
        outcome.tensors = {
            name: weight.clone() for name, weight in engine.state.weights.full_weights().items()
        }
    finally:
        engine.close()
    return outcome


def whole(dp: int, *each: Sections) -> tuple[list[StepResult], dict[str, Tensor]]:
    """The steps, and the weights of all ranks together; tied ones once."""
    config = make(dp, *each)
    outcomes = run_ranks(trained, config.parallel.num_ranks, config)
    weights: dict[str, Tensor] = {}
    for outcome in outcomes:
        weights = outcome.tensors | weights
    return outcomes[0].steps, weights


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("dp", "one", "other"),
    [
        *(
            (3, (BY_BLOCK, {"parallel": {"zero": zero}}), (BUDGET, {"parallel": {"zero": zero}}))
            for zero in range(4)
        ),
        (3, (BY_BLOCK, PIPELINE), (BUDGET, PIPELINE)),
        *(
            (3, (BY_BLOCK, {"parallel": {"zero": zero}}), (HOST, {"parallel": {"zero": zero}}))
            for zero in range(2)
        ),
        (3, ({"parallel": {"zero": 2}},), ({"parallel": {"zero": 3}},)),
        (3, ({"parallel": {"zero": 2}},), (BUDGET, {"parallel": {"zero": 2}})),
        (2, (), (BUDGET,)),
        (2, (), (HOST,)),
        (1, (PIPELINE,), (PIPELINE, BUDGET)),
        (3, (PIPELINE,), (PIPELINE, {"pipeline": {"split_backward": True}})),
        (3, (PIPELINE,), (PIPELINE, {"pipeline": {"split_backward": True, "zero_bubble": True}})),
        (
            3,
            (PIPELINE, {"pipeline": {"warmup": "latency"}}),
            (
                PIPELINE,
                {"pipeline": {"warmup": "latency"}, "memory": {"offload_activations": (1, 0)}},
            ),
        ),
        (2, (PIPELINE, NO_CLIP), (PIPELINE, NO_CLIP, {"pipeline": {"schedule": "interleaved"}})),
    ],
    ids=str,
)
def test_bits_are_equal(dp: int, one: Sequence[Sections], other: Sequence[Sections]) -> None:
    (steps, weights), (other_steps, other_weights) = (
        whole(dp, *sections) for sections in (one, other)
    )
    assert [step.loss for step in steps] == [step.loss for step in other_steps]
    assert [step.grad_norm for step in steps] == [step.grad_norm for step in other_steps]
    assert weights.keys() == other_weights.keys()
    assert not [
        name for name, weight in weights.items() if not torch.equal(weight, other_weights[name])
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), (BUDGET,)),
        (({"parallel": {"zero": 1}},), (BUDGET, {"parallel": {"zero": 1}})),
        ((), (HOST,)),
        ((PIPELINE, NO_CLIP), (PIPELINE, NO_CLIP, {"pipeline": {"schedule": "interleaved"}})),
    ],
    ids=str,
)
def test_up_to_rounding(one: Sequence[Sections], other: Sequence[Sections]) -> None:
    """In float64, where three replicas send gradients in other messages, or have other samples."""
    fp64 = {"train": {"dtype": "fp64"}, "model": {"dropout": 0.0}}
    (steps, weights), (other_steps, other_weights) = (
        whole(3, *each, fp64) for each in (one, other)
    )
    assert [step.loss for step in steps] == pytest.approx(
        [step.loss for step in other_steps], rel=1e-9
    )
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-9, atol=1e-9)


# -- a save


Ending = tuple[list[float], dict[str, Tensor]]
"""The last losses of a rank, and its state."""


def saved_in_between(config: Config, folder: Path) -> list[Ending]:
    """Trains 6 batches: loaded from a checkpoint after 3, by the engine that has saved it, and
    without a save."""
    engine, loader = start(config)
    engine.train(loader, 3, lambda step: None)
    checkpoint.save(folder, engine, "corpus")
    resumed, _ = start(config)
    assert checkpoint.resume(folder, resumed, "corpus", print) == 3
    undrained, _ = start(config)
    found: list[Ending] = []
    for one, num_batches in ((resumed, 3), (engine, 3), (undrained, 6)):
        steps: list[StepResult] = []
        one.train(loader, num_batches, steps.append)
        found.append(
            (
                [step.loss for step in steps][-3:],
                {key: tensor.clone() for key, tensor in one.state.tensors().items()},
            )
        )
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
def test_a_run_goes_on_from_a_save_to_the_bit(schedule: str, zero: int, tmp_path: Path) -> None:
    """Every save drains the pipeline, so the run that is not stopped has the same bits. pipedream
    has others without the save: its stages then continue with weights of different ages."""
    config = make(3, PIPELINE, {"pipeline": {"schedule": schedule}, "parallel": {"zero": zero}})
    for resumed, not_stopped, undrained in run_ranks(saved_in_between, 6, config, tmp_path):
        _compare(resumed, not_stopped)
        if schedule == "pipedream":
            assert resumed[0] != undrained[0]
        else:
            _compare(resumed, undrained)


def _compare(one: Ending, other: Ending) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert not [key for key, tensor in one[1].items() if not torch.equal(tensor, other[1][key])]
