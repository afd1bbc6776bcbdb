"""Offload the activations that micro-batches keep from forward to backward, and reload them.

    F          notes the memory that autograd saves (hooks of saved tensors)
    OFFLOAD    starts to write it; EVICT waits for that, and frees the memory
    RELOAD     allocates memory again, and starts to read; the backward waits for that

A block of memory moves once, whatever the number of its views, and these are valid again
afterwards. Only blocks that nobody but the micro-batch holds are offloaded. Weights and an output
that is being sent stay, because others hold them. Integers and blocks smaller than a page stay,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpar.runtime.slow_tier import SlowTier
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import AWAITS_ACTIVATIONS, Kind
from hybridpar.state.residency.store import PAGE


class Storages:
    """Finds the block of memory that a tensor is on: its storage."""

    def key(self, tensor: Tensor) -> object:
        """Return a key, equal for tensors that share memory; None: it cannot move."""
        storage = tensor.untyped_storage()
        return storage._cdata if storage.resizable() else None

    def num_holders(self, tensor: Tensor) -> int:
        """Return the number of tensors that share the memory of this one, itself included."""
        holders: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return holders - 1  # without the handle that this query takes

    def num_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of the tensor's block."""
        return tensor.untyped_storage().nbytes()

    def content(self, tensor: Tensor) -> Tensor:
        """Return the complete block as a flat tensor."""
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )

    def resize(self, content: Tensor, num_bytes: int) -> None:
        """Free a block (0 bytes), or allocate it again."""
        content.untyped_storage().resize_(num_bytes)


STORAGES = Storages()


@dataclass(slots=True)
class _Block:
    """A block of memory. tensor: any tensor on it. num_holders: known tensors on it."""

    tensor: Tensor
    num_holders: int = 0


class Notes:
    """The memory that autograd saves for the code that runs in `noting`."""

    def __init__(self, blocks: Storages = STORAGES):
        self._blocks = blocks
        self._found = dict[object, _Block]()

    @contextmanager
    def noting(self, leaf: Tensor | None) -> Iterator[None]:
        """Note the tensors that autograd saves here. leaf: the input, which its caller keeps."""
        with saved_tensors_hooks(self._pack, _same):
            yield
        if leaf is not None and (block := self._found.get(self._blocks.key(leaf))) is not None:
            block.num_holders += 1

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # a saved output would keep its own graph alive
        if tensor.is_floating_point() and self._blocks.num_bytes(tensor) >= PAGE:
            key = self._blocks.key(tensor)
            if key is not None:
                self._found.setdefault(key, _Block(tensor)).num_holders += 1
        return tensor

    def alone(self) -> list[Tensor]:
        """Return a tensor for each block of memory that nobody else holds."""
        return [
            block.tensor
            for block in self._found.values()
            if self._blocks.num_holders(block.tensor) == block.num_holders
        ]

    def num_bytes(self) -> int:
        """Return the bytes of the blocks in `alone`."""
        return sum(map(self._blocks.num_bytes, self.alone()))

    def forget(self) -> None:
        """Leave the memory to autograd, which holds these notes until the backward has run."""
        self._found.clear()


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class _Kept:
    """Activations that a micro-batch keeps on a stage.

    Attributes:
        content: Blocks that move.
        sizes: Bytes of each.
        place: Where the slow tier holds them.
        moving: The move under way.
    """

    notes: Notes
    content: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    place: Any = None
    moving: Future[None] | None = None

    def is_here(self) -> bool:
        """Return whether no move is under way."""
        return self.moving is None or self.moving.done()

    def wait(self) -> None:
        if self.moving is not None:
            self.moving.result()
            self.moving = None


class ActivationOffloader:
    """Offloads the activations of a rank's micro-batches, as its plan says.

    Args:
        tier: Holds what is offloaded; None: the plan offloads nothing.

    Attributes:
        listeners: Called with each block freed or allocated.
        num_bytes: Bytes offloaded so far.
    """

    def __init__(self, tier: SlowTier | None = None, blocks: Storages = STORAGES):
        self.tier = tier or SlowTier()
        self._is_used = tier is not None
        self._blocks = blocks
        self.listeners: list[Callable[[Tensor], object]] = []
        self._kept: dict[tuple[int, int], _Kept] = {}  # by stage and micro-batch
        self.num_bytes = 0

    def noting(self, action: Action, leaf: Tensor | None) -> AbstractContextManager[None]:
        """Return the context for a forward. leaf: its input, if it has one."""
        if not self._is_used:
            return nullcontext()
        return self._kept.setdefault(
            (action.stage, action.microbatch), _Kept(Notes(self._blocks))
        ).notes.noting(leaf)

    def move(self, action: Action) -> Callable[[], bool] | None:
        """Carry out an OFFLOAD, EVICT or RELOAD; return a function that tells whether what it starts
        is complete, or None if it starts nothing.
        """
        kept = self._kept[action.stage, action.microbatch]
        if action.kind is Kind.EVICT:
            for content in kept.content:
                self._resize(content, 0)
            return None
        if action.kind is Kind.OFFLOAD:
            self._offload(kept)
        else:
            self._reload(kept)
        return kept.is_here

    def _offload(self, kept: _Kept) -> None:
        """Start to write activations."""
        tensors = kept.notes.alone()
        kept.content = list(map(self._blocks.content, tensors))
        kept.sizes = list(map(self._blocks.num_bytes, tensors))
        self.num_bytes += sum(kept.sizes)
        kept.place, kept.moving = self.tier.write(kept.content)

    def _reload(self, kept: _Kept) -> None:
        """Allocate memory, and start to read."""
        for content, size in zip(kept.content, kept.sizes, strict=True):
            self._resize(content, size)
        kept.moving = self.tier.read(kept.place, kept.content)

    def _resize(self, content: Tensor, num_bytes: int) -> None:
        self._blocks.resize(content, num_bytes)
        for listener in self.listeners:
            listener(content)

    def are_here(self, action: Action) -> bool:
        """Return whether `access` would return without waiting."""
        kept = self._accessed(action)
        return kept is None or kept.is_here()

    def access(self, action: Action) -> None:
        """Wait until the activations that an EVICT frees are written, or until the activations of a
        backward are resident, and leave these to autograd.
        """
        if (kept := self._accessed(action)) is None:
            return
        kept.wait()
        if action.kind is not Kind.EVICT:
            kept.notes.forget()
            del self._kept[action.stage, action.microbatch]

    def _accessed(self, action: Action) -> _Kept | None:
        """Return the activations that an action waits for; None if it waits for none."""
        if action.kind not in AWAITS_ACTIVATIONS:
            return None
        return self._kept.get((action.stage, action.microbatch))

    @property
    def left(self) -> list[tuple[int, int]]:
        """Stages and micro-batches that still keep activations."""
        return list(self._kept)
