"""Quantization to float8 e4m3: every backend writes the bytes of the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar.ops import fp8
from hybridpar.ops.backends import registry
from hybridpar.ops.fp8 import quantize_fp8, quantize_fp8_weight_

INTERPRETED = registry.report("quantize_fp8", "cpu", torch.float32).rejected.get("triton") is None
GPU = registry.report("quantize_fp8", "cuda", torch.bfloat16).rejected.get("triton") is None
BACKENDS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
    ),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU that has fp8")],
    ),
]
SHAPES = [(1, 16), (7, 48), (300, 16), (3, 2064), (2, 16400), (5, 33)]


def draw(*shape: int) -> Tensor:
    """bfloat16 numbers whose rows have magnitudes from 1e-38 to 1e38."""
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=g) * 10.0 ** torch.empty(shape[0], 1).uniform_(
        -38, 37, generator=g
    )
    return x.bfloat16()


def on(x: Tensor, backend: str) -> Tensor:
    """Equal numbers in a type that the backend takes: Triton's interpreter takes float32."""
    if backend == "cuda":
        return x.cuda()
    return x.float() if backend == "triton" else x


def quantize(x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    made = quantize_fp8(on(x, backend), backend="torch" if backend == "torch" else "triton")
    return made[0].cpu(), made[1].cpu()


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal bytes, but for the sign of a NaN."""
    assert got.dtype == want.dtype
    a = got.float()
    b = want.float()
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_rows_are_those_of_the_formula(shape: tuple[int, int], backend: str) -> None:
    x = draw(*shape)
    codes, scale = quantize(x, backend)
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30)
    factor = (448 / largest).bfloat16()
    assert torch.equal(scale, 1 / factor.float())
    assert_same(codes, (x * factor).to(torch.float8_e4m3fn))
    error = (codes.double() * scale.double() - x.double()).abs() / largest.double()
    assert error.max() <= 16 / 448 + 2**-8  # half a step of e4m3 below 448, and of bfloat16 before


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_of_every_bfloat16_number(backend: str) -> None:
    """In rows whose largest number is 1, 448 and 1000, so that all codes and ties come."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for largest in (1.0, 448.0, 1000.0):
        row = torch.cat((x[x.abs() <= largest], torch.full((16,), largest).bfloat16()))[None]
        got = quantize(row, backend)
        want = fp8.Passes.quantize_fp8(row)
        assert_same(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert len(got[0].view(torch.uint8).unique()) > 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_of_zeros_and_of_what_is_not_finite(backend: str) -> None:
    x = draw(5, 48)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, torch.inf, torch.nan, -torch.inf
    got = quantize(x, backend)
    want = fp8.Passes.quantize_fp8(x)
    for made, expected in zip(got, want, strict=True):
        assert_same(made, expected)
    assert not (got[0].float() * got[1])[1:4].isfinite().any(1).all()
    assert torch.equal(got[0][0].float(), torch.zeros(48))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(16, 16), (48, 272), (272, 144), (128, 128)], ids=str)
def test_fp8_weight_is_quantized_by_rows_and_by_columns(
    shape: tuple[int, int], backend: str
) -> None:
    weight = draw(*shape)
    weight[3], weight[:, 5] = 0, 0
    o, i = shape
    placed = on(weight, backend)
    made = [
        torch.full(s, 3.0, device=placed.device).to(t)
        for s, t in (
            ((o, i), fp8.FP8),
            ((o, 1), torch.float32),
            ((i, o), fp8.FP8),
            ((i, 1), torch.float32),
        )
    ]
    quantize_fp8_weight_(placed, *made, backend="torch" if backend == "torch" else "triton")
    rows = quantize(weight, "torch")
    columns = quantize(weight.t(), "torch")
    for got, want in zip(made, (*rows, *columns), strict=True):
        assert_same(got.cpu(), want)


def test_fp8_shapes_are_checked() -> None:
    x = draw(16, 32)
    with pytest.raises(ValueError, match="x must be"):
        quantize_fp8(x[0])
    codes, scale = quantize_fp8(x)
    with pytest.raises(ValueError, match="do not match weight"):
        quantize_fp8_weight_(x, codes, scale, codes, scale)
