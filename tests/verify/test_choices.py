"""Choices of experts are compared one by one, and a near tie that flips is named as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from verify.test_experts import DEEPSEEK, make

from hybridpar.nn import moe
from hybridpar.nn.moe import margins_of
from hybridpar.verify import choices as verify_choices
from hybridpar.verify.choices import ChoiceRecorder, Flips, compare_choices, join_choices
from hybridpar.verify.run import verify


def test_a_margin_is_between_the_last_chosen_and_the_first_other() -> None:
    wanted = torch.tensor([[0.1, 0.5, 0.4, 0.3], [0.2, 0.2, 0.2, 0.2]])
    assert margins_of(wanted, 2).tolist() == pytest.approx([0.1, 0.0])
    assert margins_of(wanted, 4).tolist() == [torch.inf, torch.inf]


def recorder(choices: list[Tensor], margins: list[Tensor]) -> ChoiceRecorder:
    made = ChoiceRecorder()
    for experts, margin in zip(choices, margins, strict=True):
        made._add(3, experts, margin)
    return made


def test_micro_batches_of_all_replicas_are_matched() -> None:
    """Two batches of 2 micro-batches on 2 replicas. The order of a token's experts is no choice."""
    choices = [torch.tensor([[i, 9], [8, i]]) for i in range(8)]
    margins = [torch.tensor([0.5, 0.1 + i]) for i in range(8)]
    expected = recorder(choices, margins)
    replicas = [{3: [choices[i].flip(-1) for i in range(d, 8, 2)]} for d in range(2)]
    assert compare_choices(expected, replicas, 0, 2) == Flips(8, pytest.approx(0.1))
    replicas[1][3][3] = torch.tensor([[7, 9], [8, 6]])  # micro-batch 1 of batch 1
    found = compare_choices(expected, replicas, 1, 2)
    assert found.flips == {3: 1}
    assert found.largest_flipped == pytest.approx(7.1)
    assert not found.is_near_tie
    assert "1 in block 3 differ, the clearest by 7.1e+00" in str(found)
    assert "near tie" in str(Flips(8, 1e-16, {3: 1}, 1e-16))
    assert str(Flips(8, 0.1)) == "8 choices of experts, the closest by 1.0e-01: all agree"


def test_choices_of_a_samples_tokens_are_joined_in_order() -> None:
    """Two samples of 5 tokens, of which one rank has the first and the last two."""
    full = torch.arange(20).view(2, 5, 2)
    outer = full[:, [0, 3, 4]].reshape(-1, 2)
    inner = full[:, [1, 2]].reshape(-1, 2)
    joined = join_choices([([((0, 1), (3, 5))], {7: [outer]}), ([((1, 3),)], {7: [inner]})])
    assert joined.keys() == {7}
    assert torch.equal(joined[7][0], full.view(10, 2))


@pytest.mark.ranks
def test_verify_reports_the_closest_choice() -> None:
    recomputes: dict[str, Any] = {"schedule": "2bw", "recompute": "all"}
    report = verify(make(DEEPSEEK, pipeline=recomputes), {"pp": 2, "dp": 2}, 2)
    assert report.ok, report
    tokens = 2 * 3 * 2 * 2 * 14
    assert report.choices.num_choices == 2 * tokens
    assert 0 < report.choices.smallest_margin < 1e-2
    assert "choices of experts, the closest by" in str(report)
    assert report.as_json()["choices"]["flips"] == {}


@pytest.mark.ranks
def test_a_wrong_choice_is_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks choose the second and third best, as a routing bug would have it."""

    def wrong(scores: Tensor, options: Any, bias: Tensor | None = None) -> moe.Routing:
        ranking = torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices
        experts = ranking[:, 1 : 1 + options.topk].contiguous()
        return moe.Routing(experts, scores.gather(1, experts))

    right = moe.choose
    seen: list[bool] = []

    def choose(scores: Tensor, options: Any, bias: Tensor | None = None) -> moe.Routing:
        on_grid = torch.distributed.is_initialized()
        seen.append(on_grid)
        return (wrong if on_grid else right)(scores, options, bias)

    monkeypatch.setattr(moe, "choose", choose)
    report = verify(make(), {"dp": 2}, 1)
    assert seen
    assert report.first_divergence is not None
    assert report.first_divergence.what == "choice"
    assert report.choices.flips
    assert not report.choices.is_near_tie
    assert any("the clearest by" in cause for cause in report.causes)


@pytest.mark.ranks
def test_a_near_tie_is_replayed_and_everything_else_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any margin counts as one within rounding here, and ranks take another second expert. One
    process that visits the same experts agrees with them."""

    def other(scores: Tensor, options: Any, bias: Tensor | None = None) -> moe.Routing:
        ranking = torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices
        return moe.weigh(scores, ranking[:, [0, 2]], options)

    right = moe.choose

    def choose(scores: Tensor, options: Any, bias: Tensor | None = None) -> moe.Routing:
        on_grid = torch.distributed.is_initialized()
        return (other if on_grid else right)(scores, options, bias)

    monkeypatch.setattr(moe, "choose", choose)
    monkeypatch.setattr(verify_choices, "NEAR_TIE", 1.0)
    config = make({"router_bias_rate": 0.0, "router_topk": 2})
    report = verify(config, {"dp": 2, "cp": 2}, 2)
    assert report.ok, report
    assert report.choices.flips
    assert report.as_json()["choices"]["near_tie"]
    assert "which is a near tie that rounding decides" in str(report)
