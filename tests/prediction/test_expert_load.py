"""The load of experts that a prediction assumes, against random routing."""

from __future__ import annotations

import pytest
import torch

from hybridpar.config import Config, from_mapping
from hybridpar.prediction.expert_load import ExpertLoad, expert_load

EXPERTS = {
    "num_experts": 8,
    "router_topk": 2,
    "expert_ffn_hidden_size": 32,
    "activation": "swiglu",
    "bias": False,
}


def make(model: dict[str, object] | None = None, **parallel: int) -> Config:
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "seq_length": 64, "vocab_size": 64}
    return from_mapping(
        {
            "model": sizes | EXPERTS | (model or {}),
            "parallel": {"dp": 1} | parallel,
            "train": {"micro_batch_size": 4},
        }
    )


def found(config: Config) -> ExpertLoad:
    load = expert_load(config)
    assert load is not None
    return load


def test_rows_of_an_expert_or_of_the_rank_with_the_most() -> None:
    assert expert_load(make({"num_experts": 0, "router_balance_loss": 0.0})) is None
    load = found(make())
    assert (load.balanced, load.most, load.sent) == (64, 256, 0)
    (line,) = load.lines()
    assert line.startswith("experts: at balanced load, 64 rows each, up to ")
    load = found(make(dp=6, ep=6))
    assert (load.balanced, load.most) == (768, 3072)
    assert "at most 3,072, if all tokens of the 6 ranks" in next(load.lines())
    load = found(make(cp=2, ep=2))
    assert (load.balanced, load.most) == (256, 512)
    bounded = from_mapping({"memory": {"expert_load": 1.5}}, make(dp=6, ep=6))
    assert found(bounded).bound == 1152
    assert "predicted with 1,152 rows" in next(found(bounded).lines())


@pytest.mark.parametrize(("ep", "own"), [(1, 1), (2, 4), (4, 2), (3, 3)])
def test_random_routing_stays_below_the_usual_load(ep: int, own: int) -> None:
    """The four deviations are the samples' own, to a tenth."""
    load = found(make(dp=ep, ep=ep))
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(400, ep * 4 * 64, 8, generator=generator)
    rows = (scores.topk(2).indices < own).sum((1, 2)).double()
    assert rows.mean().item() == pytest.approx(load.balanced, rel=0.01)
    four = (load.usual - load.balanced) / 4
    assert rows.std().item() == pytest.approx(four, rel=0.15)
    assert rows.max() <= load.usual


def test_bytes_sent_are_the_formula() -> None:
    """Rows of 2 experts of 256 tokens and 32 features, 3 layers, out and back, forward and backward,
    of which half stays; and loads of 8 experts."""
    load = found(make({"moe_layers": "1"}, dp=2, ep=2))
    rows = 2 * 256 * 32 * 4
    assert load.sent == 3 * (4 * rows + 8 * 8) // 2
    assert list(load.lines())[1].startswith("a rank sends 0.38 MiB a micro-batch to the experts")
    dense = found(make({"moe_layers": "010"}, dp=2, ep=2))
    assert 3 * dense.sent == load.sent
