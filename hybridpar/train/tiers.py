"""What each action touches of a rank's state, and the moves between its tiers that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from hybridpar.errors import config_error
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.check import PlanError
from hybridpar.pipeline.plan.residency import FastTier, Mode, Residency, Touch, add_residency
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.state import RankState
from hybridpar.state.tiered import StateItem, TieredMemory
from hybridpar.train.parts import Parts

_Touches = tuple[Touch, ...]


class RankTiers:
    """The tiers of a rank's state, along its plan.

    weights of a part     F B I             gradients   B I W, the first of a batch writes; NORM, where they are reduced
    what an UPDATE makes  all of its group: it reads gradients, changes moments and master, writes the new weights
    """

    def __init__(self, memory: TieredMemory, state: RankState, parts: Parts, sizes: Sizes, *, norms: bool):
        self.memory, self._tiers = memory, memory.tiers
        self._state, self._parts, self._m, self._norms = state, parts, sizes.num_microbatches, norms
        self._kept = {i: item for i, item in enumerate(memory.items) if not item.use.stays}
        self._compute, self._update = cache(self._compute_touches), cache(self._update_touches)
        if (least := self.least_budget()) > memory.budget:
            rule = f"must hold what one part of this rank needs at a time: {least} bytes"
            raise config_error("memory.budget", memory.budget, rule, str(least))
        self._void = {i for i, item in self._kept.items() if item.kind.startswith("gradients/")}

    def plan(self, actions: Iterator[Action]) -> Iterator[Action]:
        """The actions of a rank that is drained, with FETCH, RELEASE and DROP. Raises: ConfigError."""
        self._tiers.settle()  # what a batch that was cut off had asked for
        items = self._tiers.items
        residency = Residency(
            self.touches, [item.num_bytes for item in items], self.memory.budget,
            pinned=frozenset(i for i, item in enumerate(items) if item.pinned),
            resident={i: items[i].changed for i in self._kept if self._tiers.is_here(i)}, void=self._void)
        fast = FastTier(residency)
        for action in add_residency(actions, residency):
            if fault := fast.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            yield action

    def least_budget(self) -> int:
        """Bytes of memory that the state needs at least."""
        state, items = self._state, self._tiers.items
        versions, buffers = range(state.weights.num_versions), range(len(state.gradients.buffers))
        one = [self._compute(Kind.B, part, slot, buffer, False)
               for part in range(self._parts.last + 1) for slot in versions for buffer in buffers]
        one += [self._norm_touches(buffer, part) for part in range(state.num_groups) for buffer in buffers]
        one += [self._update(group, slot, state.weights.slot(slot + 1), buffer)
                for group in range(state.num_groups) for slot in versions for buffer in buffers]
        return sum(item.num_bytes for item in items if item.pinned) + max(
            sum(items[touch.item].num_bytes for touch in touches) for touches in one)

    def touches(self, action: Action) -> _Touches:
        """The items that an action touches, but for those that stay."""
        kind, number = action.kind, action.microbatch
        gradients, weights = self._state.gradients, self._state.weights
        if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            batch, index = divmod(number, self._m)
            return self._compute(kind, self._parts.number(action), weights.slot(action.version),
                                 gradients.buffer_index(batch), index == 0)
        if kind is Kind.NORM:
            return self._norm_touches(gradients.buffer_index(number), action.part)
        if kind is Kind.UPDATE:
            versions = weights.slot(number), weights.slot(number + 1)
            return self._update(action.part, *versions, gradients.buffer_index(number))
        return ()

    def _compute_touches(self, kind: Kind, part: int, slot: int, buffer: int, begins: bool) -> _Touches:
        touches = [Touch(i, Mode.READ) for i, item in self._of(f"weights/{slot}")
                   if kind is not Kind.W and part in item.use.parts]
        for i, item in self._of(f"gradients/{buffer}") if kind is not Kind.F else ():
            if part in item.use.parts:
                first = begins and kind is not Kind.W and part == item.use.parts[-1]
                touches.append(Touch(i, Mode.WRITE if first else Mode.UPDATE))
        return tuple(touches)

    def _norm_touches(self, buffer: int, part: int) -> _Touches:
        """Gradients whose squares are not known since the backward."""
        return tuple(Touch(i, Mode.UPDATE) for i, item in self._of(f"gradients/{buffer}")
                     if not self._state.is_alone(own := item.use.parts[0]) and (own == part or not self._norms))

    def _update_touches(self, group: int, old: int, new: int, buffer: int) -> _Touches:
        modes = {f"gradients/{buffer}": Mode.READ, "master": Mode.UPDATE}
        if self._state.weights.master is None:
            modes[f"weights/{old}"] = Mode.READ
        modes[f"weights/{new}"] = Mode.UPDATE if modes.get(f"weights/{new}") else Mode.WRITE
        return tuple(Touch(i, modes.get(item.kind, Mode.UPDATE)) for i, item in self._kept.items()
                     if item.use.group == group and (item.kind in modes or item.kind.startswith("optimizer/")))

    def _of(self, kind: str) -> Iterator[tuple[int, StateItem]]:
        return ((i, item) for i, item in self._kept.items() if item.kind == kind)

    # -- as the executor asks for it -----------------------------------------------------------------------------------

    def move(self, action: Action) -> None:
        """Starts a FETCH, RELEASE or DROP. What was not made, as its batch was cut off, has nothing to give up."""
        self.memory.forget()
        number, tiers = action.microbatch, self._tiers
        if action.kind is Kind.FETCH:
            tiers.fetch(number)
        elif tiers.is_absent(number):
            return
        elif action.kind is Kind.RELEASE:
            tiers.release(number)
        else:
            tiers.drop(number)

    def are_here(self, action: Action) -> bool:
        """Whether all that the action touches is in memory."""
        return all(self._tiers.is_here(touch.item) for touch in self.touches(action))

    def touch(self, action: Action) -> None:
        """Waits until it is, makes room for what the action writes anew, and notes what it changes."""
        for item, mode in self.touches(action):
            if mode is Mode.WRITE and self._tiers.is_absent(item):
                self._tiers.create(item)
            self._tiers.await_item(item, changing=mode is not Mode.READ)

    def hold_gradients(self, batch: int, part: int) -> None:
        """What the last backward of a part has made final is being reduced."""
        for i, item in self._of(f"gradients/{self._state.gradients.buffer_index(batch)}"):
            if item.use.parts[0] == part:
                self._tiers.hold(i, self._state.reducer.of(item.use).wait)

    def hold_weights(self, version: int, group: int) -> None:
        """What a part of an update has made is being gathered from other replicas."""
        weights = self._state.weights
        if weights.is_arriving(version):
            for i, item in self._of(f"weights/{weights.slot(version)}"):
                if item.use.group == group:
                    self._tiers.hold(i, lambda: weights.await_version(version))
