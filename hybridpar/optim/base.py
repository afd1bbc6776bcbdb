"""The base of all optimizers: state per parameter, the update counter, and how gradients are
scaled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hybridpar.config import OptimConfig
from hybridpar.cpu import zeros
from hybridpar.errors import CheckpointError
from hybridpar.grid import Axis
from hybridpar.ops import optimizer as passes_for
from hybridpar.ops.update import Weights
from hybridpar.optim.slots import ParameterSlot


class StateMemory(Protocol):
    """Memory that an optimizer keeps its state in, if that is not the device's own."""

    def state(self, what: str, slots: Sequence[ParameterSlot], dtype: torch.dtype) -> list[Tensor]:
        """Return zeros of the slots' shapes.

        Args:
            what: Name of the state.
        """

    def writing(self, *views: Tensor) -> AbstractContextManager[object]: ...


class Optimizer(ABC):
    """Update a list of local parameters, in place or from one buffer into another.

    Equal inputs give equal bits. State is allocated at the first step, in the parameters' dtype:
    float32, or float64 for float64 (bf16 and fp16 training passes the float32 master copy).
    `num_updates` counts the steps taken; a skipped one is not counted.

    Args:
        backend: The backend of its elementwise passes (`kernels.optimizer`).
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    inner: tuple[Optimizer, ...] = ()
    """Optimizers inside this one; their state is saved and restored with its own."""

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        self.slots = tuple(slots)
        self.settings = settings
        self.tp = tp
        self.backend = backend
        self.num_updates = 0
        self.memory: StateMemory | None = None
        self._state: dict[str, list[Tensor]] = {}
        self._decays = [
            settings.weight_decay * slot.placement.weight_decay
            for slot in self.slots
            for _ in range(slot.num_parts)
        ]
        """Weight decay of each of the `_parts`."""
        self._rates = [slot.placement.lr for slot in self.slots for _ in range(slot.num_parts)]
        """Factor of the learning rate of each of the `_parts`."""
        self._by_rate = {
            rate: [i for i, other in enumerate(self._rates) if other == rate]
            for rate in dict.fromkeys(self._rates)
        }
        """Each of these factors with the indices of the `_parts` that have it, in their order."""
        self._passes: Any

    @classmethod
    def divisible(cls, slot: ParameterSlot) -> bool:
        """Whether the update of this parameter is elementwise, so that any flat piece can be
        updated alone."""
        return True

    @torch.no_grad()
    def step(
        self,
        parameters: Sequence[Tensor] | Weights,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        gradient_scale: float | Tensor = 1.0,
    ) -> None:
        """Apply one update with `gradients * gradient_scale` (clip coefficient over loss scale).

        Args:
            parameters: The tensors that are updated in place, or Weights that say what is read and
                written.
            gradients: Are used up: they may be scaled, or serve as scratch space.

        Shapes: parameters and gradients in the slots' local shapes and order; contiguous, of one
        dtype.
        Collectives: over tp, LAMB one all-reduce, Muon two all-to-alls a round; the others none.
        """
        weights = (
            parameters if isinstance(parameters, Weights) else Weights.in_place(list(parameters))
        )
        lengths = len(weights.old), len(gradients), len(self.slots)
        assert len(set(lengths)) == 1, lengths
        self.num_updates += 1
        if (
            weights.old
        ):  # all ranks of a tp line hold the same parameters, so none of them calls a collective
            self.allocate(weights.old[0].device, weights.old[0].dtype)
            self._passes = passes_for(weights.old[0], self.backend)
            self._update(weights, list(gradients), lr, gradient_scale)

    @abstractmethod
    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None: ...

    def keep_in(self, memory: StateMemory | None) -> None:
        """Keep the state in this memory; None: beside the parameters."""
        self.memory = memory

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Create the state that is missing, as zeros; move loaded state to the device of the
        parameters."""
        assert dtype in (torch.float32, torch.float64), (
            f"optimizers run on float32 or float64 masters, not {dtype}"
        )
        for name in self.state_names:
            if name not in self._state and self.memory is not None:
                self._state[name] = self.memory.state(name, self.slots, dtype)
            elif name not in self._state:
                self._state[name] = [zeros(slot.shape, dtype, device) for slot in self.slots]
            elif any(t.device != device or t.dtype != dtype for t in self._state[name][:1]):
                self._state[name] = [t.to(device, dtype) for t in self._state[name]]
        for inner in self.inner:
            inner.keep_in(self.memory)
            inner.allocate(device, dtype)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state by '<parameter>.<state>', in the shape of the local parameter.

        It is empty before the state is allocated.
        """
        tensors = {
            f"{slot.name}.{name}": tensor
            for name, tensors in self._state.items()
            for slot, tensor in zip(self.slots, tensors, strict=True)
        }
        for inner in self.inner:
            tensors |= inner.state_tensors()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Adopt `tensors`, named like `state_tensors`, as the state after `num_updates` steps.

        They are copied only to fit. With `num_updates` 0 nothing is loaded and the state starts
        from zeros.

        Raises:
            CheckpointError: A tensor is missing or has another shape than its parameter.
        """
        for inner in self.inner:
            inner.load_state_tensors(tensors, num_updates)
        self.num_updates = num_updates
        places = self._state
        self._state = {}
        if num_updates > 0:
            for name in self.state_names:
                self._state[name] = [
                    _fitting(tensors, f"{slot.name}.{name}", slot) for slot in self.slots
                ]
        if self.memory is not None:
            self._put_back(places, self.memory)

    def _put_back(self, places: dict[str, list[Tensor]], memory: StateMemory) -> None:
        """Copy the loaded state to the memory of the state."""
        loaded = self._state
        self._state = places
        for name, kept in places.items():
            for i, place in enumerate(kept):
                with memory.writing(place):
                    place.copy_(loaded[name][i]) if name in loaded else place.zero_()

    def _parts(self, column: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors by slot in the form that elementwise passes take
        (ParameterSlot.elementwise_parts)."""
        if len(self._decays) == len(self.slots):
            return list(column)
        return [
            part
            for slot, x in zip(self.slots, column, strict=True)
            for part in slot.elementwise_parts(x)
        ]

    def _weight_parts(self, weights: Weights) -> Weights:
        """Return the weights in the form that elementwise passes take."""
        old = self._parts(weights.old)
        new = old if weights.new is weights.old else self._parts(weights.new)
        return Weights(
            old, new, self._parts(weights.working) if weights.working else (), weights.predicted
        )

    def _state_parts(self, name: str) -> list[Tensor]:
        return self._parts(self._state[name])


def _fitting(tensors: Mapping[str, Tensor], key: str, slot: ParameterSlot) -> Tensor:
    """Return the tensor of that name, contiguous.

    Raises:
        CheckpointError: It is missing or has another shape than the slot.
    """
    if key not in tensors:
        raise CheckpointError(f"optimizer state {key} is missing")
    tensor = tensors[key]
    if tuple(tensor.shape) != slot.shape:
        raise CheckpointError(
            f"optimizer state {key} has shape {tuple(tensor.shape)}, the parameter {slot.shape}"
        )
    return tensor.contiguous()
