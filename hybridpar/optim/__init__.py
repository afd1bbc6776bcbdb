"""Optimizers over placed parameters, gradient norm and clipping, loss scaling, learning-rate
schedules."""

from hybridpar.optim.adamw import AdamW, NAdamW
from hybridpar.optim.base import Optimizer
from hybridpar.optim.extrapolation import Extrapolation
from hybridpar.optim.grouped import GroupedOptimizer
from hybridpar.optim.lamb import Lamb
from hybridpar.optim.loss_scale import LossScaler
from hybridpar.optim.muon import Muon
from hybridpar.optim.norm import clip_scale
from hybridpar.optim.registry import OPTIMIZERS, build_optimizer, divides_all, divisible
from hybridpar.optim.schedule import learning_rate
from hybridpar.optim.sgd import SGD
from hybridpar.optim.slots import ParameterSlot

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "Extrapolation",
    "GroupedOptimizer",
    "Lamb",
    "LossScaler",
    "Muon",
    "NAdamW",
    "Optimizer",
    "ParameterSlot",
    "build_optimizer",
    "clip_scale",
    "divides_all",
    "divisible",
    "learning_rate",
]
