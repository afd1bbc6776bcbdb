"""Dropout in Triton on a GPU: the reference's mask; interpreted.py has it in the interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


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
