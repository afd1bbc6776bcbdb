"""Tiles of integers: every backend makes the reference's bytes, errors keep to a tile's step, odd
values are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar import ops
from hybridpar.errors import ConfigError
from hybridpar.ops.backends import registry
from hybridpar.ops.quantize import TILE, dequantize_, quantized_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 7), (5, 64), (7, 200), (0, 8), (40, 385), (1, 1)]
FORMS = [(8, False), (4, False), (4, True), (8, True)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        ],
    ),
]


def backends(device: str, dtype: torch.dtype) -> list[str]:
    """The backends that run here, besides the reference."""
    rows = registry.backends("quantize")
    found = [row.name for row in rows if row.name != "torch" and not row.unsupported(device, dtype)]
    if not found:
        pytest.skip("only the reference runs here")
    return found


def numbers(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, some of them outliers."""
    g = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return (x * torch.randn(shape, generator=g, dtype=torch.float64).exp()).to(dtype)


def there_and_back(x: Tensor, bits: int, rotate: bool, backend: str = "torch") -> Tensor:
    message = ops.quantize(x, bits, rotate=rotate, backend=backend)
    return dequantize_(torch.empty_like(x), message, bits, rotate=rotate, backend=backend)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "rotate"), FORMS)
def test_every_backend_makes_the_same_bytes_and_numbers(bits, rotate, dtype, device):
    for backend in backends(device, dtype):
        for shape in SHAPES:
            x = numbers(shape, dtype).to(device)
            expected = ops.quantize(x, bits, rotate=rotate, backend="torch")
            assert expected.shape == (shape[0], quantized_bytes(shape[1], bits))
            assert torch.equal(ops.quantize(x, bits, rotate=rotate, backend=backend), expected)
            found = there_and_back(x, bits, rotate, backend)
            assert torch.equal(found, there_and_back(x, bits, rotate))


@pytest.mark.parametrize(("bits", "rotate"), FORMS)
def test_errors_are_within_half_a_step_of_the_tile(bits, rotate):
    """Rotated: an error of half a step in each of the 64 turned numbers, of which the orthonormal
    scale is 1 / 8."""
    x = numbers((9, 3 * TILE), torch.float64)
    error = (there_and_back(x, bits, rotate) - x).view(9, 3, TILE)
    tiles = x.view(9, 3, TILE)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        hadamard = torch.kron(
            hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        )
    turned, error = (tiles @ hadamard / 8, error @ hadamard / 8) if rotate else (tiles, error)
    step = turned.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert (error.abs() <= step * (0.5 + 2**-7)).all(), "a bfloat16 scale is up to 2^-7 coarser"
    assert (error.abs() > step / 4).any(), "and numbers are rounded"


def test_a_rotation_spreads_an_outlier():
    x = numbers((1, TILE))
    x[0, 5] = 1000.0
    plain, rotated = ((there_and_back(x, 4, rotate) - x)[0].abs() for rotate in (False, True))
    assert (plain[:5] == x[0, :5].abs()).all(), "the others are lost"
    assert rotated[:5].max() < 40, "four hundredths of the outlier"


def test_ties_go_to_the_even_code_and_the_largest_number_stays():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]])
    assert there_and_back(x, 8, False).tolist() == [
        [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -127.0, 126.0]
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize(("bits", "rotate"), FORMS)
def test_a_tile_that_cannot_be_told_is_nan_and_no_other(value, bits, rotate):
    x = numbers((3, 2 * TILE), torch.float64)
    clean = there_and_back(x, bits, rotate)
    x[1, 3] = value
    for backend in ["torch", *backends("cpu", torch.float64)]:
        found = there_and_back(x, bits, rotate, backend)
        assert found[1, :TILE].isnan().all()
        found[1, :TILE] = clean[1, :TILE]
        assert torch.equal(found, clean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_zeros_and_very_small_numbers_come_back_as_zeros(dtype):
    x = torch.zeros(2, 70, dtype=dtype)
    x[1, 3] = 2.0**-101
    for backend in ["torch", *backends("cpu", dtype)]:
        assert not there_and_back(x, 4, True, backend)[0].any()
        assert not there_and_back(x, 8, False, backend).any()


def test_any_number_of_threads_gives_the_same_bytes():
    x = numbers((700, 130))
    before = torch.get_num_threads()
    for backend in backends("cpu", x.dtype):
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ops.quantize(x, 4, rotate=True, backend=backend))
        torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_rows_may_be_cut_anywhere_and_strides_do_not_matter():
    x = numbers((11, 100))
    whole = ops.quantize(x, 4, rotate=True)
    assert torch.equal(
        torch.cat([ops.quantize(part, 4, rotate=True) for part in x.split((4, 0, 7))]), whole
    )
    assert torch.equal(ops.quantize(x.t().contiguous().t(), 4, rotate=True), whole)


def test_misfits_are_refused():
    x = numbers((2, 70))
    with pytest.raises(ConfigError, match="bits = 5: must be 4 or 8"):
        ops.quantize(x, 5)
    with pytest.raises(ValueError, match=r"x must be \[rows, cols\]"):
        ops.quantize(x[0], 8)
    with pytest.raises(ValueError, match="message must be 264 bytes"):
        dequantize_(x, torch.zeros(2, 131, dtype=torch.uint8), 8)
