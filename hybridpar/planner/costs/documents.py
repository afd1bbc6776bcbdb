"""Cost of blocks with packed documents, derived from their cost in rows of one document each.

Attention takes time in proportion to the pairs of a query and a visible key, everything else the
same time as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridpar.config import Config
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.prediction.work import document_shares


def within_documents(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Return the costs of blocks with documents of `data.document_length`, by kind.

    Args:
        costs: Costs with one document a row.
    """
    shares = document_shares(config.model, config.data.document_length)
    return {kind: _shortened(cost, 1 - shares[kind]) for kind, cost in costs.items()}


def _shortened(cost: BlockCost, saved: float) -> BlockCost:
    """Return the cost without a share of attention's time. While the device waits for launches,
    shorter kernels make it wait longer."""
    forward = saved * cost.forward_attention
    backward = saved * cost.backward_attention
    forward_idle = forward if cost.forward_idle else 0.0
    backward_idle = backward if cost.backward_idle else 0.0
    return replace(
        cost,
        forward=cost.forward - forward + forward_idle,
        backward=cost.backward - backward + backward_idle,
        forward_idle=cost.forward_idle + forward_idle,
        backward_idle=cost.backward_idle + backward_idle,
        backward_input=max(0.0, cost.backward_input - backward),
        forward_attention=cost.forward_attention - forward,
        backward_attention=cost.backward_attention - backward,
    )
