"""Defines a kind of state, and who holds it; kinds.py lists them all."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol

from torch import Tensor

from hybridpar.optim import GroupedOptimizer, ParameterSlot
from hybridpar.state.compression import Compression
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.host import HostUpdates
from hybridpar.state.reduction.outer import OuterStep
from hybridpar.state.residency.chunks import Buffer, Memory, Use
from hybridpar.state.residency.shares import Shares
from hybridpar.state.weights import WeightStore, copy_all


class Stored(Protocol):
    """A checkpoint as a load sees it: any part of any tensor, whatever grid has saved it.

    Shapes: slot.shape. Raises: CheckpointError for what is missing or damaged.
    """

    def read(self, slot: ParameterSlot, kind: str, what: str = "") -> Tensor: ...
    def keeps(self, slot: ParameterSlot, kind: str, what: str) -> bool:
        """Whether such a tensor was kept for this parameter, or for any other one beside it."""

    def share(self, slot: ParameterSlot, kind: str) -> Tensor | None:
        """The sum of this rank's share of the tensors kept by the ranks that sum a parameter's
        gradient."""

    def same(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """The tensor kept by the rank at the same place in a grid of the same size; None: there was
        none."""

    def alike(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """The tensor kept by all ranks with the same part of the parameter; None: no rank had that
        part."""

    def newest(self, slot: ParameterSlot) -> Tensor:
        """The newest weights, neither rounded nor predicted."""

    def common(self, slot: ParameterSlot) -> Tensor:
        """The weights that all sites had in common last: the anchor, or of one site the newest
        weights."""

    def version(self, slot: ParameterSlot, version: int) -> Tensor:
        """The weights that the new run takes for that version."""


class Holder(Protocol):
    """The owner of the state: a RankState."""

    weights: WeightStore
    gradients: GradientAccumulator
    optimizer: GroupedOptimizer
    memory: Memory
    shares: list[Shares]
    host: HostUpdates | None
    outer: OuterStep | None
    compression: Compression | None

    def is_kept(self, use: Use) -> bool: ...


class StateKind(ABC):
    """One kind of state, of one rank.

    name: first part of its tensors' keys. form: the rest. what: pattern of the part of a key that
    tells a parameter's tensors apart. whole: its tensors are whole local parameters, on all
    replicas; else this rank has only the parts that it owns. differs: every replica has tensors of
    its own. joint: all sites have the same. shaped: tensors have the parameters' shapes. saved:
    checkpoints have it. column: where the memory report shows it.
    """

    name: ClassVar[str]
    form: ClassVar[str] = "{parameter}"
    what: ClassVar[str] = r"\w+"
    whole: ClassVar[bool] = False
    differs: ClassVar[bool] = False
    shaped: ClassVar[bool] = True
    saved: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    column: ClassVar[str] = "optimizer"

    def __init__(self, holder: Holder):
        self.holder = holder

    @classmethod
    def key(cls, parameter: str, what: str = "") -> str:
        """The key of a parameter's tensor. `what`: which, where a parameter has several."""
        return f"{cls.name}/{cls.form.format(parameter=parameter, what=what)}"

    @classmethod
    def parse(cls, rest: str) -> tuple[str, str]:
        """The parameter and `what` of a key without the kind's name. Raises: ValueError if it is no
        key."""
        pattern = cls.form.replace(".", r"\.").format(
            parameter="(?P<parameter>.+)", what=f"(?P<what>{cls.what})"
        )
        if (match := re.fullmatch(pattern, rest)) is None:
            raise ValueError(f"{rest!r} is not {cls.form}")
        return match["parameter"], match.groupdict().get("what", "")

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        """The tensor with which a run continues from a checkpoint; None: zero."""
        return stored.read(slot, cls.name, what) if stored.keeps(slot, cls.name, what) else None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by key; live."""

    def memory(self) -> list[Tensor]:
        """The tensors that take its memory, at least as much as `tensors` ever needs."""
        return list(self.tensors().values())

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        """Loads tensors by key, without the kind's name. `versions`: of the weights, oldest first.

        Raises: CheckpointError.
        """
        own = {key.partition("/")[2]: tensor for key, tensor in self.tensors().items()}
        copy_all(own, tensors, self.name, self.holder.memory)


class BufferKind(StateKind):
    """Kind of state that is a flat buffer of this rank's parts, or None."""

    @abstractmethod
    def buffer(self) -> Buffer | None:
        """The buffer."""

    def tensors(self) -> dict[str, Tensor]:
        buffer = self.buffer()
        return (
            {}
            if buffer is None
            else {self.key(name): view for name, view in buffer.views().items()}
        )

    def memory(self) -> list[Tensor]:
        buffer = self.buffer()
        return [] if buffer is None else buffer.tensors


class RoomKind(StateKind):
    """Kind of state that is room for transfers. Void between updates, and never saved."""

    saved = False

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @abstractmethod
    def memory(self) -> list[Tensor]: ...


class Under(Mapping[str, Tensor]):
    """The tensors whose names begin with `prefix`, by the rest of their names; each is fetched when
    it is read."""

    def __init__(self, prefix: str, tensors: Mapping[str, Tensor]):
        self._prefix = prefix
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._tensors

    def __iter__(self) -> Iterator[str]:
        return (
            name.removeprefix(self._prefix)
            for name in self._tensors
            if name.startswith(self._prefix)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)
