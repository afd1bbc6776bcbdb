"""Messages of a tensor's largest elements: every backend makes the same bytes, of every density."""

from __future__ import annotations

import pytest
import torch
from ops.places import places
from torch import Tensor

from hybridpar import ops
from hybridpar.ops.sparse import most_place_bytes, place_bytes

SIZES = (1, 7, 8, 255, 256, 4081, 200_003)
SHARES = (0.001, 0.02, 0.12, 0.13, 0.5, 1.0)
FIRST = places("sparse")


def numbers(n: int, dtype: torch.dtype) -> Tensor:
    """Numbers with zeros, equal sizes, and many large ones in a row."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=dtype)
    x[::3] = 0
    x[5:9] = -2.5
    x[n // 2 : n // 2 + 600] *= 10
    return x


@pytest.mark.parametrize(("backend", "device"), FIRST)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", SIZES)
def test_a_message_is_what_was_taken_off(
    backend: str, device: str, dtype: torch.dtype, values: torch.dtype, n: int
) -> None:
    x = numbers(n, dtype).to(device)
    passes = ops.sparse(x, backend)
    reference = ops.sparse(x, "torch")
    sizes = x.abs().sort(descending=True).values
    for share in SHARES:
        k = max(1, int(share * n))
        left = x.clone()
        threshold = passes.threshold(x, k)
        assert threshold.shape == (1,)
        assert float(threshold) == (0 if k == n else float(sizes[k - 1]) or float(threshold))
        count = min(passes.count(x, threshold), 2 * k)
        assert count == min(int((x.abs() >= threshold).sum()), 2 * k) <= n
        message = torch.empty(count, dtype=values, device=device)
        where = torch.empty(place_bytes(n, count), dtype=torch.uint8, device=device)
        assert len(where) <= most_place_bytes(n, 2 * k)
        passes.pack_(left, threshold, message, where)
        sent = torch.full_like(x, 0.5)
        more = torch.full_like(x, 0.5)
        passes.add_(sent, message, where, True)
        passes.add_(more, message, where, False)
        assert torch.equal(more, sent + 0.5)
        assert torch.equal(sent[sent != 0], message[message != 0].to(dtype))
        assert torch.equal(left, x - sent)
        same = torch.empty_like(message)
        places_ = torch.empty_like(where)
        rest = x.clone()
        reference.pack_(rest, threshold, same, places_)
        assert torch.equal(same, message)
        assert torch.equal(places_, where)
        assert torch.equal(rest, left)


@pytest.mark.parametrize(("backend", "device"), FIRST)
def test_nan_is_never_left_out(backend: str, device: str) -> None:
    x = torch.zeros(1000, device=device)
    x[717], x[400], x[3] = float("nan"), -float("inf"), 1.0
    passes = ops.sparse(x, backend)
    threshold = passes.threshold(x, 2)
    assert float(threshold) == float("inf")
    assert passes.count(x, threshold) == 2
    assert passes.count(torch.zeros_like(x), passes.threshold(torch.zeros_like(x), 5)) == 0, (
        "a zero is never sent"
    )
    values = torch.empty(2, device=device)
    where = torch.empty(place_bytes(1000, 2), dtype=torch.uint8, device=device)
    passes.pack_(x, threshold, values, where)
    total = torch.ones_like(x)
    passes.add_(total, values, where, False)
    assert total[717].isnan()
    assert total[400] == -float("inf")
    assert x[3] == 1


@pytest.mark.parametrize(("backend", "device"), FIRST)
@pytest.mark.parametrize(("n", "count"), [(1000, 10), (1000, 500)])
def test_a_damaged_message_is_refused(backend: str, device: str, n: int, count: int) -> None:
    x = torch.zeros(n, device=device)
    where = torch.full((place_bytes(n, count),), 255, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="damaged"):
        ops.sparse(x, backend).add_(x, torch.ones(count, device=device), where, False)
    with pytest.raises(RuntimeError, match=r"fewer (elements above|such elements)"):
        ops.sparse(x, backend).pack_(
            x, torch.ones(1, device=device), torch.ones(count, device=device), where
        )
