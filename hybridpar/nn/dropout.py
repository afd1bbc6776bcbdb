"""Dropout whose mask depends on the key, the layer's name and the place in the whole tensor: equal
on every grid."""

from __future__ import annotations

from torch import Tensor, nn

from hybridpar import ops
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.errors import config_error
from hybridpar.random import RandomKey, site


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p); the identity if
    `key` is None.

    `name` tells this place in the model from others, e.g. 'blocks.3.mlp.dropout'. `self.training`
    has no effect. `first_row`: the row of each sample that x starts with, if a rank holds part of
    the rows.

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
        self.p, self.site, self.kernels = p, site(name), kernels

    def forward(self, x: Tensor, key: RandomKey | None, first_row: int = 0) -> Tensor:
        return ops.dropout(
            x, self.p, key, self.site, first_row=first_row, backend=self.kernels.dropout
        )

    def add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        key: RandomKey | None,
        first_row: int = 0,
    ) -> Tensor:
        """residual + dropout(x + bias). Shapes: x and residual [b, .., h], bias [h] -> [b, ..,
        h]."""
        return ops.bias_dropout_add(
            x,
            residual,
            bias,
            p=self.p,
            key=key,
            site=self.site,
            first_row=first_row,
            backend=self.kernels.bias_dropout_add,
        )
