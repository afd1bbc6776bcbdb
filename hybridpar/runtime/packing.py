"""Pack several named tensors between two stages into one tensor: a row of numbers for each sample.

{"encoder": [b, s, h], "decoder": [b, t, h]}   ->   [b, s h + t h]   ->   the same names in the next stage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybridpar.config import ModelSpec


@dataclass(frozen=True)
class Packing:
    """The tensors of an activation: each name, with the shape of one sample."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def after(cls, model: ModelSpec, number: int) -> Packing | None:
        """Return the packing of the output of block `number`; None if it is one tensor."""
        shapes = model.activation_shape(number)
        return cls(tuple(shapes.items())) if isinstance(shapes, Mapping) else None

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Pack tensors into one. Shapes: [b, ..] each -> [b, numbers of a sample]."""
        return torch.cat([tensors[name].flatten(1) for name, _ in self.shapes], 1)

    def unpack(self, x: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of `x`; their gradients are parts of its gradient."""
        parts = x.split([prod(shape) for _, shape in self.shapes], 1)
        return {
            name: part.unflatten(1, shape)
            for part, (name, shape) in zip(parts, self.shapes, strict=True)
        }
