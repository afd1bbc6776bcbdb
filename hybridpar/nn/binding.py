"""Objects that the training state binds to a parameter of a parallel layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from hybridpar.nn.fp8 import Fp8Weight


class GradientPart(Protocol):
    """A part of a parameter's gradient, as a named tuple of the tensors that it is computed from.

    Whoever takes it may add it up now or later, or use the tensors.
    """

    def add_to(self, gradient: Tensor, overwrite: bool) -> None:
        """Add the part to the gradient, or be the first to write it."""


class GradientConsumer(Protocol):
    """Takes the parts of a parameter's gradient, in place of autograd.

    Whoever binds one promises that gradients are never asked of torch.autograd.grad.
    """

    @property
    def wants_factors(self) -> bool:
        """Whether it wants every part as factors, and no gradient that is multiplied out."""

    def add(self, part: GradientPart, now: bool = False) -> None:
        """Take a part, at any time in a backward.

        Args:
            part: The part.
            now: It is to be added up at once, though others may wait.
        """


@dataclass(frozen=True)
class ParameterBinding:
    """The objects that the training state binds to a parameter of a layer.

    Attributes:
        consumer: Takes the parameter's gradient. None: autograd does.
        fp8_weights: Quantized forms of the parameter, by the id of the leaf that they are made
            from: one for each live version.
    """

    consumer: GradientConsumer | None = None
    fp8_weights: Mapping[int, Fp8Weight] = field(default_factory=dict)

    def fp8_weight(self, leaf: Tensor) -> Fp8Weight | None:
        """Return the quantized form of a leaf, if its products are in fp8."""
        return self.fp8_weights.get(id(leaf))


UNBOUND = ParameterBinding()
