import pytest
import torch
from optim.cases import placements, slots

from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.optim import ParameterSlot


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_counted_rows_are_those_the_placement_says_are_owned(parts):
    for rank in range(parts):
        for slot in slots(parts, rank):
            marked = torch.zeros(slot.shape)
            for part in slot.counted_parts(marked):
                part += 1
            shard = slot.placement.shard
            if shard is None:
                assert (marked == float(rank == 0)).all()
            else:
                owned = shard.owned(rank, slot.placement.shape[shard.dim])
                assert torch.equal(
                    marked.movedim(shard.dim, 0)[:, ...] == 1,
                    owned.view(-1, *[1] * (marked.dim() - 1)).expand_as(
                        marked.movedim(shard.dim, 0)
                    ),
                )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_elementwise_parts_cover_the_tensor_once(parts):
    for rank in range(parts):
        for slot in slots(parts, rank):
            x = torch.zeros(slot.shape)
            for part in slot.elementwise_parts(x):
                assert part.is_contiguous()
                part += 1
            assert (x == 1).all()


def test_shared_rows_are_parts_of_equal_extent_on_every_holder():
    shard = Shard(0, (((0, 4), (6, 8)), ((2, 7),), ((3, 5), (2, 3))))
    extents = {}
    for rank in range(3):
        slot = ParameterSlot("x", Placement((8,), Init("zeros"), shard), {"tp": rank})
        index = shard.index(rank)
        for start, stop in slot.segments:
            extents.setdefault(int(index[start]), set()).add(stop - start)
    assert all(len(e) == 1 for e in extents.values()), extents


def test_nothing_is_cut_where_nothing_is_shared():
    for slot in slots(3, 1):
        if slot.name not in ("kv", "kv_bias"):
            assert len(slot.segments) == 1
    assert placements(3)["kv"].shared_index().tolist() == [1, 3, 4, 5]
