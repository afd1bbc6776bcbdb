"""LoRA: adapters are trained and nothing else, as one training on every grid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_resume import compare_stretches
from engines import gpt, start, train
from prediction.test_predict import agree, small
from ranks import run_ranks

from hybridpar import checkpoint
from hybridpar.checkpoint.load import MergedWeights
from hybridpar.checkpoint.stages import whole_model
from hybridpar.cli import main
from hybridpar.config import Config, ModelConfig, from_mapping, load_toml, to_toml
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.models.cost import training_flops_per_token, training_flops_rule
from hybridpar.models.groups import is_adapter
from hybridpar.prediction.predict import predict
from hybridpar.validate import problems
from hybridpar.verify.run import verify

LLAMA = {
    "num_kv_heads": 3,
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "ffn_hidden_size": 50,
    "bias": False,
    "tie_embeddings": False,
}
LORA = {"lora_rank": 3, "lora_alpha": 12.0}
TWO_BW = {"schedule": "2bw"}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2}


def make(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A small model with odd sizes: 6 heads of 8, vocabulary 61, 3 layers."""
    own = {"model": LORA | (model or {}), "optim": {"warmup_steps": 2, "clip_grad": 0.5}}
    return gpt((3, 48, 6, 14, 61), own, sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "model", "sections"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, LLAMA, {"pipeline": TWO_BW, "parallel": {"zero": 3}}),
        (
            {"tp": 4, "pp": 2},
            LLAMA | DROPOUT,
            {"pipeline": TWO_BW | {"recompute": "selective"}, "parallel": {"sequence": True}},
        ),
        (
            {"pp": 4},
            {"lora_targets": ("blocks.3.mlp.*",)},
            {"pipeline": {"split_backward": True, "zero_bubble": True}},
        ),
        ({"tp": 3}, {"kind": "bert", "vocab_size": 67}, {"optim": {"name": "muon"}}),
        ({"tp": 6}, LLAMA, {"parallel": {"sequence": True}, "pipeline": {"recompute": "all"}}),
        ({"tp": 2, "dp": 2}, {}, {"parallel": {"zero": 1}, "optim": {"name": "lamb"}}),
        ({"pp": 2, "dp": 2}, LLAMA, {"parallel": {"zero": 2}, "pipeline": TWO_BW}),
        (
            {"pp": 2},
            {},
            {"pipeline": {"schedule": "interleaved", "virtual_stages": 2, "split_backward": True}},
        ),
        (
            {"pp": 2},
            {},
            {
                "pipeline": TWO_BW
                | {"split_backward": True, "stage_layout": "v", "activations": "half"},
                "optim": {"staleness": "prediction"},
            },
        ),
        ({"pp": 2}, {}, {"pipeline": TWO_BW, "memory": {"host_optimizer": True}}),
        ({"tp": 2}, {}, {"optim": {"groups": [{"pattern": "*.lora_A", "frozen": True}]}}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_adapters_are_one_training_on_every_grid(
    grid: dict[str, int], model: dict[str, Any], sections: dict[str, Any]
) -> None:
    report = verify(make(model, **sections), grid, 3)
    assert report.ok, report.first_divergence
    assert report.worst.keys() >= {"init", "loss", "grad_norm", "gradient", "weight"}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_only_adapters_change_and_take_state(dtype: str) -> None:
    config = make(LLAMA, train={"dtype": dtype}, pipeline=TWO_BW, parallel={"dp": 1})
    engine, _ = start(config)
    before = {n: w.clone() for n, w in engine.state.weights.full_weights().items()}
    train(engine, 3)
    changed = {
        name
        for name, weight in engine.state.weights.full_weights().items()
        if not torch.equal(weight, before[name])
    }
    assert changed == {name for name in before if is_adapter(name)}
    assert len(changed) == 2 * 4 * 3
    assert set(engine.state.gradients.layout.names) == changed
    of_optimizer = [key for key in engine.state.tensors() if key.startswith("optimizer/")]
    assert len(of_optimizer) == 2 * len(changed)
    assert all("lora_" in key for key in of_optimizer)
    # one copy of what is frozen, and two versions of adapters
    for key, copies in (("weight", 1), ("lora_A", 2)):
        name = f"blocks.1.attention.qkv.{key}"
        kept = [one for one in engine.state.tensors() if one.endswith(name)]
        assert sum(one.startswith("weights/") for one in kept) == copies
    (predicted,) = predict(JobPlan(config), device=torch.device("cpu"))
    for column, num_bytes in engine.state.num_bytes().items():
        assert getattr(predicted, column) == num_bytes, column


def trained(config: Config, root: Path) -> None:
    engine, _ = start(config)
    train(engine, 3)
    checkpoint.save(root, engine, "corpus")


@pytest.mark.ranks
def test_merged_is_adapted(tmp_path: Path) -> None:
    """In float64, from a grid whose ranks share rows of keys and values."""
    config = make(
        LLAMA, train={"dtype": "fp64"}, parallel={"tp": 2, "pp": 2, "dp": 1}, pipeline=TWO_BW
    )
    run_ranks(trained, 4, config, tmp_path)
    folder = tmp_path / "step_00000003"
    _, weights = checkpoint.load_full(folder)
    merged = MergedWeights(folder)
    assert not [name for name in merged.placements if is_adapter(name)]
    batch = {
        name: torch.from_numpy(array)
        for name, array in SyntheticSamples(config.model).batch(torch.arange(2).numpy()).items()
    }
    adapted = whole_model(config.model, weights, torch.float64)
    plain = merged.manifest.config.transformer
    assert plain == replace(config.model, lora_rank=0, lora_alpha=16.0)
    whole = whole_model(
        plain, {name: merged.read(name) for name in merged.placements}, torch.float64
    )
    logits = []
    for stage in (adapted, whole):
        x: Any = None
        for block in list(stage.blocks.values())[:-1]:
            x = block(x, batch, None)
        logits.append(stage.blocks[number_of_head(config)].logits(x))
    assert (weights["blocks.1.mlp.up.lora_B"] != 0).any()
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-13)


def number_of_head(config: Config) -> str:
    return str(config.model.num_blocks - 1)


def continued(config: Config, folder: Path, expected: float) -> None:
    """Starts from a checkpoint and evaluates."""
    engine, loader = start(config)
    checkpoint.start_from(folder, engine)
    loss = sum(engine.evaluate(loader, 1).values())
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks
def test_adapters_start_on_a_base_and_full_training_goes_on_from_merged_ones(
    tmp_path: Path,
) -> None:
    base = make({"lora_rank": 0, **LLAMA}, train={"dtype": "fp64"}, parallel={"dp": 1})
    on_base = from_mapping({"model": LORA, "parallel": {"tp": 2}}, base)
    engine, loader = start(base)
    engine.train(loader, 1, lambda step: None)
    checkpoint.save(tmp_path / "base", engine, "corpus")
    before = sum(engine.evaluate(loader, 1).values())
    folder = tmp_path / "base" / "step_00000001"
    checkpoint.find_start(folder, on_base.model)
    run_ranks(continued, 2, on_base, folder, before)
    run_ranks(trained, 2, on_base, tmp_path / "lora")
    adapted = tmp_path / "lora" / "step_00000003"
    engine, loader = start(from_mapping({"parallel": {"tp": 1}}, on_base))
    checkpoint.start_from(adapted, engine)
    after = sum(engine.evaluate(loader, 1).values())
    checkpoint.find_start(adapted, base.model)
    run_ranks(continued, 2, from_mapping({"parallel": {"pp": 2}}, base), adapted, after)
    other = replace(on_base.model, lora_rank=4)
    with pytest.raises(
        ConfigError, match=r"model\.lora_rank = 4: does not match train\.start_from"
    ):
        checkpoint.find_start(adapted, other)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("dtype", "sections"),
    [
        ("bf16", {"parallel": {"tp": 2, "dp": 1}, "pipeline": TWO_BW}),
        ("fp32", {"parallel": {"pp": 2, "dp": 1}, "pipeline": TWO_BW}),
        *(("bf16", {"parallel": {"dp": 2, "zero": zero}}) for zero in (3, 2, 1)),
        ("bf16", {"parallel": {"dp": 2, "zero": 1}, "pipeline": TWO_BW}),
        ("bf16", {"parallel": {"tp": 2, "pp": 2, "dp": 1}, "pipeline": TWO_BW}),
    ],
    ids=str,
)
def test_resuming_changes_no_bit(tmp_path: Path, dtype: str, sections: dict[str, Any]) -> None:
    config = make(LLAMA, train={"dtype": dtype}, **sections)
    run_ranks(compare_stretches, config.parallel.num_ranks, config, tmp_path)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"tp": 2, "pp": 2, "model": LORA | LLAMA | {"num_kv_heads": 2}, "pipeline": TWO_BW},
        {
            "tp": 2,
            "model": LORA | LLAMA | {"num_kv_heads": 2},
            "parallel": {"sequence": True},
            "pipeline": {"recompute": "selective"},
        },
        {
            "pp": 2,
            # with a larger one the most memory is taken by numbers that are drawn at the start
            "model": LORA | {"vocab_size": 512},
            "train": {"dtype": "bf16"},
            "pipeline": {"split_backward": True},
        },
        {
            "pp": 2,
            "model": LORA | {"lora_targets": ("*.attention.qkv.*",)},
            "dp": 2,
            "parallel": {"zero": 3},
        },
        {"dp": 2, "model": LORA, "parallel": {"zero": 1}, "train": {"dtype": "bf16"}},
        {"dp": 2, "model": LORA, "parallel": {"zero": 2}, "pipeline": TWO_BW},
        {
            "tp": 2,
            "pp": 2,
            "model": LLAMA | {"num_kv_heads": 2},
            "pipeline": TWO_BW,
            "optim": {"groups": [{"pattern": "*.mlp.*", "frozen": True}]},
        },
    ],
    ids=str,
)
def test_predicted_memory_is_the_allocators_count(sections: dict[str, Any]) -> None:
    agree(small(**sections))


def test_layers_may_differ_if_patterns_name_them() -> None:
    assert make().model.layers_field == "num_layers"
    config = make({"lora_targets": ("blocks.2.*",)}, parallel={"pp": 2, "dp": 1})
    assert not config.model.layers_field
    stages = predict(JobPlan(config), device=torch.device("cpu"))
    assert [stage.optimizer > 0 for stage in stages].count(True) == 1


def test_bad_values_are_named() -> None:
    def fields(**model: Any) -> list[tuple[str, str]]:
        return [(p.field, p.rule) for p in problems(make(model, parallel={"dp": 1}), 1)]

    ((field, rule),) = fields(lora_targets=("*.q_proj",))
    assert field == "model.lora_targets"
    assert "blocks.1.attention.qkv.weight" in rule
    ((field, rule),) = fields(lora_targets=("*.tokens.*", "*.language_model.*"))
    assert field == "model.lora_targets"
    assert fields(lora_targets=()) == [
        (
            "model.lora_targets",
            "must have at least one pattern with model.lora_rank > 0, and no empty one",
        )
    ]
    assert fields(lora_rank=0, lora_targets=("*.q_proj",)) == []
    ((field, rule),) = fields(lora_targets=("*.attention.*", "*.mpl.*"))
    assert field == "model.lora_targets"
    assert rule.endswith("no such weight matches *.mpl.*")
    (found,) = problems(make({"lora_targets": ("q_proj", "v_proj", "*.mlp.*")}), 1)
    assert found.suggestion == '["*.attention.qkv.weight", "*.mlp.*"]'


def test_a_configuration_keeps_its_adapters(tmp_path: Path) -> None:
    config = make({"lora_targets": ("*.qkv.*",)})
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_toml(tmp_path / "c.toml").model == config.model
    bare = ModelConfig(lora_alpha=3.0, lora_targets=("*.qkv.*",))
    assert bare.canonical() == ModelConfig(max_positions=128)


def test_operations_of_frozen_weights_count_without_their_gradients() -> None:
    full = make({"lora_rank": 0, **LLAMA}).model
    lora = make(LLAMA).model
    saved = training_flops_per_token(full) - training_flops_per_token(lora)
    h, f, v, kv = 48, 50, 61, 24
    weights = 3 * (h * (h + 2 * kv) + h * h + 3 * h * f) + h * v
    adapters = 3 * 3 * ((h + h + 2 * kv) + (h + h) + (h + 2 * f) + (f + h))
    assert saved == 2 * weights - 6 * adapters
    assert training_flops_rule(lora) == "4 N + 6 N of adapters + 6 L h s, causal attention once"


def test_check_says_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(to_toml(make(LLAMA, parallel={"dp": 1})))
    assert main(["check", str(tmp_path / "c.toml"), "--ranks", "1", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["trained_parameters"] == 3 * 3 * (144 + 96 + 148 + 98)
    assert main(["check", str(tmp_path / "c.toml"), "--ranks", "1"]) == 0
    assert "parameters, of which 4,374 are trained; blocks" in capsys.readouterr().out
