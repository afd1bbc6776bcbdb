"""A rank's part of an activation, and how the ranks behind the link put it together."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from ranks import run_ranks

from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn.placement import split_sizes
from hybridpar.runtime.stage_transport import StageTransport

CPU = torch.device("cpu")


def lane(slicing: Axis | None, shape: tuple[int, ...] = (2, 3, 4)) -> StageTransport:
    return StageTransport(Axis("pp"), Axis("pp_reverse"), shape, torch.float32, CPU, slicing)


@pytest.mark.parametrize("slicing", [None, Axis("tp")])
def test_alone_nothing_is_copied(slicing: Axis | None) -> None:
    alone = lane(slicing)
    x = torch.rand(2, 3, 4)
    assert alone.cut(x) is x
    assert alone.join(x) is x
    assert alone.room().shape == alone.whole().shape == x.shape


@pytest.mark.ranks
@pytest.mark.parametrize("t", [2, 3])
def test_slices_make_up_the_whole(t: int) -> None:
    run_ranks(_slices, t)


def _slices(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> None:
    tp = ProcessGrid(tp=torch.distributed.get_world_size()).tp
    for shape in ((2, 3, 4), (1, 11, 7), (1, 5, 5), (1, 1, 1)):
        for dtype in dtypes:
            sliced = replace(lane(tp, shape), dtype=dtype)
            sizes = split_sizes(prod(shape), tp.size)
            x = (
                torch.arange(prod(shape))
                .to(dtype)
                .view(shape[1], shape[0], shape[2])
                .transpose(0, 1)
            )
            assert x.is_contiguous() == (shape[0] == 1)
            part = sliced.cut(x)
            room = sliced.room()
            assert part.shape == room.shape == (sizes[tp.rank],)
            assert part.dtype == room.dtype == dtype
            assert part.untyped_storage().nbytes() == part.nbytes, "of the whole nothing is kept"
            tp.traffic.clear()
            whole = sliced.join(part)
            assert torch.equal(whole, x)
            assert whole.shape == sliced.whole().shape == shape
            assert (tp.traffic.calls, tp.traffic.num_bytes) == (
                {"all_gather": 1},
                {"all_gather": part.nbytes},
            )
