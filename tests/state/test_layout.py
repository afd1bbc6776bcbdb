from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.state.layout import FlatLayout

SHAPES = {"a": (3, 5), "b": (1,), "c": (0, 4), "d": (), "e": (17,), "f": (2, 2, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_views_are_aligned_and_disjoint(dtype):
    layout = FlatLayout(SHAPES, dtype)
    flat = layout.zeros()
    for i, (name, view) in enumerate(layout.views(flat).items()):
        assert tuple(view.shape) == SHAPES[name]
        assert view.storage_offset() * view.element_size() % 64 == 0
        assert (view == 0).all()
        view += i + 1
    assert flat.sum() == sum((i + 1) * prod(s) for i, s in enumerate(SHAPES.values()))
    assert flat.numel() == layout.numel


def test_master_and_working_copy_share_offsets():
    master = FlatLayout(SHAPES, torch.float32, torch.bfloat16)
    working = FlatLayout(SHAPES, torch.bfloat16)
    assert master.ranges == working.ranges
    assert master.numel == working.numel


def test_nothing_is_a_layout_too():
    layout = FlatLayout({}, torch.float32)
    assert layout.numel == 0
    assert layout.views(layout.zeros()) == {}
    assert layout.buckets(100) == ()


@given(
    sizes=st.lists(st.integers(0, 100), max_size=12),
    bucket_bytes=st.integers(1, 2000),
    data=st.data(),
)
def test_buckets_cover_everything_from_the_end(sizes, bucket_bytes, data):
    names = [f"p{i}" for i in range(len(sizes))]
    groups = {n: data.draw(st.integers(0, 1)) for n in names}
    layout = FlatLayout({n: (s,) for n, s in zip(names, sizes, strict=True)}, torch.float32)
    buckets = layout.buckets(bucket_bytes, groups.__getitem__)
    assert [n for b in reversed(buckets) for n in b.names] == names
    flat = torch.zeros(layout.numel)
    for bucket in buckets:
        flat[bucket.start : bucket.stop] += 1
        assert len({groups[n] for n in bucket.names}) == 1
        if bucket_bytes <= 64:
            assert sum(sizes[names.index(n)] > 0 for n in bucket.names) <= 1
    assert (flat == 1).all()
    assert all(later.stop == earlier.start for earlier, later in pairwise(buckets))
    if buckets:
        assert buckets[0].stop == layout.numel
        assert buckets[-1].start == 0


def test_joined_parts_hold_the_same_elements_and_padding():
    layout = FlatLayout({"a": (3,), "b": (0,), "c": (16, 2), "d": (7,)}, torch.float32)
    flat = layout.zeros()
    views = layout.views(flat)
    for i, view in enumerate(views.values()):
        view.fill_(i + 1)
    (whole,) = layout.joined(list(views.values()))
    assert (whole.data_ptr(), whole.numel()) == (flat.data_ptr(), layout.ranges["d"][0] + 7)
    apart = layout.joined([views["a"], views["d"]])
    assert [x.tolist() for x in apart] == [[1.0] * 3, [4.0] * 7]
    inside = layout.joined(
        [views["a"], views["b"], views["c"][:4], views["c"][5:], views["d"][:2], views["d"][3:]]
    )
    assert [x.count_nonzero().item() for x in inside] == [3 + 8, 22 + 2, 4], (
        "a gap in a parameter is no padding"
    )
    assert layout.joined([]) == layout.joined([views["b"]]) == []
