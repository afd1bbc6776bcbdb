"""Operators of generation against plain torch, and texts that do not depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar import native
from hybridpar.ops import few_rows_linear, next_token_attention
from hybridpar.ops.generation import MOST_ROWS, NextToken
from hybridpar.ops.rotary import Frequencies
from hybridpar.ops.split_qkv import RotarySettings

needs_native = pytest.mark.skipif(bool(native.missing()), reason="the extension is not built")
TYPES = [(torch.float64, 1e-13), (torch.float32, 1e-5)]


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (7, 5), (16, 4), (33, 70), (256, 103)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_few_rows(
    inputs: int, outputs: int, biased: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Products of 1 to 16 rows are right in any number of threads. A row's bits are those of the row alone."""
    weight = normal(outputs, inputs, dtype=dtype)
    bias = normal(outputs, dtype=dtype) if biased else None
    for rows in (1, 2, 3, 4, 7, MOST_ROWS):
        x = normal(rows, 1, inputs, dtype=dtype)
        found = few_rows_linear(x, weight, bias, backend="cpp")
        exact = few_rows_linear(x, weight, bias, backend="torch")
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=10 * tolerance)
        for row in range(rows):
            alone = few_rows_linear(x[row : row + 1], weight, bias, backend="cpp")
            assert torch.equal(alone, found[row : row + 1])
    many = normal(MOST_ROWS + 1, 1, inputs, dtype=dtype)
    assert few_rows_linear(many, weight, bias).shape == (MOST_ROWS + 1, 1, outputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    large = normal(4096, inputs, dtype=dtype)
    split = few_rows_linear(x, large, backend="cpp")
    torch.set_num_threads(1)
    assert torch.equal(split, few_rows_linear(x, large, backend="cpp"))
    torch.set_num_threads(threads)


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("groups", [(1, 1, 1), (3, 3), (2, 3, 1), (4,)], ids=str)
@pytest.mark.parametrize("d", [1, 6, 33, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5, "features": 1.0},
        {"softcap": 1.5, "features": 0.5},
        {"window": 1, "softcap": 0.3, "scaled": True, "features": 1.0},
    ],
    ids=str,
)
def test_attention_of_a_next_token(
    groups: tuple[int, ...],
    d: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """At one position of all texts, and at a position of each, with its key and value kept."""
    features = int(d * options.get("features", 0.0)) // 2 * 2
    turn = RotarySettings(100.0, features, "torch") if features else None
    if turn is not None and "scaled" in options:
        values = tuple(0.3 / (pair + 1) for pair in range(features // 2))
        turn = turn._replace(frequencies=Frequencies(values, 1.3))
    how = NextToken(groups, options.get("window", 0), 0.4, options.get("softcap", 0.0), turn)
    texts = 3
    qkv = normal(texts, 1, (sum(groups) + 2 * len(groups)) * d, dtype=dtype)
    keys = normal(texts, len(groups), 23, d, dtype=dtype)
    values = keys.flip(2).contiguous()
    for positions in (torch.tensor([22]), torch.tensor([[0], [7], [21]])):
        kept = [(keys.clone(), values.clone()) for _ in range(3)]
        found = next_token_attention(qkv, *kept[0], positions, how, backend="cpp")
        exact = next_token_attention(qkv, *kept[1], positions, how, backend="torch")
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=10 * tolerance)
        torch.testing.assert_close(kept[0], kept[1], rtol=tolerance, atol=10 * tolerance)
        one = [x[1:2].contiguous() for x in kept[2]]
        alone = next_token_attention(qkv[1:2], *one, positions[-2:][:1], how, backend="cpp")
        assert torch.equal(alone, found[1:2])


@needs_native
def test_misfits_are_refused() -> None:
    how = NextToken((1,), 0, 1.0, 0.0, None)
    qkv, kept = torch.zeros(1, 1, 6), torch.zeros(1, 1, 4, 2)
    for position, text in ((4, "position 4 is not within the capacity of 4"), (-1, "position -1")):
        with pytest.raises(RuntimeError, match=text):
            next_token_attention(qkv, kept, kept.clone(), torch.tensor([position]), how)
    with pytest.raises(RuntimeError, match="must have rows for each head"):
        next_token_attention(qkv[..., :4], kept, kept.clone(), torch.tensor([0]), how)
    with pytest.raises(RuntimeError, match="weight must be"):
        torch.ops.hybridpar.few_rows_linear(torch.zeros(1, 3), torch.zeros(4, 2), None)


@needs_native
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (31, 5), (32, 4), (95, 70), (256, 103)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_few_rows_in_bfloat16_are_rounded_once(
    inputs: int, outputs: int, biased: bool
) -> None:
    weight = normal(outputs, inputs, dtype=torch.bfloat16)
    bias = normal(outputs, dtype=torch.bfloat16) if biased else None
    for rows in (1, 2, 3, MOST_ROWS):
        x = normal(rows, 1, inputs, dtype=torch.bfloat16)
        found = few_rows_linear(x, weight, bias, backend="cpp")
        exact = few_rows_linear(
            x.double(), weight.double(), None if bias is None else bias.double(), backend="torch"
        )
        assert found.dtype == torch.bfloat16
        # half a unit in the last of 8 bits; sums of float32 are a little off where terms cancel
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
        for row in range(rows):
            alone = few_rows_linear(x[row : row + 1], weight, bias, backend="cpp")
            assert torch.equal(alone, found[row : row + 1])


@needs_native
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 1.5}], ids=str)
def test_attention_of_a_next_token_in_bfloat16(options: dict[str, Any]) -> None:
    """The result in float64, with the kept key and value and the output rounded to 8 bits."""
    texts = 3
    groups = (2, 3)
    d = 34
    turn = RotarySettings(100.0, 20, "torch")
    how = NextToken(groups, options.get("window", 0), 0.4, options.get("softcap", 0.0), turn)
    qkv = normal(texts, 1, (sum(groups) + 2 * len(groups)) * d, dtype=torch.bfloat16)
    keys = normal(texts, len(groups), 23, d, dtype=torch.bfloat16)
    values = keys.flip(2).contiguous()
    for positions in (torch.tensor([22]), torch.tensor([[0], [7], [21]])):
        kept = keys.clone(), values.clone()
        found = next_token_attention(qkv, *kept, positions, how, backend="cpp")
        wide = keys.double(), values.double()
        exact = next_token_attention(qkv.double(), *wide, positions, how, backend="torch")
        assert found.dtype == torch.bfloat16
        for one, other in zip(kept, wide, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
