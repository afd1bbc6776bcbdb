"""The group that decides on a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.config import Config, ModelConfig, OptimConfig, ParameterGroup, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import (
    BlockOptions,
    build_blocks,
    global_placements,
    require_factors,
    require_trainable,
)
from hybridpar.models.groups import find_groups, require_matches, summarize, table
from hybridpar.nn.placement import Placement, named_placements
from hybridpar.validate import problems

TIED = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, seq_length=4, vocab_size=16)
HEAD = "blocks.3.language_model.projection.weight"


def groups_of(*tables: dict[str, Any]) -> tuple[ParameterGroup, ...]:
    return from_mapping({"optim": {"groups": list(tables)}}).optim.groups


def placed(model: ModelConfig, groups: tuple[ParameterGroup, ...]) -> dict[str, Placement]:
    blocks = build_blocks(
        model, Axis("tp"), range(model.num_blocks), options=BlockOptions(groups=groups)
    )
    return {
        f"blocks.{number}.{name}": placement
        for number, block in blocks.items()
        for name, _, placement in named_placements(block)
    }


def test_the_first_pattern_that_matches_decides() -> None:
    groups = groups_of(
        {"pattern": "blocks.1.*.bias", "lr": 0.5},
        {"pattern": "blocks.1.*", "weight_decay": 3},
        {"pattern": "*_norm.?eight", "lr": 0.1},
    )
    found = placed(TIED, groups)
    assert found["blocks.1.mlp.up.bias"].lr == 0.5
    assert found["blocks.1.mlp.up.bias"].weight_decay == 0  # as without groups
    assert found["blocks.1.mlp.up.weight"].weight_decay == 3
    assert found["blocks.1.mlp_norm.weight"].lr == 1
    assert found["blocks.2.mlp_norm.weight"].lr == 0.1
    assert found["blocks.2.mlp.up.weight"] == placed(TIED, ())["blocks.2.mlp.up.weight"]


@pytest.mark.parametrize("pattern", ["blocks.0.tokens.weight", HEAD])
def test_a_tied_parameter_is_one_by_any_of_its_names(pattern: str) -> None:
    groups = groups_of({"pattern": pattern, "frozen": True}, {"pattern": "*", "lr": 0.5})
    for numbers in ([0], [3], range(4)):
        for number, block in build_blocks(
            TIED, Axis("tp"), numbers, options=BlockOptions(groups=groups)
        ).items():
            for name, parameter, placement in named_placements(block):
                tied = f"blocks.{number}.{name}" in ("blocks.0.tokens.weight", HEAD)
                assert placement.trainable is parameter.requires_grad is not tied
                assert placement.lr == (1 if tied else 0.5)


def test_a_group_without_parameters_is_an_error() -> None:
    def said(*tables: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as error:
            require_matches(groups_of(*tables), global_placements(TIED))
        return str(error.value)

    misspelled = said({"pattern": "*.atention.qkv.weight"})
    assert "optim.groups[0].pattern = '*.atention.qkv.weight': matches no parameter" in misspelled
    assert misspelled.endswith('try "blocks.*.attention.qkv.weight"')
    later = said({"pattern": "blocks.*"}, {"pattern": "blocks.1.*"})
    assert "optim.groups[1].pattern = 'blocks.1.*': has no effect" in later
    assert "matches optim.groups[0]" in later


def test_check_names_what_is_wrong_with_groups() -> None:
    def said(**optim: Any) -> list[str]:
        return [problem.field for problem in problems(from_mapping({"optim": optim}), 1)]

    assert said(groups=[{"pattern": "blocks.*", "lr": 0.1}]) == []
    assert said(groups=[{"pattern": "block.*"}]) == ["optim.groups[0].pattern"]
    assert said(groups=[{"pattern": "*", "frozen": True}]) == ["optim.groups"]
    wrong = Config(optim=OptimConfig(groups=(ParameterGroup("*", lr=-1.0),)))
    assert [problem.field for problem in problems(wrong, 1)] == ["optim.groups[0].lr"]
    assert said(lr_points=[[5, 1e-3], [5, 1e-4]]) == ["optim.lr_points"]
    assert said(lr_points=[[5, float("nan")]]) == ["optim.lr_points"]
    assert said(lr_points=[[5, -1e-3]]) == ["optim.lr_points"]


@pytest.mark.parametrize(
    "entry",
    [
        {"lr": 1},
        {"pattern": "*", "rate": 1},
        {"pattern": "*", "lr": "1"},
        "*",
        {"pattern": "*", "lr": -1},
        {"pattern": "*", "lr": float("inf")},
    ],
)
def test_an_entry_that_is_no_group_is_refused(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"optim.groups = .*\[0\].*try \[\{pattern = .\*.\}\]"):
        from_mapping({"optim": {"groups": [entry]}})


def test_parameters_that_must_be_trained() -> None:
    everything = groups_of({"pattern": "*", "frozen": True})
    with pytest.raises(ConfigError, match="must leave at least one parameter to train"):
        require_trainable(TIED, everything)
    with pytest.raises(ConfigError, match="trains none"):
        require_factors(TIED, "sbpca", groups_of({"pattern": "*.weight", "frozen": True}))
    require_factors(TIED, "sbpca", groups_of({"pattern": "blocks.1.*", "frozen": True}))


def test_the_table_of_groups() -> None:
    tables = [
        {"pattern": HEAD, "frozen": True},
        {"pattern": "*.bias", "lr": 2.0},
        {"pattern": "blocks.1.*", "lr": 0.5},
    ]
    optim = from_mapping(
        {"optim": {"groups": tables, "lr_points": [[0, 0.0], [9, 0.1]], "weight_decay": 0.3}}
    ).optim
    tied, biases, first, rest = summarize(optim, global_placements(TIED))
    assert (tied.parameters, tied.frozen) == (16 * 8, True)
    assert (biases.lr, biases.weight_decay) == (0.2, 0.0)
    assert (first.lr, first.weight_decay) == (0.05, 0.3)
    assert rest.pattern == ""
    blocks = build_blocks(TIED, Axis("tp"), range(4)).values()
    total = torch.nn.ModuleList(blocks).parameters()
    assert tied.parameters + biases.parameters + first.parameters + rest.parameters == sum(
        p.numel() for p in total
    )
    lines = table([tied, biases, first, rest]).splitlines()
    assert lines[1].split() == [HEAD, "128", "frozen"]
    assert lines[-1].split()[:2] == ["all", "others"]


def test_patterns_of_a_shorter_model_may_match_nothing() -> None:
    groups = groups_of({"pattern": "blocks.9.*", "lr": 0.1})
    assert find_groups(groups, global_placements(TIED)) == {}
    assert placed(TIED, groups) == placed(TIED, ())
