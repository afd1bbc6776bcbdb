"""Gradients rounded to bfloat16; what rounding takes off is added to the next batch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.state.compression.method import Method, add
from hybridpar.state.compression.wire import Reader


class Rounded(Method):
    """A message has each element once, in two bytes; messages of all ranks are added up in the gradients' type."""

    name, rounds = "bf16", 1

    def most_bytes(self) -> int:
        return torch.bfloat16.itemsize * sum(entry.numel for entry in self.packed)

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: a broadcast for each rank."""
        for entry in self.packed:
            rounded, kept = message.take(entry.numel, torch.bfloat16), self.feedback.next_kept[entry.name].view(-1)
            rounded.copy_(kept)
            add(kept, rounded, alpha=-1.0)
            self.sent.elements += entry.numel
        self.sent.num_bytes += message.num_bytes
        yield self.wire.gather([message.num_bytes] * self.axis.size)
        for rank, reader in enumerate(self.messages()):
            for gradient in gradients:
                add(gradient.view(-1), reader.take(gradient.numel(), torch.bfloat16), overwrite=rank == 0)
