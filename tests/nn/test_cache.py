"""Keys and values that are kept: a text computed piece by piece is the text computed at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.grid import Axis
from hybridpar.nn import KeyValueCache, ParallelAttention
from hybridpar.nn.attention import AttentionMetadata

LENGTH = 9


def make(
    heads: int, kv_heads: int, rotary_base: float | None, window: int | None
) -> ParallelAttention:
    torch.manual_seed(0)
    layer = ParallelAttention(
        heads * 4,
        heads,
        Axis("tp"),
        num_kv_heads=kv_heads,
        rotary_base=rotary_base,
        window=window,
        dtype=torch.float64,
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rotary_base", "window"),
    [
        (4, 4, None, None),
        (4, 2, 100.0, None),
        (3, 1, 100.0, None),
        (4, 2, 100.0, 3),
        (3, 3, None, 1),
    ],
)
@pytest.mark.parametrize("first", [1, 4])
def test_piece_by_piece_is_at_once(
    heads: int, kv_heads: int, rotary_base: float | None, window: int | None, first: int
) -> None:
    layer = make(heads, kv_heads, rotary_base, window)
    x = torch.randn(2, LENGTH, heads * 4, dtype=torch.float64)
    cache = KeyValueCache(LENGTH)
    at = torch.arange(LENGTH)
    parts = []
    for start, stop in ((0, first), *((i, i + 1) for i in range(first, 7)), (7, LENGTH)):
        parts.append(
            layer.without_bias(
                x[:, start:stop], AttentionMetadata(positions=at[start:stop]), None, cache
            )[0]
        )
    torch.testing.assert_close(
        torch.cat(parts, 1), layer.without_bias(x)[0], rtol=1e-12, atol=1e-12
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rotary_base", "window"),
    [(4, 4, None, None), (4, 2, 100.0, None), (4, 2, 100.0, 2)],
)
def test_texts_of_several_lengths(
    heads: int, kv_heads: int, rotary_base: float | None, window: int | None
) -> None:
    """Padded behind at first; then each goes on where it ends, one begins anew, one is
    forgotten."""
    layer, x = (
        make(heads, kv_heads, rotary_base, window),
        torch.randn(3, LENGTH, heads * 4, dtype=torch.float64),
    )
    cache, lengths, texts = KeyValueCache(LENGTH), torch.tensor([2, 5, 3]), [0, 1, 2]
    layer.without_bias(x[:, :5], AttentionMetadata(positions=torch.arange(5)), None, cache)

    def go_on() -> None:
        at = lengths[texts][:, None]
        rows = torch.tensor(texts)
        real = torch.arange(int(at.max()) + 1) <= at
        tokens = AttentionMetadata(real, positions=at)
        made, _ = layer.without_bias(x[rows[:, None], at], tokens, None, cache)
        for row, text in zip(made, texts, strict=True):
            length = int(lengths[text]) + 1
            whole, _ = layer.without_bias(x[text : text + 1, :length])
            torch.testing.assert_close(row[-1], whole[0, -1], rtol=1e-12, atol=1e-12)
            lengths[text] = length

    go_on()
    fresh = KeyValueCache(LENGTH)
    layer.without_bias(x[1:2, :1], AttentionMetadata(positions=torch.arange(1)), None, fresh)
    cache.replace([1], fresh)
    lengths[1] = 1
    go_on()
    cache.keep([0, 2])
    texts = [0, 2]
    go_on()
