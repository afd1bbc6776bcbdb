"""Defines a kind of state and its interface to checkpoints; kinds.py lists all kinds."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from hybridpar.optim import ParameterSlot
from hybridpar.state.residency.chunks import Buffer
from hybridpar.state.weights import copy_all

if TYPE_CHECKING:
    from hybridpar.state.rank import RankState


class Stored(Protocol):
    """A checkpoint as seen by a load: any part of any tensor, whichever grid has saved it.

    Shapes: slot.shape. Raises: CheckpointError if a tensor is missing or damaged.
    """

    def read(self, slot: ParameterSlot, kind: str, what: str = "") -> Tensor: ...
    def keeps(self, slot: ParameterSlot, kind: str, what: str) -> bool:
        """Return whether the file has a tensor `what` of this parameter or of any other."""

    def share(self, slot: ParameterSlot, kind: str) -> Tensor | None:
        """Return this rank's share of the sum of the tensors that its replicas saved."""

    def same(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """Return the tensor saved at the same place in a grid of the same size; None: none."""

    def alike(self, slot: ParameterSlot, kind: str, what: str) -> Tensor | None:
        """Return the tensor that all ranks with this part of the parameter saved; None: none."""

    def newest(self, slot: ParameterSlot) -> Tensor:
        """Return the newest weights, neither rounded nor predicted."""

    def common(self, slot: ParameterSlot) -> Tensor:
        """Return the weights that all sites last had in common (one site: the newest weights)."""

    def version(self, slot: ParameterSlot, version: int) -> Tensor:
        """Return the weights that the new run uses for that version."""


class StateKind(ABC):
    """One kind of state, of one rank.

    Attributes:
        name: First part of its tensors' keys.
        form: The rest of the keys.
        what: Pattern of the part of a key that distinguishes a parameter's tensors.
        whole: Its tensors are complete local parameters, on all replicas; else this rank has only
            the shards that it owns.
        differs: Every replica has different tensors.
        joint: All sites have equal tensors.
        shaped: Tensors have the parameters' shapes.
        saved: Checkpoints include this kind.
        column: Column of the memory report.
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

    def __init__(self, holder: RankState):
        self.holder = holder

    @classmethod
    def key(cls, parameter: str, what: str = "") -> str:
        """Return the key of a parameter's tensor. `what`: which of several tensors."""
        return f"{cls.name}/{cls.form.format(parameter=parameter, what=what)}"

    @classmethod
    def parse(cls, rest: str) -> tuple[str, str]:
        """Return the parameter and `what` of a key without the kind's name. Raises: ValueError."""
        pattern = cls.form.replace(".", r"\.").format(
            parameter="(?P<parameter>.+)", what=f"(?P<what>{cls.what})"
        )
        if (match := re.fullmatch(pattern, rest)) is None:
            raise ValueError(f"{rest!r} is not {cls.form}")
        return match["parameter"], match.groupdict().get("what", "")

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        """Return the tensor with which a run resumes from a checkpoint; None: zeros."""
        return stored.read(slot, cls.name, what) if stored.keeps(slot, cls.name, what) else None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by key; live."""

    def memory(self) -> list[Tensor]:
        """Return the tensors that use memory, at least as much as `tensors` ever needs."""
        return list(self.tensors().values())

    def places(self) -> dict[str, Tensor]:
        """Return the parameters' places in `memory`, by name, whatever they hold now."""
        return self.tensors()

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        """Load tensors by key, without the kind's name. `versions`: versions of the weights, oldest
        first.

        Raises:
            CheckpointError: A tensor is missing or of another shape.
        """
        own = {key.partition("/")[2]: tensor for key, tensor in self.tensors().items()}
        copy_all(own, tensors, self.name, self.holder.memory)


class OuterKind(StateKind):
    """Kind of state in a flat buffer of the outer step, which has this rank's shards."""

    @property
    def _buffer(self) -> Buffer | None:
        outer = self.holder.outer
        return None if outer is None else outer.buffers.get(self.name)

    def tensors(self) -> dict[str, Tensor]:
        buffer = self._buffer
        views = {} if buffer is None else buffer.views()
        return {self.key(name): view for name, view in views.items()}

    def memory(self) -> list[Tensor]:
        return [] if self._buffer is None else self._buffer.tensors


class RoomKind(StateKind):
    """Kind of state that is a buffer for transfers: void between updates, and never saved."""

    saved = False

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @abstractmethod
    def memory(self) -> list[Tensor]: ...


class Under(Mapping[str, Tensor]):
    """Tensors whose names start with `prefix`, by the rest of their names; read on access."""

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
