"""The feed-forward half of a transformer block, split over the tp axis by ffn features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hybridpar.config import AUTO, KernelsConfig
from hybridpar.grid import Axis
from hybridpar.nn.linear import (
    ColumnParallelLinear,
    Device,
    RowParallelLinear,
    column_linear,
    row_linear,
)
from hybridpar.nn.placement import ParallelModule, Shard, split_ranges
from hybridpar.nn.recomputable import HiddenStates, recomputable
from hybridpar.ops import geglu, gelu, swiglu
from hybridpar.ops.activation import gelu_exact

Activation = Literal["gelu", "gelu_exact", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")
"""Activations with a gate beside the projection up."""


def activation_function(
    name: Activation, kernels: KernelsConfig = AUTO
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the function of (x, bias) that a configuration names.

    Shapes: x [.., f], bias [f] or None -> [.., f]; swiglu and geglu take gate and up side by side,
    [.., 2f] and [2f].
    """
    functions: dict[Activation, Callable[[Tensor, Tensor | None], Tensor]] = {
        "gelu": partial(gelu, backend=kernels.gelu),
        "gelu_exact": gelu_exact,
        "swiglu": partial(swiglu, backend=kernels.swiglu),
        "geglu": partial(geglu, backend=kernels.geglu),
    }
    return functions[name]


class ParallelMLP(ParallelModule):
    """down(gelu(up x)), or with a gate down(act(gate x) * (up x)): SiLU in 'swiglu', gelu in 'geglu'.

    Any ffn size splits over any number of ranks. 'gelu' is the tanh form, as in 'geglu';
    'gelu_exact' uses the error function. With a gate the weight `up` holds the ffn rows of gate,
    then the rows of up; every rank holds the same rows of both.

    Args:
        out_init_std: Standard deviation of `down` at the start (None: init_std), often smaller in
            deeper models.
        sequence: Whether calls have `sizes` (see column_linear).

    Shapes: [.., hidden] -> [.., hidden], both replicated.
    Collectives: forward one all-reduce, backward one. With `sizes`: see column_linear and
    row_linear.
    Source: swiglu, geglu: arXiv 2002.05202; the split: Megatron-LM, arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        axis: Axis,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        kernels: KernelsConfig = AUTO,
        sequence: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis)
        self.recomputes = False
        self._alone = Axis(axis.name)
        """An axis of one rank, for products without collectives."""
        self.activation = activation_function(activation, kernels)
        ranges = split_ranges(ffn, axis.size)
        gated = activation in GATED
        shard = Shard(0, tuple(((a, b), (ffn + a, ffn + b)) for a, b in ranges)) if gated else None
        matrices = tuple(((i * ffn, (i + 1) * ffn),) for i in range(2 if gated else 1))
        self.up = ColumnParallelLinear(
            hidden,
            len(matrices) * ffn,
            axis,
            bias=bias,
            shard=shard,
            init_std=init_std,
            matrices=matrices,
            device=device,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            ffn,
            hidden,
            axis,
            bias=bias,
            init_std=init_std if out_init_std is None else out_init_std,
            matrices=(((0, hidden),),),
            sequence=sequence,
            device=device,
            dtype=dtype,
        )

    def recompute(self) -> None:
        """Compute the input of `down` again in the backward pass from now on, instead of keeping
        it."""
        self.recomputes = True

    def forward(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        y, bias = self.without_bias(x, sizes)
        return y if bias is None else y + bias

    def without_bias(
        self, x: HiddenStates, sizes: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output without the bias of `down`, and that bias.

        The caller adds it in another operator.
        """
        u = self.up.without_bias(x, sizes)
        bias = self.up.bias
        activate = partial(self.activation, u, bias)
        y = recomputable(activate(), activate) if self.recomputes else activate()
        return self.down.without_bias(y, sizes), self.down.bias

    def parts(self, tokens: int) -> list[tuple[ParallelMLP, int]]:
        """Return the MLPs that it consists of, itself, with the number of tokens that each gets."""
        return [(self, tokens)]

    def inner(self, x: Tensor) -> HiddenStates:
        """Return this rank's features between both products, for `partial_sum`.

        Shapes: [.., hidden] -> [.., features]. Collectives: none; the caller sums the gradient of x
        over the axis.
        """
        up = self.up
        assert up.bias is None, "biases are added once, after the sum"
        u = column_linear(x, up.weight, None, self._alone, None, up.binding("weight"))
        activate = partial(self.activation, u, None)
        return recomputable(activate(), activate) if self.recomputes else activate()

    def partial_sum(self, inner: HiddenStates) -> Tensor:
        """Return this rank's summand of the output, for a caller that sums over the axis: of an MLP
        without biases.

        Shapes: [.., features] -> [.., hidden]. Collectives: none.
        """
        down = self.down
        return row_linear(inner, down.weight, None, self._alone, None, down.binding("weight"))
