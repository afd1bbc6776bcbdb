"""bfloat16 in C++ is float32 rounded once, to the bit: also where a CPU rounds by an instruction
that makes something else of NaN and subnormals, and on the last few columns of a row."""

import pytest
import torch
from torch import Tensor

from hybridpar import ops

AWKWARD = [
    0.0,
    -0.0,
    1e-39,
    -1e-39,
    9.2e-41,
    1.2e-38,
    float("nan"),
    float("inf"),
    -float("inf"),
    3.3e38,
    -3.3e38,
    88.5,
    -104.0,
]
SHAPES = [(3, 1), (2, 15), (5, 16), (1, 31), (4, 33), (3, 130), (7, 2081)]


def numbers(*shape: int, seed: int, awkward: bool) -> Tensor:
    x = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if awkward:
        x.view(-1)[seed % 3 :: 4] = torch.tensor(AWKWARD).repeat(x.numel())[
            : len(x.view(-1)[seed % 3 :: 4])
        ]
    return x.bfloat16()


def same(got: Tensor, exact: Tensor) -> bool:
    want = exact.bfloat16()
    bits = (x.where(~x.isnan(), 0).view(torch.int16) for x in (got, want))
    return torch.equal(*bits) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("awkward", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["gelu", "swiglu"])
def test_activations(op, shape, with_bias, awkward):
    rows, cols = shape
    width = 2 * cols if op == "swiglu" else cols
    tensors = [
        numbers(rows, width, seed=1, awkward=awkward),
        *([numbers(width, seed=2, awkward=False)] * with_bias),
    ]
    dy = numbers(rows, cols, seed=3, awkward=awkward)
    results = []
    for wide in (False, True):
        leaves = [(t.float() if wide else t.clone()).requires_grad_() for t in tensors]
        y = getattr(ops, op)(*leaves, backend="cpp")
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    assert all(same(got, exact) for got, exact in zip(*results, strict=True))


@pytest.mark.parametrize("awkward", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(shape, awkward):
    rows, cols = shape
    logits = numbers(rows, cols, seed=4, awkward=False)
    if awkward:
        logits[0, : cols // 2] = -float("inf")
    column = torch.arange(rows) * 5 - 1
    real = max(1, cols - 2)
    passes = ops.cross_entropy(logits, "cpp")
    got, exact = (passes.statistics(x, column, real, True) for x in (logits, logits.float()))
    assert torch.equal(got, exact)
    below = torch.full((rows,), 1e-38 if awkward else 0.0)  # gradients that are subnormal
    rest = torch.stack((exact[0], below + 0.3 / exact[1], torch.full((rows,), 0.3), below))
    if awkward:
        logits[-1, 0] = float("nan")
        assert passes.statistics(logits, column, real, False)[1, -1].isnan()
    mine = torch.empty_like(logits)
    wide = torch.empty_like(logits.float())
    passes.gradient_(mine, logits, column, rest, real)
    passes.gradient_(wide, logits.float(), column, rest, real)
    assert same(mine, wide)
    assert awkward or mine.isfinite().all()
