"""The base class of optimizers of one's own.

class Lion(UpdateRule):                                              [optim]
    state_names = ("momentum",)                                      name = "own"
                                                                     spec = "my_package:Lion"
    def update(self, weight, gradient, state, *, lr, decay, step):
        direction = torch.lerp(gradient, state["momentum"], 0.9).sign_()
        weight.mul_(1 - lr * decay).sub_(direction, alpha=lr)
        state["momentum"].lerp_(gradient, 0.01)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hybridpar.config.spec import import_class

if TYPE_CHECKING:
    from torch import Tensor

    from hybridpar.config.sections.optim import OptimConfig


class UpdateRule:
    """An optimizer as a function of one tensor, element by element, so that it may be given any
    piece of a parameter.

    Its state has one tensor for each of `state_names`, of the weight's shape, which starts as
    zeros. It is saved, resumed, and divided over ranks as parameters are. The rule itself keeps
    nothing from one update to the next.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: OptimConfig):
        self.settings = settings

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        """Changes `weight` and `state` in place; `gradient` is clipped, and may be overwritten.

        lr, decay: the learning rate and optim.weight_decay (0 for biases and norms), times the
        factors of the parameter's group (optim.groups). step: counts from 1.
        Shapes: all alike, in float32 or float64.
        """
        raise NotImplementedError


def import_rule(name: str, folders: Sequence[str | Path] = (".",)) -> type[UpdateRule]:
    """The rule that "module:class" names (see `import_class`). Raises: ConfigError."""
    return import_class("optim.spec", name, UpdateRule, folders)
