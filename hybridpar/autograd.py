"""Gradients that are not differentiated again: backward without what else torch prepares for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, function
from torch.autograd.graph import GradientEdge


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of a Function's backward, without what it costs where nobody differentiates again.

    That is 2.5 us of the 27 that a forward and backward take which do nothing.
    """
    careful = function.once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        return (careful if torch.is_grad_enabled() else backward)(ctx, *grads)

    return wrapper


def backward_from(edge: GradientEdge, gradient: Tensor) -> None:
    """torch.autograd.backward(edge, gradient), which imports sympy to compare two shapes: 0.4 s at every start.

    Torch's own functions of autograd call the engine so; it has no public name.
    Raises: RuntimeError, of the engine, where they differ.
    """
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
