"""Loads of experts: how many tokens of a batch each expert got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.config.capabilities import RoutedExperts

Loads = Mapping[int, Sequence[int]]
"""Tokens that count, by block with experts, then by expert."""


def flat_loads(
    experts: RoutedExperts | None, loads: Mapping[int, Tensor], device: torch.device
) -> Tensor:
    """Return the loads of all blocks one after the other; a missing block counts as 0.

    Shapes: [experts] for each block -> [blocks * experts], float64; empty without experts.
    """
    if experts is None:
        return torch.zeros(0, device=device)
    none = torch.zeros(experts.number, dtype=torch.float64, device=device)
    return torch.cat([none[:0], *(loads.get(block, none) for block in experts.blocks)])


def loads_by_block(experts: RoutedExperts, counts: Sequence[float]) -> Loads:
    """Return the loads of each block, from the counts of all blocks one after the other."""
    number = experts.number
    starts = range(0, len(counts), number)
    return {
        block: [round(count) for count in counts[start : start + number]]
        for block, start in zip(experts.blocks, starts, strict=True)
    }


def max_violation(loads: Loads) -> float | None:
    """Return MaxVio: by how much the busiest expert exceeds the mean load, as a share of the mean,
    in the block where that is the most; None if no token counts.

    Source: arXiv 2408.15664, section 3.
    """
    counted = [load for load in loads.values() if any(load)]
    return max((max(load) * len(load) / sum(load) - 1 for load in counted), default=None)
