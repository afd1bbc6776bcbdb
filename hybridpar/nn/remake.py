"""Activations that are made again in the backward pass, from tensors that are kept anyway, and are
not kept themselves.

    y = remade(gelu(u), partial(gelu, u))        # gelu's backward keeps u
    row_linear(y, weight, ..)                    # keeps how y is made, where it else would keep y

Sources: selective recomputation, arXiv 2205.05198, section 5, which makes attention's scores again
    (here no scores are
kept); outputs of norms and activations: Chen et al., arXiv 1604.06174, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAKE = "make_again"
"""Attribute of an activation: makes an equal one."""


def remade(y: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Returns `y`, of which linear layers keep `make` instead, where autograd records.

    `make` returns the same bits from tensors that others keep for their backward. Nobody may write
    to `y` afterwards.
    """
    if torch.is_grad_enabled():
        setattr(y, _MAKE, make)
    return y


def recipe(y: Tensor) -> Callable[[], Tensor] | None:
    """The function that makes `y` again; None where it is to be kept."""
    found: Callable[[], Tensor] | None = getattr(y, _MAKE, None)
    return found
