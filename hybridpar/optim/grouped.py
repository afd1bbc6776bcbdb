"""An update in parts: parameters in groups, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridpar.ops.update import Weights
from hybridpar.optim.base import Optimizer, StateMemory


class GroupedOptimizer:
    """Optimizers of the groups of a rank's parameters, which all take every step."""

    def __init__(self, groups: Sequence[Optimizer], memory: StateMemory | None = None):
        self.groups = tuple(groups)
        for optimizer in groups:
            optimizer.keep_in(memory)

    @property
    def num_updates(self) -> int:
        """Number of steps taken, if no step is under way."""
        return max((optimizer.num_updates for optimizer in self.groups), default=0)

    def step(
        self,
        group: int,
        weights: Weights,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        gradient_scale: float | Tensor = 1.0,
    ) -> None:
        """Take a group's part of a step; see Optimizer.step."""
        self.groups[group].step(weights, gradients, lr=lr, gradient_scale=gradient_scale)

    def state_tensors(self) -> dict[str, Tensor]:
        """See Optimizer.state_tensors."""
        return {
            name: tensor
            for optimizer in self.groups
            for name, tensor in optimizer.state_tensors().items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """See Optimizer.load_state_tensors."""
        for optimizer in self.groups:
            optimizer.load_state_tensors(tensors, num_updates)
