"""Sums of gradients over replicas in fewer bytes: a batch sends a part, the rest is added to the
next gradient."""

from hybridpar.state.compression.exchange import Compression, Exchange

__all__ = ["Compression", "Exchange"]
