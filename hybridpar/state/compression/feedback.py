"""The unsent rest of this rank's gradients, and what a method has learned: at the last update, and
at the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import Buffer, Memory

Shapes = Mapping[str, Sequence[int]]
NONE: Mapping[str, Tensor] = MappingProxyType({})


class Feedback:
    """Two states of error feedback: the settled one, which a batch begins with, and what that batch
    leaves behind.

    `close` settles what the batch leaves, if its update was made; a skipped update changes nothing.
    kept: by parameter, in the units of the summed gradient. learned: by 'parameter.what'; zeros:
    nothing yet. scaled: those of them in the same units. If losses are scaled, so are these, but
    only while a batch is sent: the next batch may have another scale. in_place: a batch's gradients
    become its unsent rest, which needs no other memory.
    """

    def __init__(
        self,
        kept: Shapes,
        learned: Shapes,
        dtype: torch.dtype,
        memory: Memory,
        scaled: Collection[str] = (),
        *,
        in_place: bool = False,
    ):
        layouts = [
            FlatLayout(list(shapes), list(shapes.values()), dtype) for shapes in (kept, learned)
        ]
        self._states = [
            [
                Buffer(layout, dtype, memory, (), f"feedback/{i}")
                for layout in layouts[in_place * i :]
            ]
            for i in range(2)
        ]
        self._views = [[buffer.views() for buffer in state] for state in self._states]
        self._settled = 0
        self._is_open = False
        self._in_place = in_place
        self._gradients: Mapping[str, Tensor] = {}
        self._scale = 1.0
        self._scaled = scaled

    @property
    def kept(self) -> dict[str, Tensor]:
        """The unsent rest so far."""
        return self._views[0 if self._in_place else self._settled][0]

    @property
    def learned(self) -> dict[str, Tensor]:
        """What the method has learned so far."""
        return self._views[self._settled][-1]

    @property
    def next_kept(self) -> Mapping[str, Tensor]:
        """The unsent rest after the batch that is under way."""
        return self._gradients if self._in_place else self._views[1 - self._settled][0]

    @property
    def next_learned(self) -> dict[str, Tensor]:
        """What the method will have learned then; the method sets all of it in every batch."""
        return self._views[1 - self._settled][-1]

    def open(self, scale: float = 1.0, gradients: Mapping[str, Tensor] = NONE) -> None:
        """Begins to send a batch, whose gradients are multiplied by `scale`. gradients: these, by
        parameter."""
        assert not self._is_open, "the update of the batch before is not made"
        self._is_open = True
        self._scale = scale
        self._gradients = gradients
        self._multiply(scale)

    def close(self, *, made: bool) -> None:
        """Ends the batch, whose update is made or skipped; does nothing if none was sent."""
        if self._is_open and made:
            for name, x in self.kept.items() if self._in_place else ():
                x.copy_(self._gradients[name])
            self._settled = 1 - self._settled
        if self._is_open:
            self._multiply(1 / self._scale)
        self._is_open = False

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        """Brings the settled state to other units; exact if the factor is a power of two."""
        if factor != 1:
            for tensor in (*self.kept.values(), *(self.learned[name] for name in self._scaled)):
                tensor.mul_(factor)

    @property
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Memory of the settled state, and of the next one."""
        settled, following = (
            [tensor for buffer in state for tensor in buffer.tensors] for state in self._states
        )
        return settled, following
