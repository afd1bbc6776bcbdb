import pytest
import torch
from torch import nn

from hybridpar import random
from hybridpar.nn import init
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.prediction.ghost import Tracker

NORMAL = Init("normal", 0.02)


def filled(name, placement, rank, dtype=torch.float32, seed=5):
    parameter = nn.Parameter(torch.full(placement.local_shape(rank), float("nan"), dtype=dtype))
    initialize([(name, parameter, placement)], seed, {"tp": rank})
    return parameter.detach()


SHARDS = [
    ((13, 7), Shard.even(0, 13, 3)),
    ((7, 13), Shard.even(1, 13, 4)),
    ((3, 10, 5), Shard.even(1, 10, 3)),
    ((17,), Shard.even(0, 17, 3)),
    ((2, 3), Shard.even(0, 2, 4)),  # more ranks than rows: some hold nothing
    ((3, 2), Shard.even(1, 2, 3)),
    (
        (24, 5),
        Shard(0, (((0, 4), (12, 15), (18, 21)), ((4, 12), (12, 15), (15, 18)))),
    ),  # q, k, v; shared key heads
    ((5, 12), Shard(1, (((8, 12), (0, 3)), ((3, 8), (0, 3))))),  # not in order
]


@pytest.mark.parametrize(("shape", "shard"), SHARDS)
@pytest.mark.parametrize("chunk", [1 << 20, 4])
def test_a_shard_is_a_part_of_the_whole(shape, shard, chunk, monkeypatch):
    monkeypatch.setattr(init, "_CHUNK", chunk)
    full = filled("w", Placement(shape, NORMAL), 0)
    for rank in range(len(shard.ranges)):
        placement = Placement(shape, NORMAL, shard)
        assert torch.equal(filled("w", placement, rank), placement.take(full, rank)), rank


def test_whole_is_the_flat_draw():
    expected = (
        random.normal(5, random.site("w"), random.CounterBlock(1, 60, 0, 0), torch.float64) * 0.02
    )
    assert torch.equal(filled("w", Placement((4, 15), NORMAL), 0).flatten(), expected[0].float())


def test_every_type_starts_from_the_float32_values():
    placement = Placement((50, 7), NORMAL)
    single = filled("w", placement, 0)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(filled("w", placement, 0, dtype), single.to(dtype)), dtype


def test_spread():
    values = filled("w", Placement((400, 100), Init("normal", 0.5)), 0)
    assert abs(values.std() - 0.5) < 0.01
    assert abs(values.mean()) < 0.01


def test_constants():
    shard = Shard.even(0, 9, 2)
    assert torch.equal(filled("b", Placement((9,), Init("zeros"), shard), 1), torch.zeros(4))
    assert torch.equal(filled("g", Placement((9,), Init("ones"), shard), 0), torch.ones(5))
    assert filled("scalar", Placement((), NORMAL), 0).isfinite()


def test_names_seeds_and_ties():
    placement = Placement((40,), NORMAL)
    tied = Placement((40,), NORMAL, tied="embedding")
    base = filled("a", placement, 0)
    assert torch.equal(filled("a", placement, 0), base)
    assert not torch.equal(filled("b", placement, 0), base)
    assert not torch.equal(filled("a", placement, 0, seed=6), base)
    assert not torch.equal(filled("a", placement, 0, seed=5 + 2**40), base)
    assert torch.equal(filled("a", tied, 0), filled("b", tied, 0))


def test_fills_views_of_a_flat_buffer_in_place():
    flat = torch.full((30,), -1.0)
    placement = Placement((4, 5), NORMAL)
    parameter = nn.Parameter(flat[6:26].view(4, 5))
    initialize([("w", parameter, placement)], 5)
    assert torch.equal(flat[6:26].view(4, 5), filled("w", placement, 0))
    assert (flat[:6] == -1).all()
    assert (flat[26:] == -1).all()
    assert parameter.grad_fn is None
    assert parameter.requires_grad


def test_wrong_local_shape_is_our_mistake():
    with pytest.raises(AssertionError, match="placed as"):
        initialize([("w", nn.Parameter(torch.empty(3)), Placement((4,), NORMAL))], 0)


def test_no_numbers_are_drawn_without_values(monkeypatch):
    def refuse(*args):
        raise AssertionError("numbers for a ghost")

    monkeypatch.setattr(random, "normal", refuse)
    with Tracker(torch.device("cpu")):
        ghost = torch.zeros(4, 3)
        initialize([("w", ghost, Placement((4, 3), Init("normal", 0.02)))], seed=1)
    with pytest.raises(AssertionError, match="numbers for a ghost"):
        initialize([("w", torch.zeros(4, 3), Placement((4, 3), Init("normal", 0.02)))], seed=1)
