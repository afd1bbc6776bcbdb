"""The use of each parameter: the segments of a rank that compute with it, and the part of an UPDATE
it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from hybridpar.nn.placement import Held, Placement, has_shared_rows
from hybridpar.state.residency.chunks import WHOLE, BufferUsage


def layout_run(placement: Placement) -> int:
    """Return the rank of a parameter in the order of the layout: tied, replicated, sharded, and
    last sharded with rows on several tp ranks. Each of these runs is contiguous, because its
    gradients are reduced separately.
    """
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
) -> Callable[[str], BufferUsage]:
    """Return a function from a parameter's name to its use, on a rank whose blocks are in these
    segments.

    Parameters whose gradients are reduced over the ranks of a layer stay resident. So do norms and
    biases, which are small, unless they lie between the matrices.

    Args:
        parts: Blocks of each segment.
        blocks: The blocks that have a parameter; a tied one may be in several.
        elementwise: Every element is updated independently; else all are updated together.
        alone: The pipeline has one rank. Else a tied weight stays, too, because its gradient waits
            for the other end.
    """
    if not parts:
        return lambda name: WHOLE
    stay = {1, 3} if any(layout_run(placement) == 2 for placement in placements.values()) else {3}
    part_of = {
        block: number for number, blocks_of_part in enumerate(parts) for block in blocks_of_part
    }

    @cache
    def use(name: str) -> BufferUsage:
        placement = placements[name]
        if (
            layout_run(placement) in stay
            or (placement.tied and not alone)
            or placement.along("tp") is Held.PARTIAL
        ):
            return BufferUsage(tuple(range(len(parts))), stays=True)
        needed = tuple(sorted({part_of[block] for block in blocks[name]}))
        return BufferUsage(needed, needed[0] if elementwise else 0)

    return use
