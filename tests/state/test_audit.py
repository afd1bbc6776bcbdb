import pytest
import torch
from ranks import run_ranks

from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.optim import ParameterSlot
from hybridpar.state import Mismatch, audit_replicas, replicas_along
from hybridpar.state.audit import bit_hash

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(5, 7),
        "b": torch.randn(11).bfloat16(),
        "c": torch.tensor(1.0, dtype=torch.float64),
        "empty": torch.zeros(0),
    }


def flip_bit(x, element, bit):
    raw = x.view(-1).view(torch.uint8).view(-1)
    raw[element * x.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    x = torch.randint(0, 2, (4, 5)).to(dtype)
    untouched = x.clone()
    base = bit_hash(x)
    for element in range(x.numel()):
        for bit in range(1 if dtype == torch.bool else 8 * x.element_size()):
            flip_bit(x, element, bit)
            assert bit_hash(x) != base
            flip_bit(x, element, bit)
    assert bit_hash(x) == base
    assert torch.equal(x, untouched)


def test_order_and_sign_of_zero_count_but_strides_do_not():
    x = torch.arange(12.0).view(3, 4)
    assert bit_hash(x) != bit_hash(x.flip(0))
    assert bit_hash(torch.tensor([0.0])) != bit_hash(torch.tensor([-0.0]))
    assert bit_hash(x.t()) == bit_hash(x.t().contiguous())


def test_hash_does_not_depend_on_chunks():
    x = torch.randn((1 << 20) + 3)
    whole = bit_hash(x)
    flip_bit(x, x.numel() - 1, 0)
    assert bit_hash(x) != whole


def audit_with_flip(name, element, bit, rank):
    axis = ProcessGrid(dp=torch.distributed.get_world_size()).dp
    held = tensors()
    assert audit_replicas(held, axis) is None
    if axis.rank == rank:
        flip_bit(held[name], element, bit)
    return audit_replicas(held, axis)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "element", "bit", "rank"), [("a", 34, 0, 1), ("b", 3, 15, 2), ("c", 0, 63, 0)]
)
def test_one_flipped_bit_is_found_and_so_is_the_rank(name, element, bit, rank):
    for found in run_ranks(audit_with_flip, 3, name, element, bit, rank):
        assert found is not None
        assert (found.name, found.ranks, found.first) == (name, (rank,), 1 if rank == 0 else 0)


def audit_tp(flip):
    axis = ProcessGrid(tp=torch.distributed.get_world_size()).tp
    shard = Shard(0, (((0, 2), (3, 6)), ((3, 6),), ((1, 7),)))
    place = {"tp": axis.rank}
    slots = [
        ParameterSlot("kv", Placement((7, 5), Init("zeros"), shard), place),
        ParameterSlot("split", Placement((6,), Init("zeros"), Shard.even(0, 6, 3)), place),
        ParameterSlot("norm", Placement((4,), Init("zeros")), place),
    ]
    torch.manual_seed(0)
    held = {
        slot.name: slot.placement.take(torch.randn(slot.placement.shape), axis.rank)
        for slot in slots
    }
    if axis.rank == 2 and flip:
        flip_bit(held["kv"], 5 * 4, 3)  # row 5 of the global tensor
    replicas = replicas_along("tp", [(slot.name, held[slot.name], slot) for slot in slots])
    return list(replicas), audit_replicas(replicas, axis)


@pytest.mark.ranks
def test_rows_shared_over_tp_are_compared_among_their_holders():
    clean, flipped = run_ranks(audit_tp, 3, False), run_ranks(audit_tp, 3, True)
    assert [names for names, _ in clean] == [
        ["kv[1:2]", "kv[3:6]", "norm"],
        ["kv[3:6]", "norm"],
        ["kv[1:2]", "kv[3:6]", "norm"],
    ]
    assert all(found is None for _, found in clean)
    assert all(found == Mismatch("kv[3:6]", (2,), 0) for _, found in flipped)


def test_a_single_replica_agrees_with_itself():
    assert audit_replicas(tensors(), Axis("dp")) is None
