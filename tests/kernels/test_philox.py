"""Dropout in Triton: the reference's mask in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = """
import torch
from hybridpar import random
from hybridpar.kernels import philox
from hybridpar.ops.dropout import dropout_torch

CASES = [  # shape, stride, start
    ((2, 3, 7), 13, 4), ((1, 1, 2500), 2500, 2**34 - 3), ((3, 2, 1), 1, 1), ((2, 2, 130), 131, 0),
    ((2, 3, 5), 5, 2**40 + 2), ((1, 2, 1026), 1026, 3), ((0, 2, 3), 3, 0),
]
for shape, stride, start in CASES:
    key = random.philox_key(2**63 + 9, 0xDEADBEEF)
    counters = (*key, torch.tensor((2**32 - 1, 2**31 - 1)))
    for dtype in (torch.float32, torch.float16):  # the interpreter computes bfloat16 wrongly
        x = torch.randn(shape).to(dtype)
        mask = (*counters, round(0.7 * 2**32), 1 / 0.3, stride, start)
        assert torch.equal(philox.philox_dropout(x, *mask), dropout_torch(x, *mask)), (shape, stride, start, dtype)
print("agreed", len(CASES))
"""


def test_same_mask_as_the_reference_in_the_interpreter():
    run = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=240,
                         env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                         cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("agreed 7")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_mask_as_the_reference_on_the_gpu(dtype):
    from hybridpar.ops import dropout
    from hybridpar.random import RandomKey

    x = torch.randn(3, 5, 1027, device="cuda").to(dtype)
    outs = [dropout(x, 0.3, RandomKey.of(1, 2, 3), 4, inner_size=2000, inner_start=13, backend=name)
            for name in ("triton", "torch")]
    assert torch.equal(*outs)
