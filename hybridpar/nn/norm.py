"""Normalisation layers, replicated over the tp axis: no communication, equal gradients on every
rank.

With `sequence` each rank has its own rows, and a partial sum of the gradients. After `recompute`,
the output of a norm is recomputed in the backward pass from the norm's input, which is kept anyway
(recomputable.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from hybridpar import ops
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.grid import Axis
from hybridpar.nn.dropout import Dropout
from hybridpar.nn.placement import Init, ParallelModule, Placement
from hybridpar.nn.recomputable import HiddenStates, recomputable
from hybridpar.ops.dropout import Rows
from hybridpar.ops.norm import NormWeights
from hybridpar.random import RandomKey


class _Norm(ParallelModule):
    """The base of both norms. `bias` is None for RMSNorm; `recomputes`: see the module.

    Args:
        eps: Added to the variance; None: 1e-5 for LayerNorm, 1e-6 for RMSNorm.
        sequence: Whether each rank sees its own rows only, or its own heads.
        zero_centered: Whether it multiplies by 1 + weight, and weights start from 0.
    """

    parameter_names: ClassVar[tuple[str, ...]]
    usual_eps: ClassVar[float]

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        axis: Axis,
        *,
        eps: float | None = None,
        kernels: KernelsConfig = AUTO,
        sequence: bool = False,
        zero_centered: bool = False,
        **factory: Any,
    ):
        super().__init__(axis, sequence)
        self.zero_centered = zero_centered
        self.eps = self.usual_eps if eps is None else eps
        self.kernels = kernels
        self.recomputes = False
        self.register_parameter("bias", None)
        for name in self.parameter_names:
            starts_at_one = name == "weight" and not zero_centered
            init = Init("ones" if starts_at_one else "zeros")
            placement = Placement((hidden,), init, weight_decay=False)
            self.add_parameter(name, placement, **factory)

    def recompute(self) -> None:
        """Compute outputs again in the backward pass from now on, instead of keeping them."""
        self.recomputes = True

    def scale(self) -> Tensor:
        """Return the factor of the normalised features."""
        return self.weight + 1 if self.zero_centered else self.weight

    def forward(self, x: Tensor) -> HiddenStates:
        make = self._maker(x)
        return recomputable(make(), make) if self.recomputes else make()

    def add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        dropout: Dropout,
        key: RandomKey | None,
        first_row: Rows = 0,
    ) -> tuple[HiddenStates, Tensor]:
        """Return the norm of residual + dropout(x + bias), and that sum.

        Shapes: [b, .., hidden], bias [hidden] -> same.
        """
        y, total = ops.add_norm(
            x,
            residual,
            NormWeights(self.scale(), self.bias, self.eps),
            bias_of_x=bias,
            dropout=dropout.spec(key, first_row),
            backend=self.kernels.add_norm,
        )
        return recomputable(y, self._maker(total)) if self.recomputes else y, total

    def normalize(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, which the backward pass does not compute again."""
        return self._maker(x)()

    def _maker(self, x: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes the norm of `x` by the weights that are bound now."""
        raise NotImplementedError


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Shapes: [.., hidden] -> same. Source: arXiv 1607.06450.
    """

    parameter_names = ("weight", "bias")
    usual_eps = 1e-5

    def _maker(self, x: Tensor) -> Callable[[], Tensor]:
        assert self.bias is not None
        return partial(
            ops.layer_norm, x, self.weight, self.bias, self.eps, backend=self.kernels.layer_norm
        )


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; zero-centered: * (1 + weight).

    Shapes: [.., hidden] -> same. Source: arXiv 1910.07467.
    """

    parameter_names = ("weight",)
    usual_eps = 1e-6

    def _maker(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(ops.rms_norm, x, self.scale(), self.eps, backend=self.kernels.rms_norm)
