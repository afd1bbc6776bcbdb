"""Attention whose queries have first keys (packed documents), windows, positions of their own."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from hybridpar import native, random
from hybridpar.ops import attention, dropout, masked_attention
from hybridpar.ops.attention import AttentionMask, AttentionOptions
from hybridpar.ops.dropout import DropoutSpec
from hybridpar.random import RandomKey

KEY, SITE = RandomKey.of(5, 6, 70), random.site("test.attention")
BACKENDS = [
    "torch",
    pytest.param(
        "cpp", marks=pytest.mark.skipif(native.missing() is not None, reason="needs hybridpar._C")
    ),
]
LENGTHS = (1, 40, 1, 1, 33, 129, 64, 6)
"""Lengths of documents: alone, below, above and on the borders of the kernels' blocks."""
SIZE = sum(LENGTHS)


def starts_of(*lengths: int) -> Tensor:
    """Return the start of the document of each token. Shapes: int32 [sum of lengths]."""
    starts = []
    for length in lengths:
        starts += [len(starts)] * length
    return torch.tensor(starts, dtype=torch.int32)


def heads(b: int, n: int, n_kv: int, s: int, d: int, dtype=torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(s)
    shapes = [(b, m, s, d) for m in (n, n_kv, n_kv)]
    return [
        torch.randn(x, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes
    ]


def visible_by_rule(
    first: Tensor, positions: Tensor, keys: int, window: int | None, real: Tensor | None
) -> Tensor:
    """Return which keys each query sees, from the rule and one query at a time."""
    b, queries = first.shape
    visible = torch.zeros(b, 1, queries, keys, dtype=torch.bool)
    for i, r in product(range(b), range(queries)):
        at = int(positions[r])
        low = max(int(first[i, r]), 0 if window is None else at - window + 1)
        visible[i, 0, r, low : at + 1] = True if real is None else real[i, low : at + 1]
    return visible


def by_full_matrix(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, keep: Tensor) -> Tensor:
    m = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(m, 1)
    v = v.repeat_interleave(m, 1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) * keep @ v


def agree(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("packed", "window", "chosen", "padded", "p"),
    [
        (True, None, False, False, 0.0),
        (True, None, False, False, 0.3),
        (False, 37, False, False, 0.0),
        (False, 1, False, False, 0.0),
        (False, SIZE + 5, False, False, 0.0),
        (True, 37, False, True, 0.3),
        (False, None, True, False, 0.3),
        (True, 50, True, True, 0.3),
    ],
)
def test_against_the_full_matrix(backend, packed, window, chosen, padded, p):
    """Outputs and gradients; `chosen` takes queries from two places of the sequence."""
    q, k, v = heads(2, 4, 2, SIZE, 6)
    positions = torch.arange(SIZE, dtype=torch.int32)
    if chosen:
        positions = torch.cat([positions[3:50], positions[200:262]])
    first = torch.stack([starts_of(*LENGTHS), starts_of(*reversed(LENGTHS))])
    if not packed:
        first = torch.zeros_like(first)
    first = first[:, positions.long()]
    real = torch.arange(2 * SIZE).view(2, SIZE) % 5 != 1 if padded else None
    picked = q.detach()[:, :, positions.long()].requires_grad_()
    out = masked_attention(
        picked,
        k,
        v,
        AttentionMask(
            True,
            padding_mask=real,
            window=window,
            first_key=first if packed else None,
            positions=positions if chosen else None,
        ),
        AttentionOptions(dropout=DropoutSpec(p, KEY, SITE), head_start=3),
        backend=backend,
    )
    everywhere = torch.ones(2, 4, SIZE, SIZE, dtype=torch.float64)
    spec = DropoutSpec(p, KEY, SITE, inner_start=3 * SIZE * SIZE)
    keep = dropout(everywhere, spec)[:, :, positions.long()]
    visible = visible_by_rule(first, positions, SIZE, window, real)
    expected = by_full_matrix(picked, k, v, visible, keep)
    seed = torch.randn_like(out)
    inputs = (picked, k, v)
    agree((out,), (expected,))
    agree(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected.where(visible.any(-1, True), 0.0), inputs, seed),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_document_changes_no_bit(backend, dtype):
    """Neither of an output nor of a gradient, whatever that document holds."""
    lengths = (45, 90, 7, 58)
    first = starts_of(*lengths)[None]
    stop = sum(lengths[:2])
    inside = slice(lengths[0], stop)
    results = []
    for factor in (1.0, -50.0):
        tensors = heads(1, 3, 1, sum(lengths), 16, dtype)
        with torch.no_grad():
            for x in tensors:
                x[:, :, : lengths[0]] *= factor
                x[:, :, stop:] *= factor
        out = masked_attention(*tensors, AttentionMask(True, first_key=first), backend=backend)
        seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
        grads = torch.autograd.grad(out, tensors, seed)
        results.append([x[:, :, inside] for x in (out, *grads)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_documents_alone(backend):
    q, k, v = heads(1, 4, 2, SIZE, 8)
    out = masked_attention(
        q, k, v, AttentionMask(True, first_key=starts_of(*LENGTHS)[None]), backend=backend
    )
    parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
    alone = [attention(*part, causal=True, backend=backend) for part in zip(*parts, strict=True)]
    torch.testing.assert_close(out, torch.cat(alone, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.skipif(native.missing() is not None, reason="needs hybridpar._C")
def test_one_document_has_the_bits_of_plain_attention(dtype):
    """So has a window that hides nothing, and a position for each query."""
    s = 150
    limits = [
        {},
        {"first_key": torch.zeros(2, s, dtype=torch.int32)},
        {"window": s},
        {"positions": torch.arange(s, dtype=torch.int32)},
    ]
    results = []
    for limit in limits:
        tensors = heads(2, 3, 3, s, 24, dtype)
        options = AttentionOptions(dropout=DropoutSpec(0.2, KEY, SITE))
        out = masked_attention(*tensors, AttentionMask(True, **limit), options, backend="cpp")
        results.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_see_no_key_are_zero(backend):
    """Their first key is behind them, as padding at the end of a row has it."""
    q, k, v = heads(1, 2, 2, 70, 8)
    first = torch.zeros(1, 70, dtype=torch.int32)
    first[:, 41:] = 70
    out = masked_attention(q, k, v, AttentionMask(True, first_key=first), backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for x in (out, *grads):
        assert (x[:, :, 41:] == 0).all()
        assert x.isfinite().all()
    whole = attention(*(x[:, :, :41] for x in (q, k, v)), causal=True, backend=backend)
    torch.testing.assert_close(out[:, :, :41], whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_windows_of_the_last_queries(queries):
    """Generation asks for them, without positions."""
    q, k, v = heads(2, 4, 2, 23, 6)
    whole = attention(q, k, v, causal=True, window=6)
    out = attention(q[:, :, -queries:], k, v, causal=True, window=6)
    torch.testing.assert_close(out, whole[:, :, -queries:], rtol=1e-12, atol=1e-13)


def test_limits_that_cannot_be():
    q, k, v = heads(2, 2, 2, 5, 4)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        attention(q, k, v, causal=True, window=0)
    with pytest.raises(ValueError, match="require causal = True"):
        attention(q, k, v, causal=False, window=3)
    with pytest.raises(ValueError, match=r"first_key must be int32 \[2, 5\], got torch.int64"):
        masked_attention(
            q, k, v, AttentionMask(True, first_key=torch.zeros(2, 5, dtype=torch.int64))
        )
    with pytest.raises(ValueError, match=r"positions must be int32 \[5\], got torch.int32 \(4,\)"):
        masked_attention(q, k, v, AttentionMask(True, positions=torch.zeros(4, dtype=torch.int32)))
