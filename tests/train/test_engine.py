"""The engine beyond float64: low precision, overflow, stop requests, and state that goes on to the
bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines import gpt, start
from ranks import run_ranks

from hybridpar.config import Config
from hybridpar.errors import CheckpointError
from hybridpar.optim import learning_rate
from hybridpar.state.audit import bit_hash
from hybridpar.train.engine import StepResult


def make(tp: int = 1, pp: int = 1, dp: int = 1, **sections: dict[str, Any]) -> Config:
    grid = {"tp": tp, "pp": pp, "dp": dp}
    return gpt((3, 32, 4, 12, 37), {"model": {"dropout": 0.1}, "parallel": grid}, sections)


def losses(config: Config, num_batches: int) -> list[float]:
    engine, loader = start(config)
    steps: list[StepResult] = []
    engine.train(loader, num_batches, steps.append)
    assert [s.step for s in steps] == list(range(1, num_batches + 1))
    return [s.loss for s in steps]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_low_precision_follows_float64(dtype: str, schedule: str) -> None:
    """bf16 has 8 bits of mantissa: the losses of 8 steps agree to a percent, and they fall."""
    exact = losses(make(train={"dtype": "fp64"}, pipeline={"schedule": schedule}), 8)
    low = losses(make(train={"dtype": dtype}, pipeline={"schedule": schedule}), 8)
    assert low == pytest.approx(exact, rel=0.01)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("grid", [{"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_through_host_memory_it_is_the_same_training(grid: dict[str, int]) -> None:
    """A grid of GPUs over Gloo, but for the GPUs: every message is a copy."""
    config = make(
        **grid, pipeline={"schedule": "2bw"}, train={"dtype": "bf16"}, parallel={"zero": 1}
    )
    assert run_ranks(_states, 4, config, "cuda") == run_ranks(_states, 4, config, "cpu")


def _states(config: Config, grid_device: str) -> list[Any]:
    engine, loader = start(config, device_type=grid_device)
    assert engine.grid.world.via_host == (grid_device != "cpu")
    steps: list[StepResult] = []
    engine.train(loader, 4, steps.append)
    hashes = {name: int(bit_hash(x)) for name, x in engine.state.tensors().items()}
    return [engine.evaluate(loader, 1), hashes, *((s.loss, s.grad_norm) for s in steps)]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_master_is_what_accumulates(dtype: str) -> None:
    """A step far smaller than bf16 can resolve must still add up: lr 1e-5 on weights of 0.02 for 8
    steps."""
    engine, loader = start(make(train={"dtype": dtype}, optim={"lr": 1e-5, "decay": "constant"}))
    name = "blocks.1.mlp.up.weight"
    before = engine.state.weights.parameters_of_optimizer()[name].clone()
    engine.train(loader, 8, lambda step: None)
    master = engine.state.weights.parameters_of_optimizer()[name]
    assert master.dtype == torch.float32
    assert 1e-5 < (master - before).abs().max() <= 1e-4
    assert torch.equal(
        engine.state.weights.leaves_of(8)[name], master.to(engine.state.weights.dtype)
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_overflow_is_skipped_by_all_and_the_scale_backs_off(schedule: str) -> None:
    config = make(
        pp=2,
        dp=2,
        pipeline={"schedule": schedule},
        train={"dtype": "fp16"},
        optim={"loss_scale": 2.0**24},
    )
    for steps, weights in run_ranks(_overflow, 4, config):
        skipped = [s.skipped for s in steps]
        assert skipped[0], "a loss scale of 2**24 overflows fp16 gradients"
        assert not skipped[-1], "it backs off until they fit"
        assert steps[-1].loss_scale < 2.0**24
        assert all(math.isfinite(w) for w in weights)
        assert [s.grad_norm for s in steps if not s.skipped] == [
            s.grad_norm for s in steps if math.isfinite(s.grad_norm)
        ]


def _overflow(config: Config) -> tuple[list[StepResult], list[float]]:
    engine, loader = start(config)
    steps: list[StepResult] = []
    engine.train(loader, 18, steps.append)
    return steps, [
        float(w.abs().max()) for w in engine.state.weights.parameters_of_optimizer().values()
    ]


def test_a_skipped_step_changes_nothing() -> None:
    engine, loader = start(make(train={"dtype": "fp16"}, optim={"loss_scale": 2.0**24}))
    before = {n: w.clone() for n, w in engine.state.weights.parameters_of_optimizer().items()}
    engine.train(loader, 1, lambda step: None)
    assert engine.state.optimizer.num_updates == 0
    assert all(
        torch.equal(before[n], w) for n, w in engine.state.weights.parameters_of_optimizer().items()
    )


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"schedule": "1f1b"}},
        {"pipeline": {"schedule": "2bw"}},
        {"pipeline": {"schedule": "pipedream"}},
        {"pipeline": {"schedule": "2bw"}, "memory": {"host_optimizer": True}},
    ],
    ids=str,
)
def test_skipped_steps_use_up_no_warm_up(sections: dict[str, dict[str, Any]]) -> None:
    """Rates count updates, as the bias correction does: also where 2bw has begun the next batch,
    and after a resume."""
    config = make(
        pp=2,
        **sections,
        train={"dtype": "fp16"},
        optim={"loss_scale": 2.0**24, "warmup_steps": 8, "decay_steps": 16},
    )
    for steps, resumed, num_updates in run_ranks(_rates, 2, config):
        made = [step.lr for step in steps if not step.skipped]
        assert 4 < len(made) < 18, "some overflow"
        assert made == [
            learning_rate(number, config.optim, config.train.num_steps)
            for number in range(len(made))
        ]
        assert num_updates == len(made)
        assert repr(resumed) == repr(steps[4:]), "NaN is unlike NaN"


def _rates(config: Config) -> tuple[list[StepResult], list[StepResult], int]:
    engine, loader = start(config)
    steps: list[StepResult] = []
    engine.train(loader, 4, steps.append)
    tensors = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
    other = start(config)[0]
    resumed = list[StepResult]()
    other.load_state(tensors, engine.state_meta())
    engine.train(loader, 14, steps.append)
    other.train(loader, 14, resumed.append)
    return steps, resumed, engine.state.optimizer.num_updates


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "clip"), [("1f1b", 1.0), ("2bw", 1.0), ("pipedream", 0.0)])
def test_a_stop_request_of_one_rank_stops_all_after_the_same_batch(
    schedule: str, clip: float
) -> None:
    config = make(
        pp=4, pipeline={"schedule": schedule, "num_microbatches": 4}, optim={"clip_grad": clip}
    )
    results = run_ranks(_stop, 4, config)
    ends = {end for end, _, _ in results}
    assert len(ends) == 1
    assert 5 < ends.pop() <= 5 + 5, "soon after the request, which comes at step 5"
    assert len({steps for _, steps, _ in results}) == 1
    end, _, got = results[0]
    if schedule != "pipedream":  # whose versions depend on when the pipeline was drained
        assert got == run_ranks(losses, 4, config, 15)[0][: len(got)]
    assert end == len(results[0][2]) - 2


def _stop(config: Config) -> tuple[int, int, list[float]]:
    engine, loader = start(config)
    steps: list[StepResult] = []

    def on_step(step: StepResult) -> None:
        steps.append(step)
        if step.step == 5 and engine.grid.rank == 2:
            engine.request_stop()

    engine.train(loader, 15, on_step)
    end = engine.batches_done
    engine.request_stop(False)
    engine.train(loader, 2, on_step)  # goes on as if nothing had been
    return end, len(steps), [s.loss for s in steps]


def test_state_of_another_model_is_refused() -> None:
    engine, _ = start(make())
    tensors = engine.state.tensors()
    meta = engine.state_meta()
    with pytest.raises(
        CheckpointError,
        match=r"blocks\.0\.tokens\.weight has shape \(37, 32\), but this model requires",
    ):
        start(make(model={"hidden_size": 48}))[0].load_state(tensors, meta)
    del tensors["weights/0/blocks.2.mlp.up.bias"]
    with pytest.raises(CheckpointError, match=r"blocks\.2\.mlp\.up\.bias is missing"):
        engine.load_state(tensors, meta)


@pytest.mark.thorough
@pytest.mark.ranks
def test_evaluation_is_the_mean_over_all_samples_without_dropout() -> None:
    engine, loader = start(make(model={"dropout": 0.5}, pipeline={"num_microbatches": 12}))
    expected = engine.evaluate(loader, 1)
    assert expected == engine.evaluate(loader, 1), "no randomness"
    on_grid = make(tp=2, pp=2, dp=2, model={"dropout": 0.5}, pipeline={"num_microbatches": 6})
    for got in run_ranks(_evaluate, 8, on_grid):
        assert got == pytest.approx(expected, rel=1e-5)


def _evaluate(config: Config) -> dict[str, float]:
    engine, loader = start(config)
    return engine.evaluate(loader, 1)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "head",
    [
        {},
        {"logits_chunk": 5},
        {"kind": "bert"},
        {"kind": "bert", "sentence_head": "none", "logits_chunk": 5},
    ],
    ids=str,
)
def test_evaluation_is_of_plain_cross_entropy(head: dict[str, Any]) -> None:
    smoothed, plain = ({"label_smoothing": smoothing, **head} for smoothing in (0.3, 0.0))
    engine, loader = start(make(model=smoothed))
    assert engine.evaluate(loader, 2) == start(make(model=plain))[0].evaluate(loader, 2)
    assert losses(make(model=smoothed), 1) != losses(make(model=plain), 1), "training is smoothed"
