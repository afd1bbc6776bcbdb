"""Attention on Hopper GPUs: csrc/cuda's forward pass and cuDNN's backward pass, otherwise Triton's.

All exchange the same output and logarithms of sums. cuDNN's adds up dq in any order: if torch is
to be deterministic, the backward pass is Triton's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.ops.attention import AttentionCall, LibraryPasses, SavedAttention, attention_by
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


def attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Run the passes below. Shapes: see ops.attention."""
    return attention_by(HopperPasses(), q, k, v, call)


class HopperPasses(NamedTuple):
    """The passes of attention on Hopper GPUs."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        if _is_plain(q, call):
            return torch.ops.hybridpar.attention_hopper(
                q, k, v, call.kv_index, call.scale_of(q), call.mask.causal
            )
        return LibraryPasses(torch.ops.hybridpar_triton).forward(q, k, v, call)

    def backward(
        self, dout: Tensor, saved: SavedAttention, call: AttentionCall
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse = saved
        has_own_keys = call.kv_index == list(range(k.shape[1]))  # one key head per query head
        if (
            not (has_own_keys and q.numel() and _is_plain(q, call) and _has_cudnn())
            or torch.are_deterministic_algorithms_enabled()
        ):
            return LibraryPasses(torch.ops.hybridpar_triton).backward(dout, saved, call)
        s = q.shape[2]
        # cuDNN takes the state of a random generator, which it does not read without dropout
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
            call.mask.causal,
            scale=call.scale_of(q),
        )
        return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _is_plain(q: Tensor, call: AttentionCall) -> bool:
    """Whether the kernel has such a mask and this size."""
    return call.is_plain and q.shape[-1] in HEAD_DIMS and q.shape[1] <= MOST_HEADS


def _has_cudnn() -> bool:
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
