"""The table of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.optim.adamw import AdamW, NAdamW
from hybridpar.optim.base import Optimizer
from hybridpar.optim.custom_rule import Own
from hybridpar.optim.extrapolation import Extrapolation
from hybridpar.optim.lamb import Lamb
from hybridpar.optim.muon import Muon
from hybridpar.optim.sgd import SGD
from hybridpar.optim.sign_steps import SignSteps, WithSignSteps
from hybridpar.optim.slots import ParameterSlot

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "lamb": Lamb,
    "muon": Muon,
    "own": Own,
    "sgd": SGD,
}
NESTEROV: dict[str, type[Optimizer]] = {"adamw": NAdamW, "muon": Muon, "sgd": SGD}
"""Optimizers with a Nesterov form, for staleness = "nesterov"; they run with `nesterov` set."""


def divisible(settings: OptimConfig, slot: ParameterSlot) -> bool:
    """Whether the optimizer that `settings` name may get flat pieces of this parameter (see
    Optimizer)."""
    return OPTIMIZERS[settings.name].divisible(slot)


def divides_all(settings: OptimConfig) -> bool:
    """Whether an optimizer may get flat pieces of every parameter: it has no rule of its own."""
    return "divisible" not in vars(OPTIMIZERS[settings.name])


def build_optimizer(
    settings: OptimConfig, slots: Sequence[ParameterSlot], tp: Axis, backend: str = "auto"
) -> Optimizer:
    """Build the optimizer that `settings.name` and `settings.staleness` name, for a rank's
    parameters; parameters with sign steps have these instead.

    Staleness "lr_rescale" is left to `learning_rate`, "prediction" to the owner of the weights.

    Args:
        backend: The backend of its elementwise passes (kernels.optimizer).
    """
    usual = [slot for slot in slots if not slot.placement.sign_step]
    optimizer = _build(settings, usual, tp, backend)
    if len(usual) == len(slots):
        return optimizer
    signed = [slot for slot in slots if slot.placement.sign_step]
    return WithSignSteps(optimizer, SignSteps(signed, settings, tp, backend), slots)


def _build(
    settings: OptimConfig, slots: Sequence[ParameterSlot], tp: Axis, backend: str
) -> Optimizer:
    if settings.staleness == "nesterov":
        return NESTEROV[settings.name](slots, replace(settings, nesterov=True), tp, backend)
    optimizer = OPTIMIZERS[settings.name](slots, settings, tp, backend)
    return Extrapolation(optimizer) if settings.staleness == "extrapolation" else optimizer
