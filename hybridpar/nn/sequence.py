"""Sequence parallelism: between the split layers, each rank of tp holds rows of every sample.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridpar.grid import Axis
from hybridpar.nn.placement import split_sizes


class SequencePart(NamedTuple):
    """Rows of each sample that a rank holds: `length` of them from row `start` on.

    Attributes:
        sizes: Number of rows of every rank of the axis; None if all ranks hold all rows.
    """

    start: int
    length: int
    sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, length: int, axis: Axis, split: bool) -> SequencePart:
        """Return this rank's part of `length` rows; all rows unless they are `split`."""
        if not split:
            return cls(0, length, None)
        sizes = split_sizes(length, axis.size)
        return cls(sum(sizes[: axis.rank]), sizes[axis.rank], sizes)
