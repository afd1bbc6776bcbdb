"""The largest numbers of each row: every backend makes the reference's bytes, which depend on the
row alone."""

from __future__ import annotations

import pytest
import torch
from ops.test_quantize import DEVICES, DTYPES, numbers
from torch import Tensor

from hybridpar import ops
from hybridpar.ops.backends import registry
from hybridpar.ops.largest import places_bytes, value_bytes

SHAPES = [
    ((3, 7), 1),
    ((5, 64), 7),
    ((7, 200), 200),
    ((0, 8), 3),
    ((3, 385), 77),
    ((1, 1), 1),
    ((1, 1100), 1099),
]


def backends(device: str, dtype: torch.dtype) -> list[str]:
    return [row.name for row in registry.backends("largest") if not row.unsupported(device, dtype)]


def there_and_back(x: Tensor, k: int, rounded: bool = False, backend: str = "torch") -> Tensor:
    passes = ops.largest(x, backend)
    out = torch.full_like(x, 5)
    message = passes.largest(x, k, rounded)
    passes.spread_(
        out,
        *message.split((message.shape[1] - places_bytes(x.shape[1]), places_bytes(x.shape[1])), 1),
        rounded,
    )
    return out


def check(
    cases: list[tuple[tuple[int, int], int]], rounded: bool, dtype: torch.dtype, device: str
) -> None:
    """Assert that all backends make the reference's bytes, and its numbers of them."""
    for (shape, k), backend in ((case, name) for case in cases for name in backends(device, dtype)):
        x = (numbers(shape, torch.float32) * 4).round().to(dtype).to(device)  # many are equal
        reference = ops.largest(x, "torch")
        passes = ops.largest(x, backend)
        message = reference.largest(x, k, rounded)
        item = value_bytes(dtype, rounded)
        assert message.shape == (shape[0], k * item + places_bytes(shape[1]))
        assert torch.equal(passes.largest(x, k, rounded), message)
        assert torch.equal(there_and_back(x, k, rounded, backend), there_and_back(x, k, rounded))
        places = message[:, k * item :]
        dy = numbers(shape[::-1], dtype).t().contiguous().to(device)
        for part in (places, places.contiguous()):
            values = passes.pick(dy, part, k, rounded)
            assert torch.equal(values, reference.pick(dy, part, k, rounded))
            back = torch.full_like(dy, 5)
            passes.spread_(back, values, part, rounded)
            marked = (places.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
            expected = torch.where(marked.flatten(1)[:, : shape[1]] == 1, dy, 0)
            assert torch.equal(back, expected.to(torch.bfloat16).to(dtype) if rounded else expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_every_backend_makes_the_same_bytes_and_numbers(
    rounded: bool, dtype: torch.dtype, device: str
) -> None:
    check(SHAPES, rounded, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(dtype: torch.dtype, device: str) -> None:
    """More numbers than a 16-bit place counts."""
    check([((1, 33000), 32999)], False, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_farthest_from_zero_are_kept_and_of_equal_ones_the_first(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -3, 2, 3, -2, 2, 1, 0, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=dtype)
    for backend in backends("cpu", dtype):
        assert there_and_back(x, 4, backend=backend).tolist() == [
            [0, -3, 2, 3, -2, 0, 0, 0, 0],
            [0] * 9,
        ]
        assert torch.equal(there_and_back(x, 9, backend=backend), x), "all of them are all"
        random = numbers((9, 70), dtype)
        kept = there_and_back(random, 7, backend=backend).abs()
        assert torch.equal(kept.topk(8).values[:, :7], random.abs().topk(7).values)
        assert ((kept > 0).sum(1) == 7).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_arrive(value: float) -> None:
    for dtype in DTYPES:
        x = numbers((3, 70), dtype)
        x[1, 66] = value
        for backend in backends("cpu", dtype):
            found = there_and_back(x, 3, backend=backend)
            assert torch.equal(found[1, 66], x[1, 66]) or found[1, 66].isnan()
            assert found[[0, 2]].isfinite().all()


def test_any_number_of_threads_gives_the_same_bytes_and_rows_may_be_cut() -> None:
    x = numbers((700, 130))
    before = torch.get_num_threads()
    for backend in backends("cpu", x.dtype):
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(ops.largest(x, backend).largest(x, 13, False))
        torch.set_num_threads(before)
        parts = [ops.largest(x, backend).largest(part, 13, False) for part in x.split((1, 0, 699))]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], torch.cat(parts))


def test_places_that_are_more_than_the_values_write_nothing_beyond_them() -> None:
    x = torch.ones(2, 9)
    every = torch.full((2, 2), 255, dtype=torch.uint8)
    for backend in backends("cpu", x.dtype):
        passes = ops.largest(x, backend)
        out = torch.full_like(x, 5)
        passes.spread_(out, passes.pick(x, every, 3, False), every, False)
        assert out.tolist() == [[1.0] * 3 + [0.0] * 6] * 2
        assert passes.pick(x, every * 0, 3, False).tolist() == [[0] * 12] * 2
    with pytest.raises(ValueError, match=r"x must be \[rows, cols\]"):
        ops.largest(x[0])
