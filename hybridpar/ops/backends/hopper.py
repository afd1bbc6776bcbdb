"""Attention on Hopper GPUs: csrc/cuda's forward pass and cuDNN's backward pass, otherwise Triton's.

All exchange the same output and logarithms of sums. cuDNN's adds up dq in any order: if torch is
to be deterministic, the backward pass is Triton's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.ops.backends.libraries import cpp_missing, has_cuda, triton_missing

CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128)
MOST_HEADS = 1024


def missing(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Return why it cannot run on this machine's GPU; None if it can."""
    if reason := cpp_missing(op) or native.missing_cuda():
        return reason
    if not has_cuda("attention_hopper"):
        return "the extension hybridpar._C_cuda was compiled without sm_90a"
    if (capability := torch.cuda.get_device_capability()) != CAPABILITY:
        return "needs a GPU of compute capability 9.0, not {}.{}".format(*capability)
    return triton_missing(op, device_type, dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    kv_head: list[int],
    scale: float,
    causal: bool,
    *mask: Any,
) -> tuple[Tensor, Tensor]:
    """See kernels.attention.attention for arguments and shapes."""
    if _plain(q, real, mask):
        return torch.ops.hybridpar.attention_hopper(q, k, v, kv_head, scale, causal)
    return torch.ops.hybridpar_triton.attention(q, k, v, real, kv_head, scale, causal, *mask)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    real: Tensor | None,
    kv_head: list[int],
    scale: float,
    causal: bool,
    *mask: Any,
) -> tuple[Tensor, ...]:
    """See kernels.attention.attention_backward for arguments and shapes."""
    own = kv_head == list(range(k.shape[1]))  # a key head for each query head
    if (
        not (own and q.numel() and _plain(q, real, mask) and _has_cudnn())
        or torch.are_deterministic_algorithms_enabled()
    ):
        return torch.ops.hybridpar_triton.attention_backward(
            dout, q, k, v, out, lse, real, kv_head, scale, causal, *mask
        )
    # of a dropout that there is none of
    s = q.shape[2]
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out.transpose(1, 2),
        lse.unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        s,
        s,
        0.0,
        causal,
        scale=scale,
    )
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _plain(q: Tensor, real: Tensor | None, mask: tuple[Any, ...]) -> bool:
    """Whether there is no padding or dropout, and the kernel has this size."""
    threshold = mask[3]
    return real is None and threshold == 0 and q.shape[-1] in HEAD_DIMS and q.shape[1] <= MOST_HEADS


def _has_cudnn() -> bool:
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


passes = sys.modules[__name__]
