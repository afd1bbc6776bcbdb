"""What a rank keeps of training: versions of the weights, gradients, and who reduces and updates which part of them."""

from hybridpar.state.audit import Mismatch, audit_replicas, replicas_along
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.partition import Partition, Route
from hybridpar.state.reducer import GradientReducer

__all__ = [
    "GradientAccumulator", "GradientReducer", "Mismatch", "Partition", "Route", "audit_replicas", "replicas_along",
]
