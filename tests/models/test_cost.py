"""Costs of blocks, and the split into stages that balances them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import ModelConfig, load_toml
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.models.cost import (
    balanced_split,
    even_out,
    forward_flops_per_token,
    stage_split,
    training_flops_per_token,
)
from hybridpar.nn.placement import named_placements


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_contiguous_split_is_better(costs: list[int], data: st.DataObject) -> None:
    p = data.draw(st.integers(1, len(costs)))
    sizes = balanced_split(tuple(costs), p)
    assert len(sizes) == p
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1

    def bottleneck(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    ours = tuple(sum(sizes[:i]) for i in range(1, p))
    assert bottleneck(ours) == min(bottleneck(cuts) for cuts in combinations(range(1, len(costs)), p - 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_of_equal_splits_takes_that_whose_fullest_stage_holds_the_least(costs: list[int], data: st.DataObject) -> None:
    p = data.draw(st.integers(1, len(costs)))
    held = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=len(costs),
                              max_size=len(costs)))
    ours = tuple(accumulate(balanced_split(tuple(costs), p, tuple(held))))[:-1]

    def worst(cuts: tuple[int, ...]) -> tuple[int, int]:
        edges = [*pairwise((0, *cuts, len(costs)))]
        return (max(sum(costs[a:b]) for a, b in edges),
                max(sum(state + (p - stage) * kept for state, kept in held[a:b]) for stage, (a, b) in enumerate(edges)))

    assert worst(ours) == min(map(worst, combinations(range(1, len(costs)), p - 1)))


def test_the_head_weighs_a_layer_where_it_costs_one() -> None:
    model = ModelConfig(num_layers=7, hidden_size=512, num_heads=8, seq_length=256, vocab_size=6656)
    assert [len(blocks) for blocks in stage_split(model, 2)] == [5, 4]  # embedding + 4 layers, 3 layers + head


@pytest.mark.parametrize("split", [(3, 4), (6,), (0, 6), (2, 2, 2)])
def test_a_split_must_cover_the_blocks(split: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.split"):
        stage_split(ModelConfig(num_layers=4), 2, split)


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match="has only 6 blocks; try 6"):
        stage_split(ModelConfig(num_layers=4), 7)


@pytest.mark.parametrize(("name", "millions"), [
    ("gpt_345m", 355), ("gpt_1b3", 1313), ("gpt_2b2", 2157), ("gpt_3b8", 3780), ("bert_large", 336),
])
def test_models_have_the_size_in_their_name(name: str, millions: int) -> None:
    """Built on the meta device: nothing is allocated."""
    model = load_toml(f"scripts/configs/{name}.toml").model
    blocks = build_blocks(model, Axis("tp"), range(model.num_blocks))
    seen = {id(p): p.numel() for block in blocks.values() for _, p, _ in named_placements(block)}
    assert sum(seen.values()) == pytest.approx(millions * 1e6, rel=0.005)
    assert all(p.is_meta for block in blocks.values() for p in block.parameters())


def test_flops_are_six_per_matmul_weight_and_token_and_attention() -> None:
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=100, seq_length=32,
                        vocab_size=50, activation="swiglu")
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 100
    assert training_flops_per_token(model) == 6 * (3 * layer + 64 * 50) + 6 * 3 * 64 * 32, "half the matrix"
    assert len(forward_flops_per_token(model)) == model.num_blocks


def test_the_whole_attention_matrix_counts_where_nothing_is_masked() -> None:
    model = ModelConfig("bert", num_layers=3, hidden_size=64, num_heads=4, seq_length=32, vocab_size=50)
    layer, head = 12 * 64 * 64, round(2 * 0.15 * (64 * 50 + 64 * 64))
    assert training_flops_per_token(model) == 6 * 3 * layer + 12 * 3 * 64 * 32 + 3 * head


@pytest.mark.parametrize(("costs", "num_ranks", "chunks"), [
    ([0, *[1] * 24, 4], 4, 2), ([0, *[1] * 9, 2], 2, 3), ([0, *[1] * 14, 1], 4, 4), ([3, 1, 4, 1, 5, 9, 2, 6], 2, 2)])
def test_chunks_even_out_over_their_ranks(costs: list[int], num_ranks: int, chunks: int) -> None:
    """Against all splits there are: the costliest rank is within a block of the best one's."""
    num_stages = num_ranks * chunks
    before = balanced_split(tuple(costs), num_stages)
    sizes = even_out(tuple(costs), before, num_ranks)

    def costliest(sizes: Sequence[int]) -> int:
        ends = (0, *accumulate(sizes))
        stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(sum(stages[rank::num_ranks]) for rank in range(num_ranks))

    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert costliest(sizes) <= costliest(before)
    if len(costs) < 14:
        cuts = combinations(range(1, len(costs)), num_stages - 1)
        best = min(costliest([b - a for a, b in pairwise((0, *cut, len(costs)))]) for cut in cuts)
        assert costliest(sizes) <= best + 1
    one_each = balanced_split(tuple(costs), num_ranks)
    assert even_out(tuple(costs), one_each, num_ranks) == one_each


def test_the_head_leaves_the_last_rank_fewer_layers() -> None:
    """24 layers and a head of four: each of four ranks gets seven."""
    costs = (0, *[1] * 24, 4)
    sizes = even_out(costs, balanced_split(costs, 8), 4)
    ends = (0, *accumulate(sizes))
    stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
    assert [sum(stages[rank::4]) for rank in range(4)] == [7] * 4
