"""Linear layers split over the tp axis by output features (column) or by input features (row).

A column layer and then a row layer need no communication in between: one all-reduce forward (row),
one backward (column).

With sequence parallelism (`sizes`, the rows of each rank) x before column and y after row are this
rank's rows of each sample, dimension 1. Column gathers x, and gathers it a second time in its
backward, as only the rank's rows are kept; row's output is reduce-scattered.

With an adapter (LoRA) y gains scale * (x A^T) B^T, and W is frozen:

    column    A [r, i] on all ranks, its gradient partial     B [o, r] split like W
    row       A [r, i] split like W      B [o, r] on all ranks, its gradient partial

Both products are summed together, so an adapter adds no collective; only column with `sizes` has
one more, backward: a reduce-scatter of the gradient of x A^T, of r features.

Sources: Megatron-LM (arXiv 1909.08053), section 3; sequence parallelism: arXiv 2205.05198, section
4.2.2; LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm import gather_from, scatter_to
from hybridpar.grid import Axis
from hybridpar.nn.binding import UNBOUND, ParameterBinding
from hybridpar.nn.placement import Init, Matrices, ParallelModule, Placement, Shard
from hybridpar.nn.recomputable import HiddenStates, value_of
from hybridpar.nn.split_linear import Adapter, LinearOptions, Split, split_linear

Device = str | torch.device | None


class AdaptableLinear(ParallelModule):
    """A linear layer that can be given an adapter."""

    weight: Tensor
    lora_A: Tensor | None
    lora_B: Tensor | None

    def __init__(self, axis: Axis, sequence: bool = False):
        super().__init__(axis, sequence)
        self._scale = 0.0
        self._is_adapted = False
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def add_adapter(self, rank: int, alpha: float) -> None:
        """Add the parameters lora_A, random, and lora_B, zero, of an adapter of this rank, whose
        product counts alpha / rank times. They are split like the weight.
        """
        weight = self.placements["weight"]
        rows, columns = weight.shape
        axes = (self.axis.name,)
        # the variance of torch's linear layers, as PEFT has it
        a = Placement(
            (rank, columns),
            Init("normal", (3 * columns) ** -0.5),
            matrices=(((0, rank),),),
            factored=True,
        )
        b = Placement((rows, rank), Init("zeros"), matrices=weight.matrices, factored=True)
        split_rows = weight.shard is not None and weight.shard.dim == 0
        self._scale = alpha / rank
        self._is_adapted = True
        factory: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.add_parameter(
            "lora_A",
            replace(a, partial=axes) if split_rows else replace(a, shard=weight.shard),
            **factory,
        )
        self.add_parameter(
            "lora_B",
            replace(b, shard=weight.shard) if split_rows else replace(b, partial=axes),
            **factory,
        )

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, if it has one."""
        if not self._is_adapted:
            return None
        assert self.lora_A is not None
        assert self.lora_B is not None
        bindings = self.binding("lora_A"), self.binding("lora_B")
        return Adapter(self.lora_A, self.lora_B, self._scale, *bindings)


class ColumnParallelLinear(AdaptableLinear):
    """y = x W^T + b with the rows of W (output features) split over the axis.

    Args:
        shard: Rows of each rank, if not `Shard.even(0, ..)`. Others cannot be gathered.
        gather_output: Every rank returns all features, for consumers that compute the same on every
            rank.
        tied: Name under which another pipeline stage shares the weight (see Placement).
        matrices: The hidden matrices that it consists of, if it is no head (see Placement).

    Shapes: [.., in_features] replicated -> [.., out_local], or [.., out_features] if gathered.
    Collectives: forward none (gather_output: one all-gather); backward one all-reduce of the
    input's gradient, beside the product for the weight's; none if the input requires no gradient.
    With `sizes`: see column_linear.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = True,
        gather_output: bool = False,
        shard: Shard | None = None,
        init_std: float = 0.02,
        tied: str = "",
        matrices: Matrices = (),
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis)
        assert not (gather_output and shard), "gather_output joins contiguous parts, in rank order"
        shard = shard or Shard.even(0, out_features, axis.size)
        self.gather_sizes = (
            tuple(map(shard.local_size, range(axis.size))) if gather_output else None
        )
        weight = Placement(
            (out_features, in_features),
            Init("normal", init_std),
            shard,
            tied=tied,
            matrices=matrices,
            factored=True,
        )
        self.add_parameter("weight", weight, device=device, dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.add_parameter(
                "bias",
                Placement((out_features,), Init("zeros"), shard, weight_decay=False),
                device=device,
                dtype=dtype,
            )

    def forward(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        y = self._with_bias(x, self.bias, sizes)
        return y if self.gather_sizes is None else gather_from(y, self.axis, -1, self.gather_sizes)

    def with_detached_bias(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        """Return x W^T + b, for a caller whose next operator sums the gradient of b.

        Shapes: [.., in_features] -> [.., out_local].
        """
        return self._with_bias(x, None if self.bias is None else self.bias.detach(), sizes)

    def without_bias(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        """Return x W^T, for a caller that adds the bias in another operator.

        Shapes: [.., in_features] -> [.., out_local].
        """
        return self._with_bias(x, None, sizes)

    def _with_bias(
        self, x: HiddenStates, bias: Tensor | None, sizes: Sequence[int] | None
    ) -> Tensor:
        split = Split(self.axis, None, sizes)
        options = LinearOptions(split, self.binding("weight"), self.adapter)
        return split_linear(x, self.weight, bias, options)


class RowParallelLinear(AdaptableLinear):
    """y = x W^T + b with the columns of W (input features) split over the axis; b is added after
    the sum.

    Args:
        input_is_parallel: Whether x holds this rank's features already. Otherwise its part is taken
            from a replicated x.
        shard: Columns of each rank, if not `Shard.even(1, ..)`; then the input must be parallel.
        matrices: The hidden matrices that the weight consists of (see Placement).
        sequence: Whether calls have `sizes`.

    Shapes: [.., in_local] (or [.., in_features]) -> [.., out_features], replicated.
    Collectives: forward one all-reduce; backward none (replicated input: one all-gather of its
    gradient). With `sizes`: see row_linear.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        shard: Shard | None = None,
        init_std: float = 0.02,
        matrices: Matrices = (),
        sequence: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis, sequence)
        assert input_is_parallel or shard is None, "a replicated input is split evenly"
        shard = shard or Shard.even(1, in_features, axis.size)
        self.scatter_sizes = (
            None if input_is_parallel else tuple(map(shard.local_size, range(axis.size)))
        )
        weight = Placement(
            (out_features, in_features),
            Init("normal", init_std),
            shard,
            matrices=matrices,
            factored=True,
        )
        self.add_parameter("weight", weight, device=device, dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            self.add_parameter(
                "bias",
                Placement((out_features,), Init("zeros"), weight_decay=False),
                device=device,
                dtype=dtype,
            )

    def forward(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        return self._with_bias(x, self.bias, sizes)

    def without_bias(self, x: HiddenStates, sizes: Sequence[int] | None = None) -> Tensor:
        """Return x W^T, summed over the axis, for a caller that adds the bias in another operator.

        Shapes: see `forward`.
        """
        return self._with_bias(x, None, sizes)

    def _with_bias(
        self, x: HiddenStates, bias: Tensor | None, sizes: Sequence[int] | None
    ) -> Tensor:
        split = Split(None, self.axis, sizes)
        options = LinearOptions(split, self.binding("weight"), self.adapter)
        return split_linear(self._local(x), self.weight, bias, options)

    def _local(self, x: HiddenStates) -> HiddenStates:
        if self.scatter_sizes is None:
            return x
        return scatter_to(value_of(x), self.axis, -1, self.scatter_sizes)


def column_linear(
    x: HiddenStates,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    binding: ParameterBinding = UNBOUND,
) -> Tensor:
    """Return x W^T + b for a replicated `x` and this rank's rows of W and b; see
    ColumnParallelLinear.

    Shapes: x [.., i], weight [o_local, i], bias [o_local] -> [.., o_local]; with `sizes` x [b,
    sizes[rank], i].
    Collectives: forward none, backward one all-reduce if x requires a gradient. With `sizes`:
    forward one all-gather; backward another one, and one reduce_scatter.
    """
    return split_linear(x, weight, bias, LinearOptions(Split(axis, None, sizes), binding))


def row_linear(
    x: HiddenStates,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sizes: Sequence[int] | None = None,
    binding: ParameterBinding = UNBOUND,
) -> Tensor:
    """Return x W^T + b, summed over the axis, for this rank's features of `x` and columns of W.

    See RowParallelLinear.
    Shapes: x [.., i_local], weight [o, i_local], bias [o] -> [.., o]; with `sizes` -> [b,
    sizes[rank], o].
    Collectives: forward one all-reduce, backward none. With `sizes`: forward one reduce_scatter,
    backward one all-gather.
    """
    return split_linear(x, weight, bias, LinearOptions(Split(None, axis, sizes), binding))
