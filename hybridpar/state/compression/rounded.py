"""The base of methods that send every element of a gradient in fewer bits. The rounding error is
added to the next batch's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.config import Config
from hybridpar.state.compression.method import PIECE, Method, add
from hybridpar.state.compression.wire import Reader
from hybridpar.state.reduction.precision import Precision


class Rounded(Method):
    """Sends all elements, piece by piece. The messages of all ranks are added in the type of the
    gradients.
    """

    rounds = 1

    @cached_property
    def _form(self) -> Precision:
        return Precision(self.name, self.dtype, self.kernels.quantize)

    def most_bytes(self) -> tuple[int, int]:
        return sum(
            self._form.num_bytes(min(PIECE, entry.numel - start))
            for entry in self.packed
            for start in range(0, entry.numel, PIECE)
        ), 0

    @classmethod
    def element_bytes(cls, config: Config, item: int) -> float:
        return Precision.bytes_per_number(cls.name, item)

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: a broadcast for each rank."""
        for entry in self.packed:
            for piece in self.feedback.next_kept[entry.name].view(-1).split(PIECE):
                part = message.take(self._form.size(len(piece)), self._form.unit)
                self._form.write(part, piece)
                piece.sub_(self._form.read(torch.empty_like(piece), part))
        self.sent.add(sum(entry.numel for entry in self.packed), message.num_bytes)
        yield self.wire.gather([message.num_bytes] * self.axis.size)
        messages = list(self.messages())
        for total in self.totals(gradients):
            for rank, reader in enumerate(messages):
                for piece in total.view(-1).split(PIECE):
                    part = reader.take(self._form.size(len(piece)), self._form.unit)
                    add(piece, self._form.read(torch.empty_like(piece), part), overwrite=rank == 0)
