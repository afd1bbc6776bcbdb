"""The uses of parameters: the parts of a rank that compute with each, and the part of an UPDATE it
belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from hybridpar.nn.placement import Held, Placement, has_shared_rows
from hybridpar.state.residency.chunks import WHOLE, Use


def layout_run(placement: Placement) -> int:
    """The place of a parameter in the layout: tied ones first, then replicated, then split, and
    last split ones with rows on several tp ranks. Each of these is contiguous, as its gradients are
    reduced apart."""
    if placement.tied or placement.shard is None:
        return 0 if placement.tied else 1
    return 3 if has_shared_rows(placement) else 2


def uses_of(
    parts: Sequence[range],
    placements: Mapping[str, Placement],
    blocks: Mapping[str, Sequence[int]],
    *,
    elementwise: bool,
    alone: bool = True,
) -> Callable[[str], Use]:
    """The use of each parameter by name, on a rank whose blocks are in these parts.

    Parameters whose gradients are summed over the ranks of a layer stay; so do norms and biases,
    which are small, if they do not lie between the matrices. `blocks`: those with a parameter; a
    tied one may be in several. `elementwise`: every element is updated on its own; else all
    together. `alone`: the pipeline has one rank. Else a tied weight stays too: its gradient waits
    for the other end.
    """
    if not parts:
        return lambda name: WHOLE
    stay = {1, 3} if any(layout_run(placement) == 2 for placement in placements.values()) else {3}
    part_of = {
        block: number for number, blocks_of_part in enumerate(parts) for block in blocks_of_part
    }

    @cache
    def use(name: str) -> Use:
        placement = placements[name]
        if (
            layout_run(placement) in stay
            or (placement.tied and not alone)
            or placement.along("tp") is Held.PARTIAL
        ):
            return Use(tuple(range(len(parts))), stays=True)
        needed = tuple(sorted({part_of[block] for block in blocks[name]}))
        return Use(needed, needed[0] if elementwise else 0)

    return use
