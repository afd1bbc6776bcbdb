"""Compressed all-reduce of gradients: a batch sends a part of the gradient, and the unsent rest is
added to the next gradient (error feedback).
"""

from hybridpar.state.compression.exchange import BatchGradients, Compression
from hybridpar.state.compression.stream import Exchange

__all__ = ["BatchGradients", "Compression", "Exchange"]
