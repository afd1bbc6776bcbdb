"""What the actions of a plan touch of chunks that replicas share (ZeRO-2 and 3)."""

from __future__ import annotations

from collections.abc import Callable

from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.residency import Mode, Residency, Touch
from hybridpar.pipeline.plan.shared import SharedItems
from hybridpar.pipeline.plan.sizes import Sizes
from hybridpar.state.parts import Parts
from hybridpar.state.rank import RankState
from hybridpar.state.shares import WholeChunk, room


class SharedTouches:
    """What an action touches of the chunks that come and go, by number.

    weights of a part     F B I reads                       gradients   B I W adds
    what an UPDATE makes  new shares: a whole chunk is old              REDUCE: all are in the shares
    """

    def __init__(self, chunks: list[WholeChunk], state: RankState, parts: Parts, sizes: Sizes):
        self._chunks, self._state, self._parts, self._m = chunks, state, parts, sizes.num_microbatches
        self._by_kind: dict[str, list[int]] = {}
        for number, chunk in enumerate(chunks):
            self._by_kind.setdefault(chunk.kind, []).append(number)

    def of_weights(self, action: Action) -> list[Touch]:
        """The touches of weights."""
        weights = self._state.weights
        if action.kind in (Kind.F, Kind.B, Kind.I):
            return self._in_part(action, f"weights/{weights.slot(action.version)}", Mode.READ)
        if action.kind is Kind.UPDATE:
            return [Touch(i, Mode.RENEW) for i in self._by_kind.get(f"weights/{weights.slot(action.version)}", ())]
        return []

    def of_gradients(self, action: Action) -> list[Touch]:
        """The touches of gradients."""
        if action.kind in (Kind.B, Kind.I, Kind.W):
            return self._in_part(action, self._gradients(action.microbatch // self._m), Mode.ADD)
        if action.kind is Kind.REDUCE:
            return [Touch(i, Mode.RENEW) for i in self.gradients(action.microbatch)]
        return []

    def gradients(self, batch: int) -> list[int]:
        """The chunks of a batch's gradients."""
        return self._by_kind.get(self._gradients(batch), [])

    def items(self) -> SharedItems:
        """The chunks as a plan knows them. Weights have room for two consecutive parts, so what comes next is gathered
        while a part computes; gradients have room for one, besides those that are being summed."""
        num_bytes = [chunk.num_bytes for chunk in self._chunks]

        def residency(kind: str, touches: Callable[[Action], list[Touch]], consecutive: int) -> Residency:
            own = [(chunk.use, chunk.num_bytes) for chunk in self._chunks if chunk.kind == f"{kind}/0"]
            return Residency(touches, num_bytes, room(own, consecutive))

        return SharedItems(
            residency("weights", self.of_weights, 2), residency("gradients", self.of_gradients, 1),
            frozenset(i for i, chunk in enumerate(self._chunks) if chunk.kind.startswith("gradients/")))

    def _gradients(self, batch: int) -> str:
        return f"gradients/{self._state.gradients.buffer_index(batch)}"

    def _in_part(self, action: Action, kind: str, mode: Mode) -> list[Touch]:
        part = self._parts.number(action)
        return [Touch(i, mode) for i in self._by_kind.get(kind, ()) if part in self._chunks[i].use.parts]
