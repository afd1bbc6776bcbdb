"""The tensors that micro-batches keep from forward to backward, and their way to the slow tier and
back.

    F          notes the memory that autograd keeps                                 (hooks of saved tensors)
    OFFLOAD    starts to write it; EVICT waits for that, and frees the memory
    RELOAD     takes memory again, and starts to read; the backward waits for that

A block of memory moves once, whatever the number of its views, and these are valid again
afterwards. Only blocks that the micro-batch alone holds move. What anybody else holds stays:
weights, an output that is being sent. So do integers, and blocks smaller than a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpar.runtime.slow_tier import SlowTier
from hybridpar.schedules.action import Action
from hybridpar.state.residency.store import PAGE


class Blocks(Protocol):
    """Tells which block of memory a tensor is on."""

    def key(self, tensor: Tensor) -> object:
        """Equal for tensors that share memory; None: this memory cannot move."""

    def num_holders(self, tensor: Tensor) -> int:
        """Number of tensors that share the memory of this one, itself included."""

    def num_bytes(self, tensor: Tensor) -> int:
        """Bytes of all that memory."""

    def content(self, tensor: Tensor) -> Tensor:
        """All that memory, flat."""

    def resize(self, content: Tensor, num_bytes: int) -> None:
        """Gives that memory back (0), or takes it anew."""


class _Storages:
    """Memory of real tensors."""

    def key(self, tensor: Tensor) -> object:
        storage = tensor.untyped_storage()
        return storage._cdata if storage.resizable() else None

    def num_holders(self, tensor: Tensor) -> int:
        holders: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return holders - 1  # what asks

    def num_bytes(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def content(self, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )

    def resize(self, content: Tensor, num_bytes: int) -> None:
        content.untyped_storage().resize_(num_bytes)


STORAGES = _Storages()


@dataclass(slots=True)
class _Block:
    """A block of memory. tensor: any one on it; num_holders: known tensors on it."""

    tensor: Tensor
    num_holders: int = 0


class Notes:
    """The memory that autograd keeps for the code that runs in `noting`."""

    def __init__(self, blocks: Blocks = STORAGES):
        self._blocks = blocks
        self._found = dict[object, _Block]()

    @contextmanager
    def noting(self, leaf: Tensor | None) -> Iterator[None]:
        """leaf: the code's input, if any, which its caller keeps."""
        with saved_tensors_hooks(self._pack, _same):
            yield
        if leaf is not None and (block := self._found.get(self._blocks.key(leaf))) is not None:
            block.num_holders += 1

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # an output that is kept itself would keep its own graph
        if tensor.is_floating_point() and self._blocks.num_bytes(tensor) >= PAGE:
            key = self._blocks.key(tensor)
            if key is not None:
                self._found.setdefault(key, _Block(tensor)).num_holders += 1
        return tensor

    def alone(self) -> list[Tensor]:
        """A tensor for each block of memory that nobody else holds."""
        return [
            block.tensor
            for block in self._found.values()
            if self._blocks.num_holders(block.tensor) == block.num_holders
        ]

    def num_bytes(self) -> int:
        """Bytes of these blocks."""
        return sum(map(self._blocks.num_bytes, self.alone()))

    def forget(self) -> None:
        """Leaves the memory to autograd, which holds these notes until the whole backward is
        over."""
        self._found.clear()


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class _Kept:
    """What a micro-batch keeps on a stage, and where it is. sizes: bytes of each block that
    moves."""

    notes: Notes
    content: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    place: Any = None
    moving: Future[None] | None = None

    def wait(self) -> None:
        if self.moving is not None:
            self.moving.result()
            self.moving = None


class ActivationOffloader:
    """Moves what a rank's micro-batches keep, along its plan. listeners: called with each block
    freed or taken."""

    def __init__(self, tier: SlowTier, blocks: Blocks = STORAGES):
        self.tier = tier
        self._blocks = blocks
        self.listeners: list[Callable[[Tensor], object]] = []
        self._kept: dict[tuple[int, int], _Kept] = {}  # by stage and micro-batch
        self.num_bytes = 0
        """Bytes that have left so far."""

    def noting(self, action: Action, leaf: Tensor | None) -> AbstractContextManager[None]:
        """Context for a forward; leaf: its input, if it has one."""
        return self._kept.setdefault(
            (action.stage, action.microbatch), _Kept(Notes(self._blocks))
        ).notes.noting(leaf)

    def offload(self, action: Action) -> Callable[[], bool]:
        """Starts to write what a micro-batch keeps; the function that it returns says whether that
        is over."""
        kept = self._of(action)
        tensors = kept.notes.alone()
        kept.content = list(map(self._blocks.content, tensors))
        kept.sizes = list(map(self._blocks.num_bytes, tensors))
        self.num_bytes += sum(kept.sizes)
        kept.place, kept.moving = self.tier.write(kept.content)
        return kept.moving.done

    def evict(self, action: Action) -> None:
        """Waits until that is over, and frees the memory."""
        kept = self._of(action)
        kept.wait()
        for content in kept.content:
            self._resize(content, 0)

    def reload(self, action: Action) -> Callable[[], bool]:
        """Takes memory, and starts to read; the function that it returns says whether that is
        over."""
        kept = self._of(action)
        for content, size in zip(kept.content, kept.sizes, strict=True):
            self._resize(content, size)
        kept.moving = self.tier.read(kept.place, kept.content)
        return kept.moving.done

    def _resize(self, content: Tensor, num_bytes: int) -> None:
        self._blocks.resize(content, num_bytes)
        for listener in self.listeners:
            listener(content)

    def is_here(self, action: Action) -> bool:
        """Whether all that a backward needs is here."""
        kept = self._kept.get((action.stage, action.microbatch))
        return kept is None or kept.moving is None or kept.moving.done()

    def release(self, action: Action) -> None:
        """Waits until all that a backward needs is here, and leaves it to autograd."""
        if (kept := self._kept.pop((action.stage, action.microbatch), None)) is not None:
            kept.wait()
            kept.notes.forget()

    @property
    def left(self) -> list[tuple[int, int]]:
        """Stages and micro-batches that still keep anything."""
        return list(self._kept)

    def _of(self, action: Action) -> _Kept:
        return self._kept[action.stage, action.microbatch]
