import pytest
import torch

from hybridpar.optim.newton_schulz import newton_schulz, newton_schulz_cost

SHAPES = [(1, 1), (1, 7), (5, 5), (6, 8), (8, 6), (6, 12), (24, 6), (3, 50)]


def on_singular_values(x):
    """The polynomial applied where it acts: to the singular values of x / |x|."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s.unsqueeze(-2)) @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smallest", [2, 128])
def test_is_the_polynomial_of_the_singular_values(shape, smallest, monkeypatch):
    """Wide, high and square; both ways to iterate; by blocks, of which the last may be smaller, and
    by one."""
    monkeypatch.setattr("hybridpar.optim.newton_schulz.SMALLEST", smallest)
    x = torch.randn(3, *shape, dtype=torch.float64)
    got = newton_schulz(x.clone())
    assert got.shape == x.shape
    torch.testing.assert_close(got, on_singular_values(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(32, 32), (32, 48), (32, 128), (128, 32)], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_singular_values_come_near_one(shape, spread):
    """Whatever they were, as long as they are above 0.002 of the norm; directions stay."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = (u * torch.arange(1.0, 33.0, dtype=torch.float64) ** -spread) @ vh
    got = newton_schulz(x[None].clone())[0]
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.68
    assert values.max() < 1.21
    aligned = u.T @ got @ vh.T
    torch.testing.assert_close(aligned, torch.diag(aligned.diagonal()), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("shape", [(48, 48), (48, 192), (192, 48)], ids=str)
@pytest.mark.parametrize("power", [0, 1, 2])
def test_float32_follows_float64(shape, power):
    """Even where most singular values are small; such matrices are wrong by 0.3 in bfloat16."""
    torch.manual_seed(1)
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = (u * torch.arange(1.0, 49.0, dtype=torch.float64) ** -power) @ vh
    exact = newton_schulz(x[None].clone())[0]
    got = newton_schulz(x[None].float())[0]
    assert got.dtype == torch.float32
    assert (got - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("shape", [(48, 48), (48, 192)], ids=str)
def test_bfloat16_is_near_for_ordinary_matrices(shape):
    torch.manual_seed(1)
    x = torch.randn(2, *shape)
    exact = newton_schulz(x.clone())
    got = newton_schulz(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got - exact).norm() < 0.03 * exact.norm()


def test_does_not_depend_on_scale_or_on_other_matrices_of_the_batch():
    x = torch.randn(4, 6, 9, dtype=torch.float64)
    whole = newton_schulz(x.clone())
    for i in range(4):
        torch.testing.assert_close(
            newton_schulz(1e-4 * x[i : i + 1])[0], whole[i], rtol=1e-10, atol=1e-12
        )


def test_zero_stays_zero():
    for dtype in (torch.float32, torch.float64):
        assert (newton_schulz(torch.zeros(2, 4, 6, dtype=dtype)) == 0).all()


def test_cost_knows_the_cheaper_way():
    assert newton_schulz_cost(100, 100) == 15 * 100**3
    assert newton_schulz_cost(100, 400) == newton_schulz_cost(400, 100) == 25 * 100**3
    for long in range(100, 400, 10):
        plain = 5 * (2 * 100 * 100 * long + 100**3)
        assert newton_schulz_cost(100, long) <= plain
