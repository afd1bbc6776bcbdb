"""ZeRO-2 and 3: the same bits as each other under every schedule, with as many messages as there
must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import gpt, start
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.state import find_divergence

pytestmark = pytest.mark.ranks

UNTIED = {"tie_embeddings": False}


def make(model: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes with dropout; two layers, one part each."""
    return gpt(
        (2, 48, 6, 14, 131),
        {"model": {"dropout": 0.1}, "parallel": {"dp": 2}, "pipeline": {"num_microbatches": 4}},
        {"model": dict(model or {})},
        sections,
    )


def with_zero(config: Config, zero: int) -> Config:
    return replace(config, parallel=replace(config.parallel, zero=zero))


class Run:
    """A training on one rank."""

    def __init__(self, config: Config):
        self.engine, self.loader = start(config)
        self.steps: list[tuple[float, float]] = []

    def train(self, num_batches: int) -> Run:
        self.engine.train(
            self.loader,
            num_batches,
            lambda result: self.steps.append((result.loss, result.grad_norm)),
        )
        return self

    def outcome(self) -> dict[str, Any]:
        """All that it has made, on this rank."""
        state = self.engine.state
        assert find_divergence(state.placed(), self.engine.grid) == ""
        found: dict[str, Any] = {
            "steps": self.steps,
            "evaluated": self.engine.evaluate(self.loader, 1),
        }
        found |= {name: tensor.clone() for name, tensor in state.weights.full_weights().items()}
        return found | {
            key: tensor.clone()
            for key, tensor in state.tensors().items()
            if key.startswith("optimizer/")
        }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of tensors that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (
            torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        )
    ]


def both(config: Config) -> list[str]:
    one, other = (Run(with_zero(config, zero)).train(2).train(1).outcome() for zero in (2, 3))
    return differing(one, other)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({"pipeline": {"schedule": "gpipe"}}, "fp32"),
        ({"pipeline": {"schedule": "gpipe"}, "model": UNTIED}, "bf16"),
        ({"pipeline": {"schedule": "pipedream"}, "optim": {"clip_grad": 0.0}}, "fp32"),
        ({"pipeline": {"schedule": "naive"}, "memory": {"parts": 2}}, "fp32"),
        (
            {
                "pipeline": {"schedule": "1f1b", "split_backward": True, "recompute": "selective"},
                "optim": {"name": "muon"},
            },
            "bf16",
        ),
        ({"pipeline": {"schedule": "2bw", "recompute": "stage", "gradient_buffers": 1}}, "bf16"),
        (
            {
                "pipeline": {"schedule": "2bw", "early_switch": 1},
                "optim": {"staleness": "prediction"},
            },
            "fp32",
        ),
    ],
    ids=str,
)
def test_weights_in_shares_change_nothing(sections: dict[str, Any], dtype: str) -> None:
    for found in run_ranks(both, 2, make(train={"dtype": dtype}, **sections)):
        assert not found


# -- messages


def traffic_of_a_batch(config: Config) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Calls and bytes over dp by operation; and bytes of all weights, and of what is whole at
    once."""
    run = Run(config).train(1)
    engine = run.engine
    engine.grid.dp.traffic.clear()
    run.train(1)
    traffic = engine.grid.dp.traffic
    layout = engine.state.weights.layout
    return (
        dict(traffic.calls),
        dict(traffic.num_bytes),
        4 * layout.numel,
        engine.state.unsharded_bytes()[0],
    )


def test_a_part_at_a_time_is_gathered_twice_and_summed_once() -> None:
    """PatrickStar's volume, (p-1)/p of which a rank sends: two sweeps over the weights, and one
    over the gradients. What is whole where a sweep turns round need not be gathered again."""
    config = with_zero(make(UNTIED, pipeline={"schedule": "gpipe"}), 3)
    for calls, num_bytes, weights, room in run_ranks(traffic_of_a_batch, 2, config):
        assert num_bytes["reduce"] == weights
        assert 2 * weights - room <= num_bytes["broadcast"] < 2 * weights
        assert calls["reduce"] == 2 * 4, (
            "one for each of four parts, made of a message to each owner"
        )
        assert calls["broadcast"] == 2 * (4 + 4 - 2), "two of them fit in at once"


def test_other_schedules_take_as_much_for_every_micro_batch() -> None:
    config = make(UNTIED, pipeline={"schedule": "1f1b", "num_microbatches": 5})
    second, third = (
        run_ranks(traffic_of_a_batch, 2, with_zero(config, zero))[0] for zero in (2, 3)
    )
    for calls, num_bytes, weights, _ in (second, third):
        assert 4 * weights < num_bytes["reduce"] <= 5 * weights
        assert calls["reduce"] <= 2 * 5 * 4
    assert second[1]["broadcast"] == second[2], "new weights once"
    assert 5 * third[2] < third[1]["broadcast"] < 10 * third[2]


# -- checkpoints


def saves_and_goes_on(config: Config, folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Differences of a resumed run from an uninterrupted one, and its weights."""
    whole = Run(config).train(2).train(2)
    first = Run(config).train(2)
    second = Run(config)
    checkpoint.save(folder, first.engine, "corpus")
    checkpoint.resume(folder, second.engine, "corpus", print)
    second.steps = first.steps
    second.train(2)
    checkpoint.save(folder, second.engine, "corpus")
    return differing(whole.outcome(), second.outcome()), second.engine.state.weights.full_weights()


def resumed(config: Config, folder: Path) -> dict[str, Tensor]:
    run = Run(config)
    checkpoint.resume(folder, run.engine, "corpus", print)
    run.engine.evaluate(run.loader, 1)
    return run.engine.state.weights.full_weights()


@pytest.mark.thorough
def test_shares_are_saved_and_gone_on_with_anywhere(tmp_path: Path) -> None:
    config = with_zero(make(pipeline={"schedule": "2bw"}, train={"dtype": "bf16"}), 3)
    (differs, weights), (others, _) = run_ranks(saves_and_goes_on, 2, config, tmp_path)
    assert not differs
    assert not others
    alone, four = (
        replace(
            config,
            parallel=replace(config.parallel, dp=dp),
            pipeline=replace(config.pipeline, num_microbatches=8 // dp),
        )
        for dp in (1, 4)
    )
    assert not differing(weights, resumed(alone, tmp_path))
    assert not differing(weights, run_ranks(resumed, 4, four, tmp_path)[2])
    one = Run(with_zero(alone, 0)).train(2)
    checkpoint.save(tmp_path / "whole", one.engine, "corpus")
    expected = one.engine.state.weights.full_weights()
    assert not differing(expected, run_ranks(resumed, 2, config, tmp_path / "whole")[1])


def stopped(config: Config) -> tuple[int, list[str]]:
    outcomes = []
    for zero in (2, 3):
        run = Run(with_zero(config, zero))
        engine = run.engine
        engine.train(
            run.loader,
            100,
            lambda result, engine=engine: engine.request_stop(),  # type: ignore[misc],
        )
        engine.request_stop(False)
        outcomes.append((engine.batches_done, run.train(2).outcome()))
    assert outcomes[0][0] == outcomes[1][0]
    return outcomes[0][0] - 2, differing(outcomes[0][1], outcomes[1][1])


def test_a_stop_in_the_middle() -> None:
    for batches_done, differs in run_ranks(stopped, 2, make(pipeline={"schedule": "2bw"})):
        assert 2 < batches_done + 2 < 20
        assert not differs
