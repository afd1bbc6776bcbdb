"""The study's variants: every one is a valid configuration, and no two are the same run."""

from __future__ import annotations

import pytest

from benchmarks.convergence.study import BASES, comparable, config_of, variants
from hybridpar.config import load_toml
from hybridpar.validate import problems


@pytest.mark.parametrize("model", BASES)
def test_variants_are_valid_and_distinct(model: str) -> None:
    base = load_toml(BASES[model])
    seen = {}
    for name, variant in variants(model).items():
        config = config_of(base, variant, seed=1)
        assert not problems(config, 1), name
        assert config.model.kind == model
        assert seen.setdefault(comparable(config), name) == name
        assert variant.baseline in variants(model), name


@pytest.mark.parametrize("model", BASES)
def test_all_but_the_budgets_train_on_equal_tokens(model: str) -> None:
    base = load_toml(BASES[model])
    tokens = {}
    for name, variant in variants(model).items():
        config = config_of(base, variant, seed=1)
        batch = config.train.micro_batch_size * config.pipeline.num_microbatches
        tokens[name] = (batch, config.train.num_steps / base.train.num_steps)
    assert {name: value for name, value in tokens.items() if value != (32, 1.0)} == {
        "muon-sync-80": (32, 0.8),
        "muon-sync-90": (32, 0.9),
    }


def test_a_rate_keeps_its_floor_at_a_tenth() -> None:
    for model, path in BASES.items():
        base = load_toml(path)
        for variant in variants(model).values():
            optim = config_of(base, variant, seed=1).optim
            assert optim.min_lr == pytest.approx(optim.lr / 10)
