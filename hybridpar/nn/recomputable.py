"""Activations that the backward pass computes again, from tensors that are kept anyway.

    y = recomputable(gelu(u), partial(gelu, u))   # gelu's backward keeps u
    row_linear(y, weight, ..)                     # keeps the function, where it else would keep y

Sources: selective recomputation, arXiv 2205.05198, section 5, which makes attention's scores again
    (here no scores are kept); outputs of norms and activations: Chen et al., arXiv 1604.06174,
    section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RecomputeFn = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Recomputable:
    """An activation with the function that computes the same bits again.

    A linear layer keeps the function in place of the value. Nobody may write to the value.
    """

    value: Tensor
    recompute_fn: RecomputeFn


HiddenStates = Tensor | Recomputable


def recomputable(value: Tensor, recompute_fn: RecomputeFn) -> HiddenStates:
    """Return the activation with its function, or alone where autograd records nothing."""
    return Recomputable(value, recompute_fn) if torch.is_grad_enabled() else value


def value_of(x: HiddenStates) -> Tensor:
    """Return the tensor of an activation."""
    return x.value if isinstance(x, Recomputable) else x


def recompute_fn_of(x: HiddenStates) -> RecomputeFn | None:
    """Return the function that computes an activation again; None: it is to be kept."""
    return x.recompute_fn if isinstance(x, Recomputable) else None
