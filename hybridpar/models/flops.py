"""Count the operations of a custom model's blocks by running their code on tensors without values.

Only products count: matrix products, convolutions, attention, and whatever else torch's own
counter (torch.utils.flop_counter) has a formula for; a multiplication and the addition that follows
are two operations. Norms, activations, losses and other work on single elements do not count.

    product, convolution    forward 2 for each multiplication; backward as much again for each of
                            the two gradients that is needed: the input of the first layer and
                            frozen weights need none
    attention               two products forward, four backward; half of that if is_causal = True,
                            as a query sees half of the keys on average. Scores that a backward
                            computes a second time do not count
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybridpar.autograd import QuietMode, backward_from
from hybridpar.config import ModelSpec
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks

_META = torch.device("meta")


class BlockFlops(NamedTuple):
    """Operations of one block for one sample, without recomputation."""

    forward: int
    backward: int


@lru_cache(maxsize=256)
def count_flops(model: ModelSpec) -> tuple[BlockFlops, ...] | None:
    """Return the operations of each block, or None if a block reads values and so cannot run.

    Raises:
        ConfigError: A block is refused wherever it runs.
    """
    x: Any = None
    has_trained = False
    found = []
    batch = {
        name: torch.as_tensor(np.asarray(array), device=_META)[None]
        for name, array in model.sample(0, 0).items()
    }
    batch |= {
        name: torch.ones((), dtype=torch.float64, device=_META)
        for name in ("num_targets", "num_samples")
    }
    for number in range(model.num_blocks):
        (block,) = build_blocks(model, Axis("tp"), [number]).values()
        block.to(_META)
        counter = _Counter()
        try:
            with _Attentions(counter), counter:
                out = block(x, batch, None)
                forward = counter.flops
                counter.flops = 0
                _backward(out)
        except HybridparError:
            raise
        except Exception:  # whatever a block of the user's raises where tensors have no values
            return None
        found.append(BlockFlops(forward, counter.flops))
        has_trained |= any(parameter.requires_grad for parameter in block.parameters())
        x = _cut(out, has_trained)
    return tuple(found)


def _backward(out: Any) -> None:
    """Run the backward of all outputs of a block at once; sums have no products."""
    outputs = [
        one.sum() for one in (out.values() if isinstance(out, dict) else [out]) if one.requires_grad
    ]
    if outputs:
        total = torch.stack([one.float() for one in outputs]).sum()
        backward_from(get_gradient_edge(total), torch.empty_like(total))


def _cut(out: Any, needs_gradient: bool) -> Any:
    """Return the next block's input: the same shapes, outside of this block's graph."""
    if isinstance(out, dict):
        return {name: _cut(one, needs_gradient) for name, one in out.items()}
    return out.detach().requires_grad_(needs_gradient and out.is_floating_point())


class _Counter(QuietMode):
    """Adds up the operations of what runs while it is active, in `flops`."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import (
            flop_registry,
        )  # imports Triton where it is installed, which takes 0.3 s

        super().__init__()
        self.flops = 0
        self._formulas = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten.convolution_backward.default:
            self.flops += convolution_backward_flops(*args)
        elif (formula := self._formulas.get(func.overloadpacket)) is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        return out


def convolution_backward_flops(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> int:
    """Return the operations of aten.convolution_backward, for the gradients that its mask asks for.

    torch's own formula multiplies by the number of groups.
    """
    transposed = options[4]
    wants_x = options[7][0]
    wants_weight = options[7][1]
    positions = (x if transposed else gradient).shape[2:]
    each = 2 * x.shape[0] * prod(positions) * weight.numel()
    return each * (wants_x + wants_weight)


class _Attentions(TorchFunctionMode):
    """Count scaled_dot_product_attention by its arguments.

    The operators below it do not show whether it is causal.
    """

    def __init__(self, counter: _Counter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        flops = 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        out: Tensor = _Attention.apply(
            query, key, value, self._counter, flops // 2 if is_causal else flops
        )
        return out


class _Attention(torch.autograd.Function):
    """Attention that computes nothing but shapes."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, counter: _Counter, flops: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.counter = counter
        ctx.flops = flops
        counter.flops += flops
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.flops += 2 * ctx.flops
        return (*map(torch.empty_like, ctx.saved_tensors), None, None)
