"""A custom optimizer (`UpdateRule`), found by its name and tried out before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridpar.config import OptimConfig, UpdateRule, import_rule
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.ops.update import Weights
from hybridpar.optim.base import Optimizer
from hybridpar.optim.slots import ParameterSlot

_SIGNATURE = "def update(self, weight, gradient, state, *, lr, decay, step): ..."


class Own(Optimizer):
    """Run the rule that `optim.spec` names on each parameter, or on the piece that this rank
    updates.

    Raises:
        ConfigError: The rule cannot be right on every grid.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        super().__init__(slots, settings, tp, backend)
        self._rule = find_rule(settings)
        self.state_names = tuple(self._rule.state_names)  # type: ignore[misc]

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        states = {name: self._state_parts(name) for name in self.state_names}
        with weights.updating() as values:
            for i, (weight, gradient) in enumerate(
                zip(self._parts(values), self._parts(gradients), strict=True)
            ):
                self._rule.update(
                    weight,
                    gradient,
                    {name: parts[i] for name, parts in states.items()},
                    lr=lr * self._rates[i],
                    decay=self._decays[i],
                    step=self.num_updates,
                )


def find_rule(settings: OptimConfig) -> UpdateRule:
    """Return the rule that `optim.spec` names, tried out on a few numbers.

    Raises:
        ConfigError: It cannot be imported, keeps numbers that no checkpoint would save, changes
            nothing, or does not update an element by that element alone.
    """
    kind: Callable[[OptimConfig], UpdateRule] = import_rule(settings.spec)
    return _made(kind, settings)


@lru_cache(maxsize=16)
def _made(kind: Callable[[OptimConfig], UpdateRule], settings: OptimConfig) -> UpdateRule:
    """Make an optimizer of this class and try it out. Raises: ConfigError; see `find_rule`."""
    try:
        rule = kind(settings)
    except TypeError as error:
        raise _refused(
            settings,
            f"its constructor must work with the settings alone ({error})",
            "def __init__(self, settings): super().__init__(settings)",
        ) from None
    with _disable_current_modes(), torch.no_grad():  # memory is predicted on tensors without values
        _try_out(rule, settings)
    return rule


def _try_out(rule: UpdateRule, settings: OptimConfig) -> None:
    """Raises: ConfigError; see `find_rule`."""
    before = dict(vars(rule))
    whole, again, pieces = (_tried(rule, settings, cut) for cut in ([7], [7], [3, 4]))
    if kept := [name for name, value in vars(rule).items() if before.get(name, ...) is not value]:
        raise _refused(
            settings,
            f"must not keep state in attributes ({kept[0]}), which checkpoints do not save",
            f"state_names = ({kept[0]!r},), and state[{kept[0]!r}] in update",
        )
    if not bool((whole[0] != _numbers(0)).all()):
        raise _refused(
            settings,
            "must change the weights in place; update leaves them unchanged",
            "weight.sub_(lr * step)",
        )
    if any(not torch.equal(a, b) for a, b in zip(whole, again, strict=True)):
        raise _refused(
            settings,
            "must give the same result each time it is called with the same arguments",
            "an update without random numbers",
        )
    if any(not torch.allclose(a, b, rtol=1e-9, atol=0) for a, b in zip(whole, pieces, strict=True)):
        raise _refused(
            settings,
            "must give the same result for a weight in two pieces, as other grids and ZeRO have it",
            "an update of each element by itself, without norms or means",
        )


def _numbers(seed: int) -> Tensor:
    return torch.linspace(0.3 + seed, 1.7 + seed, 7, dtype=torch.float64).sin()


def _tried(rule: UpdateRule, settings: OptimConfig, cut: list[int]) -> list[Tensor]:
    """Return weight and state after two updates of a tensor that comes in these pieces."""
    weight = _numbers(0)
    states = {name: torch.zeros(7, dtype=torch.float64) for name in rule.state_names}
    for step in (1, 2):
        parts = [x.split(cut) for x in (weight, _numbers(step), *states.values())]
        for w, g, *rest in zip(*parts, strict=True):
            state = dict(zip(states, rest, strict=True))
            given = {name: x.data_ptr() for name, x in state.items()}
            _call(rule, settings, (w, g, state), step)
            if {name: x.data_ptr() for name, x in state.items()} != given:
                raise _refused(
                    settings,
                    "must change its state in place; a tensor put into the dict is lost",
                    "state[name].copy_(new)",
                )
    return [weight, *states.values()]


def _call(rule: UpdateRule, settings: OptimConfig, tensors: tuple[Any, ...], step: int) -> None:
    try:
        rule.update(*tensors, lr=0.1, decay=settings.weight_decay, step=step)
    except NotImplementedError:
        raise _refused(settings, "must define update", _SIGNATURE) from None
    except KeyError as error:
        raise _refused(
            settings,
            f"uses the state {error}, which state_names does not have",
            f"state_names = ({error},)",
        ) from None
    except TypeError as error:
        raise _refused(settings, f"cannot be called ({error})", _SIGNATURE) from None


def _refused(settings: OptimConfig, rule: str, works: str) -> Exception:
    return config_error("optim.spec", settings.spec, rule, works)
