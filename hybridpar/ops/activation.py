"""Activations of the feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridpar.ops.registry import resolve


def gelu(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Gaussian error linear unit, in the tanh form that GPT and BERT were published with.

    Shapes: x any -> the same. Raises: ConfigError if the backend cannot run. Source: arXiv 1606.08415.
    """
    return resolve("gelu", backend, x)(x)


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up.

    Shapes: gate, up [..., f] -> [..., f].
    Raises: ValueError if the shapes differ; ConfigError if the backend cannot run.
    Source: arXiv 2002.05202.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have the same shape")
    return resolve("swiglu", backend, gate)(gate, up)


def gelu_torch(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
