"""Error feedback: the unsent rest of this rank's gradients, and the tensors that a compression
method has learned. Both are kept for the last update and for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import WHOLE, Buffer, BufferUsage, Memory, cut

Shapes = Mapping[str, Sequence[int]]
NONE: Mapping[str, Tensor] = MappingProxyType({})
FEEDBACK = "feedback/"
"""Prefix of the kinds of both states; their numbers follow."""


@dataclass(frozen=True)
class FeedbackShapes:
    """The tensors of a state of error feedback.

    Attributes:
        kept: Shapes of the unsent rests, by parameter. Units: as the all-reduced gradient.
        learned: Shapes of the learned tensors, by 'parameter.what'; all zeros means that nothing
            was learned yet.
        scaled: Learned tensors that have the units of the gradient. While a batch is being sent,
            these and the unsent rests are multiplied by the loss scale; afterwards they are divided
            again, because the next batch may have another scale.
    """

    kept: Shapes
    learned: Shapes
    scaled: Collection[str] = ()


class Feedback:
    """Two states of error feedback: the committed state that a batch starts from, and the state
    that the batch produces.

    `close` commits the new state if the batch's update was made; a skipped update changes nothing.

    Args:
        shapes: The tensors of each state.
        dtype: Type of the tensors.
        memory: Allocates buffers.
        uses: Returns a parameter's use by its name; unsent rests are cut into chunks of equal use.
            Learned tensors always stay in memory.
        in_place: A batch's gradients become its unsent rest, which then needs no other memory.

    Attributes:
        device: Device of the tensors.
    """

    def __init__(
        self,
        shapes: FeedbackShapes,
        dtype: torch.dtype,
        memory: Memory,
        *,
        uses: Callable[[str], BufferUsage] = lambda name: WHOLE,
        in_place: bool = False,
    ):
        self.dtype = dtype
        self.device = memory.device
        layouts = [FlatLayout(part, dtype) for part in (shapes.kept, shapes.learned)]
        cuts = [cut(layouts[0], uses), cut(layouts[1], lambda name: BufferUsage(stays=True))]
        parts = list(zip(layouts, cuts, strict=True)) if shapes.kept or shapes.learned else []
        self._states = [
            [
                Buffer(layout, dtype, memory, chunks, f"{FEEDBACK}{i}")
                for layout, chunks in parts[in_place * i :]
            ]
            for i in range(2)
        ]
        self._views = [[buffer.views() for buffer in state] or [{}] for state in self._states]
        self._settled = 0
        self._is_open = False
        self._in_place = in_place
        self._gradients: Mapping[str, Tensor] = {}
        self._scale = 1.0
        self._scaled = shapes.scaled

    @property
    def kept(self) -> dict[str, Tensor]:
        """The committed unsent rest, by parameter."""
        return self._views[0 if self._in_place else self._settled][0]

    @property
    def learned(self) -> dict[str, Tensor]:
        """The committed learned tensors, by 'parameter.what'."""
        return self._views[self._settled][-1]

    @property
    def next_kept(self) -> Mapping[str, Tensor]:
        """The unsent rest that the batch under way produces."""
        return self._gradients if self._in_place else self._views[1 - self._settled][0]

    @property
    def next_learned(self) -> dict[str, Tensor]:
        """The learned tensors that the batch under way produces. The method writes all of them in
        every batch.
        """
        return self._views[1 - self._settled][-1]

    def open(self, scale: float = 1.0, gradients: Mapping[str, Tensor] = NONE) -> None:
        """Start to send a batch whose gradients, `gradients` by parameter, are multiplied by
        `scale`.
        """
        assert not self._is_open, "the update of the batch before is not made"
        self._is_open = True
        self._scale = scale
        self._gradients = gradients
        self._multiply(scale)

    def close(self, *, made: bool) -> None:
        """End the batch. `made`: its update was made, not skipped. Do nothing if no batch was
        sent.
        """
        if self._is_open and made:
            for name, x in self.kept.items() if self._in_place else ():
                x.copy_(self._gradients[name])
            self._settled = 1 - self._settled
        if self._is_open:
            self._multiply(1 / self._scale)
        self._is_open = False

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        """Convert the committed state to other units; exact if the factor is a power of two."""
        if factor != 1:
            for tensor in (*self.kept.values(), *(self.learned[name] for name in self._scaled)):
                tensor.mul_(factor)

    @property
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Memory of the committed state, and of the next one."""
        settled, following = (
            [tensor for buffer in state for tensor in buffer.tensors] for state in self._states
        )
        return settled, following
