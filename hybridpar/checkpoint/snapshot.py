"""A copy of a rank's state in host memory, made while training does what does not change that
state.

    save          forward, backward ........................  UPDATE
    begin         copying, in a thread (GPUs: in the stream)  waits for its end

So training stands still only where a copy takes longer than a batch up to its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 64

Finish = Callable[[], dict[str, Tensor]]


class Snapshot:
    """Memory for a copy of the state, reused for the next copy; pinned if the tensors are on a
    GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Allocate the memory that a copy of such tensors needs, unless there is enough."""
        tensors = list(tensors)
        needed = sum(_padded(t.nbytes) for t in tensors)
        if needed > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # not both at once
            self._memory = torch.empty(
                needed, dtype=torch.uint8, pin_memory=any(t.is_cuda for t in tensors)
            )

    def begin(self, tensors: Mapping[str, Tensor]) -> Finish:
        """Start a copy, and return a function that waits for it, in any thread, and returns the
        copies.

        Until it has returned, tensors on the CPU must not change; tensors on a GPU may, by later
        work of the current stream. The copies stay valid until `begin` is called again.
        """
        self.reserve(tensors.values())
        copies = self._places(tensors)
        if not any(t.is_cuda for t in tensors.values()):
            return lambda: _copy(tensors, copies)
        _copy(tensors, copies)
        done = torch.cuda.Event()
        done.record()

        def wait() -> dict[str, Tensor]:
            done.synchronize()
            return copies

        return wait

    def _places(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        places = {}
        at = 0
        for name, tensor in tensors.items():
            size = prod(tensor.shape) * tensor.element_size()
            places[name] = self._memory[at : at + size].view(tensor.dtype).view(tensor.shape)
            at += _padded(size)
        return places


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], copies: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        copies[name].copy_(tensor, non_blocking=True)
    return copies


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
