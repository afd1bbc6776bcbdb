"""Gradients over the dp axis: flat layout, accumulation into it, bucketed reduction that overlaps the backward."""

from hybridpar.dp.accumulate import GradientAccumulator
from hybridpar.dp.audit import Mismatch, audit_replicas, tp_replicas
from hybridpar.dp.buckets import Bucket, FlatLayout
from hybridpar.dp.reducer import GradientReducer

__all__ = ["Bucket", "FlatLayout", "GradientAccumulator", "GradientReducer", "Mismatch", "audit_replicas",
           "tp_replicas"]
