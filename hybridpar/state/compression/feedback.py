"""What this rank has not sent of its gradients, and what a method has learned: at the last update, and at the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.state.chunks import Buffer, Memory
from hybridpar.state.layout import FlatLayout

Shapes = Mapping[str, Sequence[int]]


class Feedback:
    """Two states of error feedback: the settled one, which a batch begins with, and what that batch leaves behind.

    `close` makes the one the other, once the batch's update has been made; if it was skipped, nothing has happened.
    kept: by parameter, in the units of the summed gradient. learned: by 'parameter.what'; zeros: nothing yet.
    """

    def __init__(self, kept: Shapes, learned: Shapes, dtype: torch.dtype, memory: Memory):
        layouts = [FlatLayout(list(shapes), list(shapes.values()), dtype) for shapes in (kept, learned)]
        self._states = [[Buffer(layout, dtype, memory, (), f"feedback/{i}") for layout in layouts] for i in range(2)]
        self._views = [[buffer.views() for buffer in state] for state in self._states]
        self._settled, self._is_open = 0, False

    @property
    def kept(self) -> dict[str, Tensor]:
        """What was not sent so far."""
        return self._views[self._settled][0]

    @property
    def learned(self) -> dict[str, Tensor]:
        """What the method has learned so far."""
        return self._views[self._settled][1]

    @property
    def next_kept(self) -> dict[str, Tensor]:
        """What will not have been sent after the batch that is under way."""
        return self._views[1 - self._settled][0]

    @property
    def next_learned(self) -> dict[str, Tensor]:
        """What the method will have learned then; the method sets all of it in every batch."""
        return self._views[1 - self._settled][1]

    def open(self) -> None:
        """A batch begins to be sent."""
        assert not self._is_open, "the update of the batch before is not made"
        self._is_open = True

    def close(self, *, made: bool) -> None:
        """The update of the batch is made, or skipped; nothing happens where none was sent."""
        if self._is_open and made:
            self._settled = 1 - self._settled
        self._is_open = False

    @property
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Memory of the settled state, and of the next one."""
        settled, following = ([tensor for buffer in state for tensor in buffer.tensors] for state in self._states)
        return settled, following
