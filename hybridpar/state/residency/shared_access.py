"""Which chunks that replicas share (ZeRO-2 and 3) each action of a plan touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import Mode, Residency, Touch
from hybridpar.schedules.passes.shared_items import SharedItems
from hybridpar.schedules.sizes import PipelineShape
from hybridpar.state.rank import RankState
from hybridpar.state.residency.segments import Parts
from hybridpar.state.residency.shares import FROZEN, WholeChunks


class SharedTouches:
    """Which of the chunks that come and go an action touches, by number.

    weights of a part     F B I reads, frozen ones, too     gradients   B I W adds
    what an UPDATE makes  new shares: a whole chunk is old              REDUCE: all are in the shares

    chunks: by number, from `first` on: lower numbers are items of the rank's tiers.
    """

    def __init__(
        self,
        memory: WholeChunks,
        state: RankState,
        parts: Parts,
        sizes: PipelineShape,
        first: int = 0,
    ):
        self.chunks = dict(enumerate(memory.chunks, first))
        self._memory = memory
        self._first = first
        self._state = state
        self._parts = parts
        self._m = sizes.num_microbatches
        self._by_kind: dict[str, list[int]] = {}
        for number, chunk in self.chunks.items():
            self._by_kind.setdefault(chunk.kind, []).append(number)

    def of_weights(self, action: Action) -> list[Touch]:
        """The touches of weights."""
        weights = self._state.weights
        if action.kind in (Kind.F, Kind.B, Kind.I):
            return [
                touch
                for kind in (f"weights/{weights.slot(action.version)}", FROZEN)
                for touch in self._in_part(action, kind, Mode.READ)
            ]
        if action.kind is Kind.UPDATE:
            return [
                Touch(i, Mode.RENEW)
                for i in self._by_kind.get(f"weights/{weights.slot(action.version)}", ())
                if self.chunks[i].use.group == action.part
            ]
        return []

    def of_gradients(self, action: Action) -> list[Touch]:
        """The touches of gradients."""
        if action.kind in (Kind.B, Kind.I, Kind.W):
            return self._in_part(action, self._gradients(action.microbatch // self._m), Mode.ADD)
        if action.kind is Kind.REDUCE:
            return [
                Touch(i, Mode.RENEW)
                for i in self._by_kind.get(self._gradients(action.microbatch), ())
            ]
        return []

    def items(self) -> SharedItems:
        """The chunks as a plan knows them. Weights have room for two consecutive parts, so the next
        is gathered while a part computes; gradients have room for one part, besides those being
        summed."""
        num_bytes = [0] * self._first + [chunk.num_bytes for chunk in self.chunks.values()]
        summed = frozenset(
            i for i, chunk in self.chunks.items() if chunk.kind.startswith("gradients/")
        )

        def residency(
            touches: Callable[[Action], list[Touch]], room: int, others: Iterable[int]
        ) -> Residency:
            return Residency(touches, num_bytes, room, others={*range(self._first), *others})

        memory = self._memory
        return SharedItems(
            residency(self.of_weights, memory.room_of_weights(), summed),
            residency(self.of_gradients, memory.room_of_gradients(1), self.chunks.keys() - summed),
            summed,
        )

    def _gradients(self, batch: int) -> str:
        return f"gradients/{self._state.gradients.buffer_index(batch)}"

    def _in_part(self, action: Action, kind: str, mode: Mode) -> list[Touch]:
        part = self._parts.number(action)
        return [
            Touch(i, mode) for i in self._by_kind.get(kind, ()) if part in self.chunks[i].use.parts
        ]
