"""Map each action of a plan to the chunks that it accesses and that replicas shard (ZeRO-2 and
3).
"""

from __future__ import annotations

from collections.abc import Callable, Container

from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import Access, Budget, Mode, Residency
from hybridpar.schedules.passes.shared_items import SharedItems
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.state.rank import RankState
from hybridpar.state.residency.segments import Segments
from hybridpar.state.residency.shares import FROZEN, WholeChunks


class SharedAccesses:
    """The unsharded chunks that an action accesses, by number.

        weights of a segment     read by F B I, also frozen ones
        gradients of a segment   added to by B I W
        an UPDATE                makes new shards, so an unsharded chunk becomes outdated
        a REDUCE                 all gradients are then in the shards

    Numbers above the chunks' are items of the rank's tiers.
    """

    def __init__(
        self,
        memory: WholeChunks,
        state: RankState,
        segments: Segments,
        shape: PipelineShape,
    ):
        self.chunks = dict(enumerate(memory.chunks))
        self._memory = memory
        self._state = state
        self._parts = segments
        self._m = shape.num_microbatches
        self._by_kind: dict[str, list[int]] = {}
        for number, chunk in self.chunks.items():
            self._by_kind.setdefault(chunk.kind, []).append(number)

    def of_weights(self, action: Action) -> list[Access]:
        """Return the accesses to weights."""
        weights = self._state.weights
        if action.kind in (Kind.F, Kind.B, Kind.I):
            return [
                access
                for kind in (f"weights/{weights.slot(action.version)}", FROZEN)
                for access in self._in_part(action, kind, Mode.READ)
            ]
        if action.kind is Kind.UPDATE:
            return [
                Access(i, Mode.RENEW)
                for i in self._by_kind.get(f"weights/{weights.slot(action.version)}", ())
                if self.chunks[i].use.group == action.part
            ]
        return []

    def of_gradients(self, action: Action) -> list[Access]:
        """Return the accesses to gradients."""
        if action.kind in (Kind.B, Kind.I, Kind.W):
            return self._in_part(action, self._gradients(action.microbatch // self._m), Mode.ADD)
        if action.kind is Kind.REDUCE:
            return [
                Access(i, Mode.RENEW)
                for i in self._by_kind.get(self._gradients(action.microbatch), ())
            ]
        return []

    def items(self) -> SharedItems:
        """Return the chunks in the form that a plan needs.

        Weights have space for two consecutive segments, so the next one is gathered while a segment
        computes. Gradients have space for one segment besides the ones being reduced.
        """
        num_bytes = [chunk.num_bytes for chunk in self.chunks.values()]
        summed = frozenset(
            i for i, chunk in self.chunks.items() if chunk.kind.startswith("gradients/")
        )

        def residency(
            accesses: Callable[[Action], list[Access]], room: int, own: Container[int]
        ) -> Residency:
            return Residency(accesses, num_bytes, Budget(room), own=own)

        memory = self._memory
        return SharedItems(
            residency(self.of_weights, memory.room_of_weights(), self.chunks.keys() - summed),
            residency(self.of_gradients, memory.room_of_gradients(1), summed),
            summed,
        )

    def _gradients(self, batch: int) -> str:
        return f"gradients/{self._state.gradients.buffer_index(batch)}"

    def _in_part(self, action: Action, kind: str, mode: Mode) -> list[Access]:
        part = self._parts.number(action)
        return [
            Access(i, mode) for i in self._by_kind.get(kind, ()) if part in self.chunks[i].use.parts
        ]
