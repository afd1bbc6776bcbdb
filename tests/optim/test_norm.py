import math

import pytest
import torch
from optim.cases import local, random_tensors, slots

from hybridpar.nn.placement import Init, Placement
from hybridpar.optim import ParameterSlot, clip_scale
from hybridpar.optim.norm import counted, sums_of_squares


def squared_norm(gradients, slots):
    return sums_of_squares(counted(gradients, slots)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_sum_over_the_grid_counts_every_element_once(parts, dp, dtype):
    """Two stages hold the tied embedding, the second nothing else; every tp and dp rank
    contributes."""
    full = [x.to(dtype) for x in random_tensors(1)]
    total = torch.zeros((), dtype=torch.float64)
    for dp_rank in range(dp):
        for rank in range(parts):
            gradients = local(full, parts, rank)
            total += squared_norm(gradients, slots(parts, rank, dp=dp_rank, pp=0))
            total += squared_norm(gradients[:1], slots(parts, rank, dp=dp_rank, pp=1)[:1])
    wanted = sum(x.double().square().sum() for x in full)
    assert total.dtype == torch.float64
    torch.testing.assert_close(
        total, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0.0
    )


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 5000, 300_000])
def test_large_float32_gradients_lose_nothing(numel):
    slot = ParameterSlot("w", Placement((numel,), Init("zeros")))
    for gradient in (torch.randn(numel), torch.full((numel,), 0.1)):
        wanted = gradient.double().square().sum()
        torch.testing.assert_close(squared_norm([gradient], [slot]), wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inf_and_nan_propagate(bad):
    slot = ParameterSlot("w", Placement((3000,), Init("zeros")))
    gradient = torch.ones(3000)
    gradient[1500] = bad
    assert not squared_norm([gradient], [slot]).isfinite()


def test_a_stage_without_parameters_contributes_zero():
    assert squared_norm([], []) == 0.0


def test_clip_scale():
    assert clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(1.0, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(4.0, 0.0) == 1.0  # off
    with pytest.raises(AssertionError):
        clip_scale(math.nan, 1.0)
