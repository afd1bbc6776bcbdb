"""Training that stops, saves and goes on is the same training to the bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import start
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    from_mapping,
)
from hybridpar.schedules.schedule_table import SCHEDULES
from hybridpar.train.engine import StepResult

MODEL = ModelConfig(
    num_layers=2, hidden_size=12, num_heads=3, seq_length=8, vocab_size=37, dropout=0.1
)


def make_config(
    schedule: str = "2bw",
    dtype: str = "fp32",
    *,
    tp: int = 1,
    pp: int = 2,
    dp: int = 1,
    optimizer: str = "adamw",
    model: ModelConfig = MODEL,
) -> Config:
    return Config(
        model,
        ParallelConfig(tp, pp, dp),
        PipelineConfig(schedule, 2),
        OptimConfig(optimizer, lr=1e-2, warmup_steps=2),
        TrainConfig(6, 2, dtype),
        DataConfig(split=0.0),
    )  # type: ignore[arg-type]


Trained = tuple[list[StepResult], dict[str, Tensor]]


def train_in_stretches(
    config: Config, stretches: tuple[int, ...], root: Path, *, anew: bool = True
) -> Trained:
    """Trains and saves by stretches; all steps, and the state at the end. `anew`: a new engine for
    each, loaded from the last one's checkpoint."""
    steps: list[StepResult] = []
    for i, num_batches in enumerate(stretches):
        if anew or not i:
            engine, loader = start(config)
            done = checkpoint.resume(root, engine, "corpus", print)
            assert done == sum(stretches[:i])
        engine.train(loader, num_batches, steps.append)
        checkpoint.save(root, engine, "corpus")
    return steps, {name: tensor.clone() for name, tensor in engine.state.tensors().items()}


def compare_stretches(config: Config, folder: Path, parts: tuple[int, ...] = (3, 1, 2)) -> None:
    """pipedream is another training where it drains: so its whole run drains where the other one
    stops."""
    drains = config.pipeline.schedule == "pipedream"
    whole, state = train_in_stretches(
        config, parts if drains else (sum(parts),), folder / "whole", anew=False
    )
    stopped, resumed = train_in_stretches(config, parts, folder / "parts")
    assert whole == stopped, "losses or norms differ"
    assert state.keys() == resumed.keys()
    differing = [name for name in state if not torch.equal(state[name], resumed[name])]
    assert not differing, differing
    assert any(name.startswith("optimizer/") for name in state)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "dtype"), [*product(SCHEDULES, ("fp32", "bf16")), ("2bw", "fp16")]
)
def test_six_steps_and_six_more_are_twelve(tmp_path: Path, schedule: str, dtype: str) -> None:
    config = from_mapping({"train": {"num_steps": 12}}, make_config(schedule, dtype))
    run_ranks(compare_stretches, 2, config, tmp_path, (6, 6))


@pytest.mark.ranks
def test_resuming_changes_no_bit_on_a_whole_grid(tmp_path: Path) -> None:
    bert = replace(MODEL, kind="bert")
    run_ranks(compare_stretches, 4, make_config(tp=2, pp=2, optimizer="lamb", model=bert), tmp_path)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"zero": 1}, "optim": {"name": "muon"}},
        {"pipeline": {"early_switch": 0, "sync_steps": 2}},
        {"optim": {"staleness": "prediction"}, "parallel": {"zero": 1}},
        {"optim": {"staleness": "extrapolation"}},
        {"optim": {"staleness": "nesterov"}},
        {"model": {"num_experts": 3, "router_bias_rate": 0.01}, "parallel": {"zero": 1}},
        {"model": {"num_experts": 3, "router_bias_rate": 0.01}, "parallel": {"ep": 2}},
        {
            "model": {"num_experts": 3},
            "parallel": {"ep": 2},
            "compression": {"gradients": "int8", "gradients_smallest": 1},
        },
        {"optim": {"name": "muon", "staleness": "lr_rescale"}},
    ],
    ids=str,
)
def test_resuming_2bw_with_its_options_changes_no_bit(
    tmp_path: Path, sections: dict[str, Any], dtype: str
) -> None:
    config = from_mapping(sections, make_config("2bw", dtype, dp=2))
    run_ranks(compare_stretches, 4, config, tmp_path)
    all_write = config.parallel.zero > 0 or config.parallel.ep > 1
    assert len(list((tmp_path / "whole" / "step_00000006").glob("*.safetensors"))) == (
        4 if all_write else 2
    )
    _, full = checkpoint.load_full(tmp_path / "whole" / "step_00000006")
    assert all(w.isfinite().all() for w in full.values())


@pytest.mark.ranks
def test_replicas_resume_from_one_file(tmp_path: Path) -> None:
    run_ranks(compare_stretches, 2, make_config("gpipe", pp=1, dp=2, optimizer="sgd"), tmp_path)
    assert [p.name for p in (tmp_path / "whole" / "step_00000006").glob("*.safetensors")] == [
        "pp0-tp0.safetensors"
    ]


def save_and_merge(config: Config, root: Path) -> None:
    engine, loader = start(config)
    engine.train(loader, 2, lambda step: None)
    checkpoint.save(root, engine, "corpus")
    saved, full = checkpoint.load_full(root / "step_00000002")
    assert saved == config
    for name, newest in engine.state.weights.full_weights().items():
        assert torch.equal(
            engine.state.placements[name].take(full[name], engine.grid.tp.rank), newest
        ), name


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "dtype", "sections"),
    [
        ("2bw", "bf16", {"parallel": {"zero": 1}}),
        ("2bw", "fp32", {"parallel": {"zero": 1}, "optim": {"staleness": "prediction"}}),
    ],
)
def test_shards_are_put_together(
    tmp_path: Path, schedule: str, dtype: str, sections: dict[str, Any]
) -> None:
    """Parts of a tied master are on both end stages with ZeRO-1."""
    run_ranks(
        save_and_merge, 4, from_mapping(sections, make_config(schedule, dtype, tp=2)), tmp_path
    )
    _, full = checkpoint.load_full(tmp_path / "step_00000002")
    assert full["blocks.0.tokens.weight"].shape == (37, 12)
    tied = full["blocks.3.language_model.projection.weight"]
    assert torch.equal(full["blocks.0.tokens.weight"], tied)
    assert full["blocks.1.attention.qkv.weight"].shape == (36, 12)
