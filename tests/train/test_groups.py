"""Parameter groups and tables of learning rates in training: on grids, resumed, predicted and
reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import gpt, start, train

import hybridpar as hp
from hybridpar import checkpoint
from hybridpar.cli.entry import main, parse
from hybridpar.config import Config, from_mapping, load_toml, to_toml
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.prediction.predict import predict

SIZES = (3, 16, 4, 8, 24)
TIED = "blocks.4.language_model.projection.weight"
GROUPS: list[dict[str, Any]] = [
    {"pattern": "blocks.1.attention.*", "frozen": True},
    {"pattern": "*.tokens.weight", "lr": 0.2},
    {"pattern": "blocks.[12].*", "lr": 0.5, "weight_decay": 3.0},
    {"pattern": "*.bias", "lr": 2.0},
]
FROZEN_ENDS: list[dict[str, Any]] = [
    {"pattern": TIED, "frozen": True},
    {"pattern": "blocks.2.*", "lr": 0.3},
]
TWO_BW: dict[str, Any] = {"pipeline": {"schedule": "2bw", "num_microbatches": 4}}


def config_of(*each: dict[str, dict[str, Any]]) -> Config:
    return gpt(SIZES, {"parallel": {"dp": 1}, "optim": {"weight_decay": 0.1}}, *each)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "groups", "sections"),
    [
        ({"tp": 2}, GROUPS, {}),
        ({"tp": 2}, GROUPS, {"optim": {"name": "muon"}}),
        ({"pp": 2}, FROZEN_ENDS, TWO_BW),
        (
            {"pp": 2},
            GROUPS,
            TWO_BW | {"memory": {"host_optimizer": True}, "optim": {"staleness": "prediction"}},
        ),
        ({"dp": 2}, GROUPS, {"parallel": {"zero": 2}}),
        ({"dp": 2}, FROZEN_ENDS, {"parallel": {"zero": 3}, "memory": {"budget": 800_000}}),
        (
            {"dp": 1},
            GROUPS,
            {"parallel": {"sites": 2}, "outer": {"every": 2}, "optim": {"name": "lamb"}},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_groups_are_one_training_on_every_grid(
    grid: dict[str, int], groups: list[dict[str, Any]], sections: dict[str, Any]
) -> None:
    optim = {
        "lr_points": [[0, 1e-3], [2, 1e-2]],
        "weight_decay": 0.1,
        "groups": groups,
        **sections.get("optim", {}),
    }
    model = hp.ModelConfig(num_layers=3, hidden_size=16, num_heads=4, seq_length=8, vocab_size=24)
    assert hp.Trainer(model, **sections | {"optim": optim}).verify(grid, num_batches=3).ok


def test_frozen_groups_keep_their_bits_and_factors_scale_updates() -> None:
    plain = {
        "name": "sgd",
        "momentum": 0.0,
        "clip_grad": 0.0,
        "decay": "constant",
        "weight_decay": 0.0,
    }
    moved = []
    for groups in ([], GROUPS):
        engine, _ = start(
            config_of({"optim": plain | {"groups": groups}, "train": {"dtype": "fp64"}})
        )
        before = {
            name: weight.clone() for name, weight in engine.state.weights.full_weights().items()
        }
        train(engine, 1)
        moved.append(
            {
                name: weight - before[name]
                for name, weight in engine.state.weights.full_weights().items()
            }
        )
    alone, grouped = moved
    for name, change in alone.items():
        frozen = name.startswith("blocks.1.attention.")
        factor = 0.0 if frozen else engine.state.placements[name].lr
        assert frozen or factor in (0.2, 0.5, 1.0, 2.0)
        torch.testing.assert_close(grouped[name], factor * change, rtol=0, atol=1e-14)
        assert not frozen or not grouped[name].any()
    assert not [
        key for key in engine.state.tensors() if "blocks.1.attention." in key and "optimizer" in key
    ]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predicted_state_of_frozen_groups_is_what_it_takes(dtype: str) -> None:
    sections = {"train": {"dtype": dtype}, "pipeline": {"schedule": "2bw"}}
    for groups in (GROUPS, FROZEN_ENDS):
        config = config_of(sections, {"optim": {"groups": groups}})
        engine, _ = start(config)
        engine.state.allocate()
        (predicted,) = predict(JobPlan(config), device=torch.device("cpu"))
        for column, num_bytes in engine.state.num_bytes().items():
            assert getattr(predicted, column) == num_bytes, column


def test_predicted_memory_tells_stages_with_frozen_layers_apart() -> None:
    sections = {
        "model": {"num_layers": 5},
        "parallel": {"pp": 4},
        "pipeline": {"split": [2, 1, 1, 3]},
    }
    groups = [{"pattern": "blocks.2.*", "frozen": True}]
    stages = [
        predict(JobPlan(config_of(sections, {"optim": {"groups": of}})), device=torch.device("cpu"))
        for of in ([], groups)
    ]
    optimizer, grouped = ([stage.optimizer for stage in of] for of in stages)
    assert optimizer[1] == optimizer[2] > 0
    assert grouped == [*optimizer[:1], 0, *optimizer[2:]]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_resumes_with_other_groups(tmp_path: Path, dtype: str) -> None:
    def sections(groups: list[dict[str, Any]]) -> Config:
        return config_of(
            {
                "train": {"dtype": dtype},
                "pipeline": {"schedule": "2bw"},
                "optim": {"groups": groups},
            }
        )

    one, _ = start(sections(GROUPS))
    train(one, 3)
    checkpoint.save(tmp_path, one, "")
    assert (
        checkpoint.read_manifest(tmp_path / "step_00000003").config.optim.groups
        == sections(GROUPS).optim.groups
    )
    same, _ = start(sections(GROUPS))
    assert checkpoint.resume(tmp_path, same, "", print) == 3
    train(one, 2).check(train(same, 2))
    other, _ = start(sections(FROZEN_ENDS))
    assert checkpoint.resume(tmp_path, other, "", print) == 3
    state = {key: tensor.clone() for key, tensor in other.state.tensors().items()}
    assert not any(
        tensor.any()
        for key, tensor in state.items()
        if key.startswith("optimizer/blocks.1.attention.")
    )  # trained from now on
    assert all(
        tensor.any()
        for key, tensor in state.items()
        if key.startswith("optimizer/blocks.2.mlp.down.weight")
    )
    before = {name: weight.clone() for name, weight in other.state.weights.full_weights().items()}
    train(other, 2)
    unchanged = {
        name
        for name, weight in other.state.weights.full_weights().items()
        if torch.equal(weight, before[name])
    }
    assert unchanged == {"blocks.0.tokens.weight"}


def test_skipped_steps_use_up_no_point() -> None:
    config = config_of(
        {
            "train": {"dtype": "fp16"},
            "optim": {"lr_points": [[0, 0.0], [4, 1e-2]], "loss_scale": 2.0**28},
        }
    )
    engine, _ = start(config)
    steps = train(engine, 16).steps
    skipped = sum(step.skipped for step in steps)
    made = [step.lr for step in steps if not step.skipped]
    assert 0 < skipped < 12
    assert made[:6] == [0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01][: len(made)]


CHECKED = """
[model]
num_layers = 3
hidden_size = 16
num_heads = 4
seq_length = 8
vocab_size = 24
[optim]
lr_points = [[0, 0.0], [10, 1e-3]]
[[optim.groups]]
pattern = "*.tokens.weight"
frozen = true
[[optim.groups]]
pattern = "blocks.1.*"
lr = 0.5
"""


def test_check_shows_groups_and_flags_change_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(CHECKED)
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "learning rate of optim.lr_points (2): 0 at update 0, 0.001 at update 10" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["*.tokens.weight", "384", "frozen"] in rows
    assert ["blocks.1.*", "3,280", "0.0005", "0.01"] in rows
    assert (
        main(
            [
                "check",
                str(path),
                "--optim.groups.0.frozen",
                "false",
                "--optim.groups.1.lr",
                "0.1",
                "--json",
            ]
        )
        == 0
    )
    first, second, _ = json.loads(capsys.readouterr().out)["groups"]
    assert not first["frozen"]
    assert second["lr"] == pytest.approx(1e-4)
    assert main(["check", str(path), "--optim.groups.1.pattern", "blocks.9.*"]) == 1
    assert "optim.groups[1].pattern = 'blocks.9.*': matches no parameter" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", str(path), "--optim.groups.1.lr", "high"])
    assert "must be a number; try --optim.groups.1.lr 0.5" in capsys.readouterr().err
    points = parse(
        ["check", str(path), "--optim.lr_points", "0", "1e-3", "5", "2e-3"]
    ).config.optim.lr_points
    assert points == ((0, 1e-3), (5, 2e-3))


def test_groups_survive_the_file_of_a_run(tmp_path: Path) -> None:
    config = from_mapping({"optim": {"groups": GROUPS, "lr_points": [[0, 0], [5, 1]]}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_toml(tmp_path / "config.toml") == config
    assert hp.Trainer(config=config).config == config


def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = hp.Trainer(
        lr_schedule=lambda step: 1e-3 / (1 + step), train={"num_steps": 4}, optim={"lr": 1e-2}
    )
    assert trainer.config.optim.lr_points == ((0, 1e-3), (1, 5e-4), (2, 1e-3 / 3), (3, 2.5e-4))
    assert "optim.lr = 0.01 is left out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"lr_schedule = 0\.001: must be a function"):
        hp.Trainer(lr_schedule=1e-3)  # type: ignore[arg-type]


def test_a_list_of_tables_is_no_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text("[model]\nnum_layers = 2\n")
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path / "my.toml"), "--optim.groups", "x"])
    assert (
        "--optim.groups is a list of tables, which the configuration's file has: [[optim.groups]]"
        in (capsys.readouterr().err)
    )
