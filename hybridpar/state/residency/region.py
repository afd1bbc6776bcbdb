"""Tensors whose memory is allocated and freed while their views stay valid: unsharded chunks
(ZeRO), and items on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which this thread's work goes to a stream; None: the current stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class TensorRegion:
    """A tensor whose memory is allocated and freed. While it is freed, the tensor and its views
    have no content.

    Args:
        tensor: The tensor. It must span its storage.
        stream: Memory is allocated on this stream; None: on the current one. A separate stream
            never gets memory that the launch thread's stream may still use.

    Attributes:
        view: The same tensor, detached so that autograd does not notice that content has come back.
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
        """Allocate the memory; its content is undefined."""
        with on(self._stream):
            self._resize(self.num_bytes)

    def give_back(self) -> None:
        """Free the memory."""
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        self.tensor.untyped_storage().resize_(num_bytes)

    def another(self) -> TensorRegion:
        """Return a region of the same size, zeros, on the current stream: the launch thread's."""
        found = TensorRegion(torch.empty_like(self.tensor))
        found.clear()
        return found

    def clear(self) -> None:
        """Fill it with zeros, visible to all streams."""
        with on(self._stream):
            self.view.zero_()
            if self.view.is_cuda:
                torch.cuda.current_stream(self.view.device).synchronize()


@contextmanager
def taken(regions: Iterable[TensorRegion]) -> Iterator[None]:
    """Give regions memory in this context. If they had none, their content is then lost."""
    absent = [region for region in regions if not region.is_here]
    for region in absent:
        region.take()
    try:
        yield
    finally:
        for region in absent:
            region.give_back()
