"""Tensors whose memory comes and goes, while their views stay: whole chunks (ZeRO), and items on a
GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """While in it, this thread's work goes to a stream; None: changes nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class TensorRegion:
    """A tensor whose memory is taken and given back; meanwhile it and its views have no content.

    tensor: all of its storage. view: the same, from which autograd does not notice that content has
    come back. stream: memory is taken on it; None: on the current one. On a stream of its own no
    memory is taken that the launch thread's may still use.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None = None):
        self.tensor = tensor
        self.view = tensor.data
        self.num_bytes = tensor.nbytes
        self._stream = stream

    @property
    def is_here(self) -> bool:
        return self.tensor.untyped_storage().nbytes() > 0

    def take(self) -> None:
        """Takes memory, whose content is anything."""
        with on(self._stream):
            self._resize(self.num_bytes)

    def give_back(self) -> None:
        """Gives the memory back."""
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        self.tensor.untyped_storage().resize_(num_bytes)

    def another(self) -> TensorRegion:
        """One of the same size, of zeros, in the current stream's memory: for the launch thread to
        read."""
        found = TensorRegion(torch.empty_like(self.tensor))
        found.clear()
        return found

    def clear(self) -> None:
        """Makes it zeros, for all streams."""
        with on(self._stream):
            self.view.zero_()
            if self.view.is_cuda:
                torch.cuda.current_stream(self.view.device).synchronize()


@contextmanager
def taken(regions: Iterable[TensorRegion]) -> Iterator[None]:
    """While in it, these have memory. The content of those that had none before is lost
    afterwards."""
    absent = [region for region in regions if not region.is_here]
    for region in absent:
        region.take()
    try:
        yield
    finally:
        for region in absent:
            region.give_back()
