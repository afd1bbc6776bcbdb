"""The training state of a rank: weight versions, gradients, optimizer state."""

from hybridpar.state.audit import Mismatch, audit_replicas, find_divergence, replicas_along
from hybridpar.state.gradients import AccumulationRules, GradientAccumulator
from hybridpar.state.policy import StatePolicy
from hybridpar.state.rank import RankState
from hybridpar.state.reduction.partition import Partition, Route
from hybridpar.state.reduction.reducer import GradientReducer

__all__ = [
    "AccumulationRules",
    "GradientAccumulator",
    "GradientReducer",
    "Mismatch",
    "Partition",
    "RankState",
    "Route",
    "StatePolicy",
    "audit_replicas",
    "find_divergence",
    "replicas_along",
]
