"""Normalisation, activations and rotary positions, against their formulas in float64."""

import math

import pytest
import torch

from hybridpar import ops
from hybridpar.ops.activation import gelu_exact
from hybridpar.ops.norm import NormWeights

X = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
W, B = torch.linspace(0.5, 2, 7, dtype=torch.float64), torch.linspace(-1, 1, 7, dtype=torch.float64)


def test_layer_norm():
    mean = X.mean(-1, keepdim=True)
    expected = (X - mean) / ((X - mean).square().mean(-1, keepdim=True) + 0.1).sqrt() * W + B
    torch.testing.assert_close(ops.layer_norm(X, W, B, 0.1), expected)


def test_rms_norm():
    torch.testing.assert_close(
        ops.rms_norm(X, W, 0.1), X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * W
    )


def test_gelu_is_the_tanh_form():
    expected = 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    torch.testing.assert_close(ops.gelu(X), expected)
    torch.testing.assert_close(ops.gelu(X - B, B), expected)
    assert (ops.gelu(X) - torch.nn.functional.gelu(X)).abs().max() > 1e-6  # not the exact form


def test_gelu_exact_is_by_the_error_function():
    expected = 0.5 * X * (1 + torch.erf(X / math.sqrt(2)))
    torch.testing.assert_close(gelu_exact(X), expected)
    torch.testing.assert_close(gelu_exact(X - B, B), expected)
    with pytest.raises(
        ValueError, match=r"bias must have the last size of x \(3, 5, 7\), got \(3,\)"
    ):
        gelu_exact(X, B[:3])


def test_swiglu():
    packed = torch.cat((X, 2 * X), -1)
    bias = torch.cat((B, -B))
    torch.testing.assert_close(ops.swiglu(packed), X / (1 + torch.exp(-X)) * (2 * X))
    gate = X + B
    torch.testing.assert_close(
        ops.swiglu(packed, bias), gate / (1 + torch.exp(-gate)) * (2 * X - B)
    )


def turned(x, base, positions):
    """Rotation of pairs, as complex numbers."""
    b, _, s, d = x.shape
    frequency = base ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle = positions.expand(b, s).double()[:, None, :, None] * frequency
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((z.real, z.imag), -1)


def test_rotary():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(ops.rotary(x), turned(x, 10000.0, torch.arange(5)))
    torch.testing.assert_close(
        ops.rotary(x, 500.0, offset=100_000), turned(x, 500.0, torch.arange(5) + 100_000)
    )
    each = torch.tensor([[0, 1, 2, 0, 1], [5, 4, 3, 2, 1]])
    torch.testing.assert_close(ops.rotary(x, positions=each), turned(x, 10000.0, each))
    torch.testing.assert_close(ops.rotary(x, positions=each[1]), turned(x, 10000.0, each[1]))
    assert torch.autograd.gradcheck(ops.rotary, x)


def test_rotary_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [(ops.rotary(q, offset=a) * ops.rotary(k, offset=a - 7)).sum() for a in (7, 50, 3000)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_the_rounded_result(dtype):
    x, w, b = (t.to(dtype) for t in (X, W, B))
    wide = [t.double() for t in (x, w, b)]
    y = x[..., :6].unsqueeze(1)
    pairs = {
        "layer_norm": (ops.layer_norm(x, w, b), ops.layer_norm(*wide)),
        "rms_norm": (ops.rms_norm(x, w), ops.rms_norm(*wide[:2])),
        "gelu": (ops.gelu(x), ops.gelu(wide[0])),
        "swiglu": (ops.swiglu(x[..., :6]), ops.swiglu(wide[0][..., :6])),
        "rotary": (ops.rotary(y, offset=4000), ops.rotary(y.double(), offset=4000)),
    }
    for name, (got, exact) in pairs.items():
        assert got.dtype == dtype, name
        # two roundings, of the size of the largest element that goes into a sum
        assert (got.double() - exact).abs().max() <= 2 * torch.finfo(
            dtype
        ).eps * exact.abs().max(), name


def test_bad_shapes():
    for function in (
        lambda: ops.layer_norm(X, W[:6], B),
        lambda: ops.layer_norm(X, W, B[:1]),
        lambda: ops.rms_norm(X, W[:, None]),
    ):
        with pytest.raises(ValueError, match="must have the last size"):
            function()
    with pytest.raises(ValueError, match="must be even"):
        ops.swiglu(X)
    for function in (
        lambda: ops.gelu(X, B[:3]),
        lambda: ops.swiglu(X[..., :6], B),
        lambda: ops.bias_dropout_add(X, X, B[1:]),
    ):
        with pytest.raises(ValueError, match="bias must have the last size"):
            function()
    norm = NormWeights(W, B)
    for function in (lambda: ops.add_norm(X, X[:1], norm), lambda: ops.bias_dropout_add(X, X[0])):
        with pytest.raises(ValueError, match="same shape"):
            function()
    with pytest.raises(ValueError, match="d even"):
        ops.rotary(X[None])
    with pytest.raises(ValueError, match="d even"):
        ops.rotary(X[..., :6])
    with pytest.raises(ValueError, match="positions must be"):
        ops.rotary(X[None, ..., :6], positions=torch.arange(4))
