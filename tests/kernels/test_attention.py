"""Attention in Triton, in the interpreter: what the cases of tests/ops/test_backends.py do not reach."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

START = """
import torch
import triton_interpreter
from hybridpar import ops, random
from hybridpar.kernels import attention as module
from hybridpar.kernels import tiles
from hybridpar.ops.dropout import dropout_torch

NO_DROPOUT = (0, 0, None, 0, 1.0, 0)
torch.manual_seed(1)


def agree(b, n, n_kv, s, d, **settings):
    inputs, dout = [torch.randn(b, heads, s, d) for heads in (n, n_kv, n_kv)], torch.randn(b, n, s, d)
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = ops.attention(*leaves, backend=backend, **settings)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(dtype))])
    for got, want in zip(*results, strict=True):  # sums of up to a hundred terms in float32
        assert (got.double() - want).abs().max() <= 6e-6 * want.abs().max().clamp(min=1), settings
"""

MASK = """
for s in (52, 53, 54):  # rows of the mask begin at multiples of 4, anywhere, at multiples of 2
    b, n, d, start = 2, 2, 64, 2**36 + 12 * (s == 52)
    key = (0x9ABCDEF0, 0x12345678)
    mask = (*key, torch.tensor([2**32 - 1, 2**31 - 1]), round(0.3 * 2**32))
    q = torch.zeros(b, n, s, d, dtype=torch.float16)
    v = torch.eye(s, d, dtype=torch.float16).expand(b, n, s, d)  # so that out is the matrix of probabilities
    settings = (None, [0, 1], 0.5, False, *mask, 1 / 0.7, start)
    out, lse = module.attention(q, q, v, *settings)
    kept = dropout_torch(torch.ones(b, n * s, s), *mask, 1.0, s, start).view(b, n, s, s)
    probabilities = (kept / 0.7 / s).half()
    assert torch.equal(out.transpose(1, 2)[..., :s] > 0, kept > 0), s
    torch.testing.assert_close(out.transpose(1, 2)[..., :s], probabilities, rtol=2e-3, atol=0)
    dq, dk, dv = module.attention_backward(v, q, q, v, out, lse, *settings)
    assert torch.equal(dv.transpose(1, 2)[..., :s] > 0, kept.mT > 0), s
print("done")
"""

SHAPES = """
for d, kv_index in ((130, [2, 0, 2, 3]), (96, [1, 1, 0, 0]), (16, [0, 1, 2, 3])):  # kv head 1 serves none, once
    agree(1, 4, max(kv_index) + 1, 40, d, causal=True, kv_index=kv_index)
for b, n, s in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
    q = torch.empty(b, n, s, 8)
    out, lse = module.attention(q, q, q, None, list(range(n)), 1.0, True, *NO_DROPOUT)
    assert (out.shape, lse.shape) == ((b, s, n, 8), (b, n, s))
    dq, dk, dv = module.attention_backward(q, q, q, q, out, lse, None, list(range(n)), 1.0, True, *NO_DROPOUT)
    assert {x.shape for x in (dq, dk, dv)} == {(b, s, n, 8)}
q = torch.randn(1, 1, 3, 8)
real = torch.tensor([[True, False, True]])  # queries that see no key: zero, no gradient, infinite lse
out, lse = module.attention(q, q, q, ~real, [0], 1.0, True, *NO_DROPOUT)
assert torch.equal(out[0, 0], torch.zeros(1, 8)) and lse[0, 0, 0] == torch.inf and lse[0, 0, 1:].isfinite().all()
dq, dk, dv = module.attention_backward(q, q, q, q, out, lse, ~real, [0], 1.0, True, *NO_DROPOUT)
assert (dq[0, 0] == 0).all() and (dk[real] == 0).all() and (dv[real] == 0).all() and (dv[~real] != 0).any()
print("done")
"""

TILES = """
real = torch.arange(180).view(2, 90) < 120  # the second sample has blocks of keys without a real one
for rows, keys in ((32, 64), (64, 16), (16, 128)):
    module.tile_of = lambda *args, rows=rows, keys=keys: tiles.Tile(rows, keys, 4, 1)
    for causal in (False, True):
        agree(2, 1, 1, 90, 16, causal=causal, padding_mask=real, dropout_p=0.3, key=random.RandomKey.of(1, 2, 3),
              site=4, head_start=1)
print("done")
"""

COMPILED = """
from hybridpar.random import RandomKey


def f(q, k, v, step):
    return ops.attention(q, k, v, causal=True, dropout_p=0.3, key=RandomKey.of(1, step, 3), site=4, backend="triton")


compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
x = [torch.randn(1, heads, 36, 8) for heads in (2, 1, 1)]
for step in (1, 2, 3):
    results = []
    for function in (f, compiled):
        leaves = [t.clone().requires_grad_() for t in x]
        out = function(*leaves, step)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), step
print("done")
"""


@pytest.mark.parametrize("script", [MASK, SHAPES, TILES, COMPILED], ids=["mask", "shapes", "tiles", "compiled"])
def test_in_the_interpreter(script):
    run = subprocess.run([sys.executable, "-c", START + script], capture_output=True, text=True, timeout=600,
                         env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
                              "PYTHONPATH": str(Path(__file__).parents[1])}, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "done\n"
