"""Attention on Hopper GPUs: the forward pass is that of csrc/cuda where it can be, else Triton's; backward is Triton's.

Both leave the same output and sums for the backward pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.ops import triton
from hybridpar.ops.fused import Fused

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
MOST_HEADS = 1024


def unsupported(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Why it cannot run on such tensors (None: in general, on this machine); None when it can."""
    if device_type not in (None, "cuda"):
        return f"runs on a GPU, not on {device_type}"
    if dtype not in (None, *DTYPES):
        return f"has no {dtype} version"
    if reason := native.missing() or native.missing_cuda():
        return reason
    if not torch._C._dispatch_has_kernel_for_dispatch_key("hybridpar::attention_hopper", "CUDA"):
        return "the extension hybridpar._C_cuda was compiled without sm_90a"
    if not torch.cuda.is_available():
        return "no GPU here"
    if (capability := torch.cuda.get_device_capability()) != CAPABILITY:
        return "needs a GPU of compute capability 9.0, not {}.{}".format(*capability)
    return triton.unsupported(op, device_type, dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, kv_head: list[int], scale: float, causal: bool,
              key0: int, key1: int, step: int, sample: int, threshold: int, *rest: Any) -> tuple[Tensor, Tensor]:
    """kernels.attention.attention"""
    if real is None and threshold == 0 and q.shape[-1] in HEAD_DIMS and q.shape[1] <= MOST_HEADS:
        return torch.ops.hybridpar.attention_hopper(q, k, v, kv_head, scale, causal)
    return torch.ops.hybridpar_triton.attention(q, k, v, real, kv_head, scale, causal, key0, key1, step, sample,
                                                threshold, *rest)


def attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.attention.attention_backward"""
    return torch.ops.hybridpar_triton.attention_backward(*args)


fused = Fused(sys.modules[__name__])
