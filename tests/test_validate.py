"""`hybridpar check`: each impossible configuration gives its own problem, with a value that
works."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from custom_models import CustomGPT

from hybridpar.config import Config, Within, from_mapping, load_toml
from hybridpar.config.typed import hints_of
from hybridpar.errors import ConfigError
from hybridpar.validate import problems, resolve

CONFIGS = Path(__file__).parent.parent / "scripts" / "configs"


@pytest.mark.parametrize(
    ("changes", "world_size", "field", "works"),
    [
        (
            {"parallel": {"tp": 2, "pp": 2, "dp": 1}},
            8,
            "parallel",
            "4 processes (--ranks, or torchrun's --nproc-per-node), or parallel.dp = 0",
        ),
        (
            {"parallel": {"tp": 3}},
            8,
            "parallel",
            "3 processes (--ranks, or torchrun's --nproc-per-node), or tp=2 pp=1",
        ),
        ({"parallel": {"tp": 16}}, 16, "parallel.tp", "8"),
        (
            {"parallel": {"tp": 2, "cp": 2, "dp": 3}},
            8,
            "parallel",
            "12 processes (--ranks, or torchrun's --nproc-per-node), or parallel.dp = 0",
        ),
        (
            {"parallel": {"tp": 3, "cp": 2}},
            8,
            "parallel",
            "6 processes (--ranks, or torchrun's --nproc-per-node), or tp=2 cp=2 pp=1",
        ),
        ({"parallel": {"cp": 3}, "model": {"seq_length": 5}}, 3, "parallel.cp", "2"),
        ({"parallel": {"cp": 2}, "model": {"kind": "bert"}}, 2, "parallel.cp", "1"),
        (
            {"parallel": {"cp": 2, "ep": 4}, "model": {"num_experts": 4}},
            6,
            "parallel.ep",
            "2",
        ),
        ({"parallel": {"ep": 2}}, 2, "parallel.ep", "1"),
        ({"parallel": {"ep": 4}, "model": {"num_experts": 3}}, 4, "parallel.ep", "3"),
        ({"parallel": {"ep": 4}, "model": {"num_experts": 6}}, 6, "parallel.ep", "2"),
        (
            {"parallel": {"ep": 2, "sites": 2, "zero": 1}, "model": {"num_experts": 4}},
            4,
            "parallel.ep",
            "1",
        ),
        ({"memory": {"expert_load": 1.5}}, 1, "memory.expert_load", "0.0"),
        (
            {
                "memory": {"expert_load": 0.5},
                "parallel": {"ep": 2},
                "model": {"num_experts": 4},
            },
            2,
            "memory.expert_load",
            "1.0",
        ),
        ({"parallel": {"pp": 7}}, 7, "parallel.pp", "6"),
        ({"model": {"num_heads": 7}}, 1, "model.num_heads", "8"),
        ({"model": {"num_kv_heads": 3}}, 1, "model.num_kv_heads", "2"),
        ({"model": {"num_heads": 256, "position": "rotary"}}, 1, "model.position", '"learned"'),
        (
            {"model": {"rotary_fraction": 0.1, "position": "rotary"}},
            1,
            "model.rotary_fraction",
            "0.0781",
        ),
        ({"model": {"rotary_fraction": 0.0}}, 1, "model.rotary_fraction", "1"),
        ({"model": {"rotary_fraction": 1.5}}, 1, "model.rotary_fraction", "1"),
        ({"model": {"max_positions": 127}}, 1, "model.seq_length", "127"),
        ({"model": {"max_positions": -1}}, 1, "model.max_positions", "0"),
        (
            {"model": {"parallel_residual": True, "norm_position": "post"}},
            1,
            "model.parallel_residual",
            'model.norm_position = "pre"',
        ),
        ({"model": {"hidden_size": 0}}, 1, "model.hidden_size", "256"),
        ({"model": {"norm_eps": -1e-5}}, 1, "model.norm_eps", "0"),
        ({"model": {"dropout": 1.0}}, 1, "model.dropout", "0.1"),
        ({"model": {"kind": "bert", "seq_length": 5}}, 1, "model.seq_length", "8"),
        (
            {"parallel": {"pp": 4}, "pipeline": {"schedule": "2bw", "num_microbatches": 2}},
            4,
            "pipeline.num_microbatches",
            "3",
        ),
        ({"parallel": {"pp": 2}, "pipeline": {"split": [3, 4]}}, 2, "pipeline.split", "[4, 2]"),
        ({"pipeline": {"recompute": "some"}}, 1, "pipeline.recompute", "'all'"),
        ({"pipeline": {"recompute": "2-4"}}, 1, "pipeline.recompute", "'all'"),
        (
            {"parallel": {"pp": 2}, "pipeline": {"recompute": "stage:2"}},
            2,
            "pipeline.recompute",
            "'stage'",
        ),
        ({"optim": {"lr": -1.0}}, 1, "optim.lr", "0.0003"),
        ({"train": {"device": "cpu", "share_gpus": True}}, 1, "train.share_gpus", "false"),
        ({"optim": {"betas": [0.9, 1.0]}}, 1, "optim.betas", "[0.9, 0.999]"),
        ({"optim": {"name": "sgd", "momentum": 0.0, "nesterov": True}}, 1, "optim.momentum", "0.9"),
        (
            {"optim": {"name": "muon", "momentum": 0.0, "nesterov": True}},
            1,
            "optim.momentum",
            "0.9",
        ),
        (
            {"optim": {"name": "muon", "momentum": 0.0, "staleness": "nesterov"}},
            1,
            "optim.momentum",
            "0.9",
        ),
        ({"optim": {"name": "lamb", "staleness": "nesterov"}}, 1, "optim.staleness", '"none"'),
        ({"checkpoint": {"keep": 0}}, 1, "checkpoint.keep", "2"),
        ({"checkpoint": {"keep_best": -1}}, 1, "checkpoint.keep_best", "0"),
        ({"checkpoint": {"keep_best": 1}}, 1, "checkpoint.keep_best", "0"),
        ({"checkpoint": {"family": "phi"}}, 1, "checkpoint.family", '"phi3"'),
        (
            {"checkpoint": {"keep_best": 1}, "train": {"eval_interval": 20, "save_interval": 50}},
            1,
            "train.save_interval",
            "60",
        ),
        ({"data": {"corpus": []}}, 1, "data.corpus", '["stdlib"]'),
        ({"data": {"weights": [1.0, 2.0]}}, 1, "data.weights", "[1.0]"),
        ({"data": {"document_length": 9.0}}, 1, "data.document_length", "0.0"),
        (
            {"data": {"document_length": 0.5, "packing": "stream"}},
            1,
            "data.document_length",
            "0.0",
        ),
        ({"data": {"split": 0.0}, "train": {"eval_interval": 5}}, 1, "data.split", "0.02"),
        ({"data": {"valid_corpus": ["stdlib"]}}, 1, "data.valid_corpus", "[]"),
        ({"data": {"valid_corpus": [""]}}, 1, "data.valid_corpus", "[]"),
        ({"data": {"text_key": ""}}, 1, "data.text_key", '"text"'),
        ({"kernels": {"dropout": "abacus"}}, 1, "kernels.dropout", "auto"),
        (
            {"model": {"rotary_short_factors": [0.0]}},
            1,
            "model.rotary_short_factors",
            "",
        ),
        (
            {"kernels": {"dropout": "triton"}, "train": {"device": "cpu"}},
            1,
            "kernels.dropout",
            "auto or ",
        ),
        ({"train": {"num_steps": 0}}, 1, "train.num_steps", "1"),
        (
            {"train": {"stop_signals": ["TERM", "SIGUSR1"]}},
            1,
            "train.stop_signals",
            '["INT", "TERM", "HUP", "USR1"]',
        ),
        (
            {"train": {"stop_signals": ["KILL"]}},
            1,
            "train.stop_signals",
            '["INT", "TERM", "HUP", "USR1"]',
        ),
        ({"checkpoint": {"max_failed_saves": 0}}, 1, "checkpoint.max_failed_saves", "3"),
        ({"run": {"name": "."}}, 1, "run.name", "run"),
        ({"run": {"name": "./."}}, 1, "run.name", "run"),
        ({"run": {"name": "./data"}}, 1, "run.name", "run"),
        ({"run": {"name": "a", "dir": "b"}, "data": {"cache": "./b/a"}}, 1, "run.name", "run"),
    ],
)
def test_each_rule(changes: dict, world_size: int, field: str, works: str) -> None:
    found = problems(from_mapping(changes), world_size)
    assert [p.field for p in found] == [field], found
    assert found[0].suggestion.startswith(works)
    with pytest.raises(ConfigError, match=field):
        resolve(from_mapping(changes), world_size)


def test_a_run_may_be_called_data_where_corpora_are_kept_elsewhere() -> None:
    assert not problems(from_mapping({"run": {"name": "data"}, "data": {"cache": "elsewhere"}}), 1)
    assert not problems(from_mapping({"run": {"name": "a/data"}, "train": {"stop_signals": []}}), 1)


def test_all_problems_at_once() -> None:
    config = from_mapping(
        {"model": {"num_heads": 7}, "parallel": {"tp": 3, "pp": 9}, "pipeline": {"schedule": "2bw"}}
    )
    assert {p.field for p in problems(config, 8)} == {
        "parallel",
        "parallel.pp",
        "model.num_heads",
        "pipeline.num_microbatches",
    }


def test_dp_fills_the_job() -> None:
    assert resolve(from_mapping({"parallel": {"tp": 2, "pp": 3}}), 24).parallel.dp == 4


LARGE = [
    ("gpt_345m", (1, 4, 2)),
    ("gpt_1b3", (1, 4, 2)),
    ("gpt_2b2", (1, 8, 1)),
    ("gpt_3b8", (1, 16, 4)),
    ("gpt_3b8", (4, 8, 2)),
    ("bert_large", (1, 4, 2)),
]


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("gpt_tiny", (1, 2, 2)),
        ("bert_tiny", (1, 2, 2)),
        *LARGE,
        *((f"{name}_paper", grid) for name, grid in LARGE),
    ],
)
def test_our_configurations_run_on_the_grids_they_name(
    name: str, grid: tuple[int, int, int]
) -> None:
    tp, pp, dp = grid
    config = from_mapping({"parallel": {"tp": tp, "pp": pp}}, load_toml(CONFIGS / f"{name}.toml"))
    assert resolve(config, tp * pp * dp).parallel.dp == dp


@pytest.mark.parametrize(("name", "grid"), LARGE)
def test_old_gradients_have_their_remedy_but_as_in_the_paper(
    name: str, grid: tuple[int, int, int]
) -> None:
    """At most half of a batch on the older weights, as in the convergence study."""
    ours, paper = (
        resolve(load_toml(CONFIGS / f"{name}{which}.toml"), 1) for which in ("", "_paper")
    )
    assert (ours.optim.name, ours.optim.staleness, ours.pipeline.early_switch) == (
        "muon",
        "extrapolation",
        1,
    )
    assert 2 * grid[1] <= ours.pipeline.num_microbatches
    assert (paper.optim.name, paper.optim.staleness, paper.pipeline.early_switch) == (
        "adamw",
        "none",
        "off",
    )
    assert ours.optim.lr == pytest.approx(4 * paper.optim.lr)
    assert (ours.model, ours.global_batch_size) == (paper.model, paper.global_batch_size)


def test_a_number_without_an_end_is_one_problem() -> None:
    (problem,) = problems(from_mapping({"optim": {"lr": float("nan")}}), 1)
    assert (problem.field, problem.rule, problem.suggestion) == (
        "optim.lr",
        "must be finite",
        "0.0003",
    )


def outside(rule: Within) -> list[float]:
    """Numbers just beyond each bound."""
    bounds = [(rule.least, -1), (rule.most, 1), (rule.above, 0), (rule.below, 0)]
    return [type(bound)(bound + step) for bound, step in bounds if abs(bound) != math.inf]


RULES = [
    (section.name, name, rule)
    for section in dataclasses.fields(Config)
    for name, (kind, rule) in hints_of(type(getattr(Config(), section.name))).items()
    if isinstance(rule, Within) and kind in (int, float)
]


@pytest.mark.parametrize(
    ("section", "name", "rule"), RULES, ids=[f"{section}.{name}" for section, name, _ in RULES]
)
def test_every_rule_of_a_number_is_checked_and_what_is_suggested_works(
    section: str, name: str, rule: Within
) -> None:
    for value in outside(rule):
        settings = dataclasses.replace(getattr(Config(), section), **{name: value})
        (problem,) = problems(dataclasses.replace(Config(), **{section: settings}), 1)
        assert (problem.field, problem.value) == (f"{section}.{name}", value)
        assert rule.allows(float(problem.suggestion))


def test_context_parallelism_is_for_models_that_declare_it() -> None:
    config = from_mapping({"parallel": {"cp": 2}})
    assert resolve(config, 8).parallel.dp == 4
    model = CustomGPT()
    assert not problems(dataclasses.replace(config, model=model), 2)

    @dataclasses.dataclass(frozen=True)
    class Undeclared(CustomGPT):
        context_parallel = False

    (found,) = problems(dataclasses.replace(config, model=Undeclared()), 2)
    assert found.field == "parallel.cp"
    assert "Undeclared.context_parallel = True" in found.rule
