"""The work of a parameter's update, computed from its shape."""

from __future__ import annotations

from hybridpar.config import OptimConfig
from hybridpar.nn.placement import Placement
from hybridpar.optim.newton_schulz import newton_schulz_cost

_BYTES = {"adamw": 32, "lamb": 48, "muon": 40, "own": 32, "sgd": 20}
"""Bytes that an update reads and writes for each element, in float32: weight, gradient and
state, and then zeros in the gradient. "muon" counts hidden matrices."""
_NORM_BYTES = 4
"""Bytes that the gradient norm reads for each element."""
_STALENESS_BYTES = {"extrapolation": 12, "prediction": 4}
"""Further bytes that a remedy for stale gradients reads and writes."""


def update_work(settings: OptimConfig, placement: Placement) -> tuple[int, int]:
    """Return the work of the gradient norm and one update of a parameter.

    Returns: operations of matrix products, and bytes of memory that are read and written.
    """
    numel = 1
    operations = 0
    for size in placement.shape:
        numel *= size
    name = settings.name
    if name == "muon" and placement.matrices:
        for ranges in placement.matrices:
            rows = sum(stop - start for start, stop in ranges)
            operations += 2 * newton_schulz_cost(rows, placement.shape[1])
    elif name == "muon":
        name = "adamw"
    return operations, numel * (
        _BYTES[name] + _NORM_BYTES + _STALENESS_BYTES.get(settings.staleness, 0)
    )
