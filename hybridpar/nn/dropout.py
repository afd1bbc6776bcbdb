"""Dropout whose mask is a function of the key, the layer's name and the index in the unsharded
tensor.

So the mask is equal on every grid.
"""

from __future__ import annotations

from torch import Tensor, nn

from hybridpar import ops
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.errors import config_error
from hybridpar.ops.dropout import DropoutSpec, Rows
from hybridpar.random import RandomKey, site


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p).

    It is the identity if `key` is None; `self.training` has no effect.

    Args:
        p: Probability.
        name: Tells this layer from others, e.g. 'blocks.3.mlp.dropout'.

    A call's `first_row` is the first of each sample's rows that x holds, if a rank holds part of
    the rows; ranges of rows if they lie apart.

    Shapes: x [b, ..], replicated over tp, or [b, rows, h] -> same; b counts samples from
    key.sample.
    Raises: ConfigError for p outside [0, 1).
    """

    def __init__(self, p: float, name: str, kernels: KernelsConfig = AUTO):
        super().__init__()
        if not (isinstance(p, int | float) and 0.0 <= p < 1.0):
            raise config_error(
                "model.dropout", p, "must be a number of at least 0 and below 1", "0.1"
            )
        self.p = p
        self.site = site(name)
        self.kernels = kernels

    def forward(self, x: Tensor, key: RandomKey | None, first_row: Rows = 0) -> Tensor:
        return ops.dropout(x, self.spec(key, first_row), backend=self.kernels.dropout)

    def spec(self, key: RandomKey | None, first_row: Rows = 0) -> DropoutSpec:
        """Return the dropout of this layer in a micro-batch; see `forward`."""
        return DropoutSpec(self.p, key, self.site, first_row=first_row)

    def add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        key: RandomKey | None,
        first_row: Rows = 0,
    ) -> Tensor:
        """Return residual + dropout(x + bias). Shapes: x and residual [b, .., h], bias [h] ->
        [b, .., h]."""
        return ops.bias_dropout_add(
            x,
            residual,
            bias,
            dropout=self.spec(key, first_row),
            backend=self.kernels.bias_dropout_add,
        )
