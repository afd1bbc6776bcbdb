"""Walk a pipeline rank's list of actions, and find where it holds the most memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridpar.prediction.footprint import Footprint
from hybridpar.prediction.ghost_state import StateFootprint
from hybridpar.prediction.held_factors import HeldFactors
from hybridpar.runtime.graphs import num_places
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, Kind
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.send_window import min_send_window


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of one pipeline rank, by its components. Units: bytes.

    Args:
        in_flight: Micro-batches between forward and backward at the peak, counted on each stage of
            the rank.
        during: The action at the peak.
        host: Host memory that a GPU rank uses, for the copy that checkpoints are written from and
            for a host optimizer.
        file: State in the slow tier.
        moved: Offloaded activations of a micro-batch, averaged over the rank's stages.
        graphs: Memory that CUDA graphs keep of micro-batches and the allocator counts as free; a
            GPU needs it in addition to `total`.
    """

    weights: int
    master: int
    gradients: int
    optimizer: int
    checkpoint: int
    activations: int
    communication: int
    transient: int
    in_flight: int
    during: str
    host: int = 0
    file: int = 0
    moved: int = 0
    graphs: int = 0

    @property
    def state(self) -> int:
        """Bytes of the training state."""
        return self.weights + self.master + self.gradients + self.optimizer

    @property
    def static(self) -> int:
        """Bytes that are always allocated."""
        return self.state - self.file + self.checkpoint

    @property
    def total(self) -> int:
        """The peak."""
        return self.static + self.activations + self.communication + self.transient

    @property
    def needed(self) -> int:
        """Bytes that a device must have."""
        return self.total + self.graphs

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"total": self.total}


def together(footprints: Iterable[Footprint]) -> StateFootprint:
    """Return the state of stages that share nothing."""
    held = list(footprints)
    weights, master, gradients, optimizer, norm, update = (
        sum(getattr(fp, name) for fp in held)
        for name in ("weights", "master", "gradients", "optimizer", "norm", "update")
    )
    return StateFootprint(weights, master, gradients, optimizer, norm, (update,))


class MemoryWalk:
    """The memory that a rank holds, action by action, as runtime.executor runs its list.

    Args:
        footprints: Footprints of the segments of each stage, by stage.
        shape: The shape of the pipeline.
        state: The rank's state; None: the sum of its stages' states.
        allocating: Footprints of backwards that allocate gradients, if replicas shard them.
        send_window: Largest number of unfinished sends; 0: `min_send_window`.
        evaluates: The list has forwards alone, which keep nothing.
    """

    def __init__(
        self,
        footprints: Mapping[int, Sequence[Footprint]],
        shape: PipelineShape,
        state: StateFootprint | None = None,
        allocating: Mapping[int, Sequence[Footprint]] | None = None,
        send_window: int = 0,
        *,
        evaluates: bool = False,
    ):
        state = state or together(fp for parts in footprints.values() for fp in parts)
        send_window = send_window or min_send_window(shape.num_ranks)
        self.footprints = footprints
        self.state = state
        self._evaluates = evaluates
        self._neighbours: dict[tuple[int, int, int], tuple[bool, Footprint | None]] = {}
        self._num_hosted = 0  # parts of updates that the host is making
        self._m = shape.num_microbatches
        # gradients that an I has allocated
        self._allocating = allocating or footprints
        self._made = set[tuple[int, int, int]]()
        self._filled = set[int]()  # items that have gradients
        self._shape = shape
        self._last = shape.num_stages - 1
        self._num_frozen = shape.num_frozen
        self._items = FastTiers(state.pools)
        self._in_flight = self._kept = self._inputs = self._posted = 0
        self._sent = 0  # bytes of sends that have not been waited for
        # bytes for another segment or stage of this rank, which has not taken them yet
        self._handed = 0
        self._factors = HeldFactors(self._m)
        self._freed = 0  # bytes of factors that the action frees first
        self._waiting: dict[Kind, int] = {}  # outputs to be sent
        self._sends: deque[int] = deque(maxlen=send_window)
        self.num_bytes = 0  # bytes at the peak
        self.most = StageMemory(
            state.weights, state.master, state.gradients, state.optimizer, 0, 0, 0, 0, 0, ""
        )

    def peak(self, actions: Iterable[Action]) -> StageMemory:
        """Process all actions; return the memory at the peak."""
        for action in actions:
            self.follow(action)
        return self.most

    def follow(self, action: Action) -> int:
        """Process an action; return the bytes besides the state that the rank holds meanwhile."""
        kind = action.kind
        row = ACTION_SPECS[action.kind]
        parts = self.footprints[action.stage]
        if self.state.pools:
            self._follow_items(action)
            if self._is_allocating(action):
                parts = self._allocating[action.stage]
        if row.makes and self.state.hosting:
            self._num_hosted += 1 if kind is Kind.HOST else -1
        end = 0 if row.flow > 0 else -1
        fp = parts[action.part if kind in COMPUTE else end]
        if row.matching_recv:
            if len(self._sends) == self._sends.maxlen:
                self._sent -= self._sends[0]
            self._sends.append(self._waiting.pop(kind))
            self._sent += self._sends[-1]
        elif row.peer_offset:
            self._posted += fp.received if row.flow > 0 else fp.returned
        self._freed = self._factors.before_backward() if kind in (Kind.B, Kind.I) else 0
        taken = self._take(action, fp) if row.receive else 0
        held = self._compare(action, fp, taken)
        if action.part == 0:
            self._in_flight += row.holds
        if kind in (Kind.B, Kind.W):
            self._factors.after_backward(action, fp)
        elif kind in (Kind.NORM, Kind.UPDATE):
            self._factors.drop(action)
        if row.is_offload:
            self._kept += self._moved(action) * ((kind is Kind.RELOAD) - (kind is Kind.EVICT))
        elif kind is Kind.W:
            self._kept -= fp.waiting
        elif row.receive:
            self._give(action, fp)
        return held

    def _follow_items(self, action: Action) -> None:
        """Move the chunks that replicas shard; a chunk without new gradients is not reduced."""
        is_empty = action.kind is Kind.RELEASE and action.microbatch not in self._filled
        fault = self._items.follow(action, None if is_empty else 0.0)
        assert not fault, fault
        if action.kind is Kind.RELEASE:
            self._filled.discard(action.microbatch)
        elif ACTION_SPECS[action.kind].adds:
            fp = self.footprints[action.stage][action.part]
            if {Kind.I: fp.early, Kind.W: fp.late}.get(action.kind, 1):
                self._filled.update(self._items.added(action))

    def _is_allocating(self, action: Action) -> bool:
        """Return whether all gradients that a backward adds to are allocated for it."""
        key = (action.stage, action.part, action.microbatch)
        allocates = set(self._items.created) >= set(self._items.added(action))
        if allocates and action.kind is Kind.I:
            self._made.add(key)
        return allocates or (action.kind is Kind.W and key in self._made)

    def _beside(self, action: Action, step: int) -> tuple[bool, Footprint | None]:
        """Return whether the model has a segment before (after) the action's, and its footprint if
        it is on this rank."""
        key = (action.stage, action.part, step)
        if key not in self._neighbours:
            self._neighbours[key] = self._neighbour(*key)
        return self._neighbours[key]

    def _neighbour(self, stage: int, part: int, step: int) -> tuple[bool, Footprint | None]:
        parts = self.footprints[stage]
        if 0 <= part + step < len(parts):
            return True, parts[part + step]
        there = 0 <= stage + step <= self._last
        other = self.footprints.get(stage + step)
        if not other:
            return there, None
        return there, other[0 if step > 0 else -1]

    def _wants_gradient(self, stage: int, part: int) -> bool:
        """Return whether the input of a segment needs a gradient; see Executor."""
        return stage > self._num_frozen or (stage == self._num_frozen and part > 0)

    def _returns_gradient(self, action: Action) -> bool:
        """Return whether the segment after the action's returns the gradient of its input."""
        last = action.part + 1 == len(self.footprints[action.stage])
        following = (action.stage + 1, 0) if last else (action.stage, action.part + 1)
        return self._wants_gradient(*following)

    def _take(self, action: Action, fp: Footprint) -> int:
        """Take the input of an action, and return its bytes."""
        forth = ACTION_SPECS[action.kind].flow > 0
        there, own = self._beside(action, -1 if forth else 1)
        if not forth and not self._returns_gradient(action):
            return 0
        if own is not None:
            self._handed -= own.message if forth else fp.message
        elif there:
            self._posted -= fp.received if forth else fp.returned
        if not there:
            return 0
        return fp.input if action.kind is Kind.F else fp.message

    def _compare(self, action: Action, fp: Footprint, taken: int) -> int:
        """Return the memory held while an action runs; record it if it is the largest so far."""
        activations = self._kept + self._inputs + self._factors.num_bytes
        if action.kind is Kind.RELOAD:
            activations += self._moved(action)
        communication = (
            self._posted + taken + self._handed + sum(self._waiting.values()) + self._sent
        )
        transient = self._transient(action, fp)
        if self.state.pools:
            transient += self._items.unsharded_bytes()
        if self._num_hosted:
            transient += self.state.hosting
        self._note(action, communication, transient)
        held = activations + communication + transient
        if held > self.num_bytes:
            self.num_bytes = held
            self.most = replace(
                self.most,
                activations=activations,
                communication=communication,
                transient=transient,
                in_flight=self._in_flight,
                during=str(action),
            )
        return held

    def _note(self, action: Action, communication: int, transient: int) -> None:
        """Note what an action takes in addition to activations; for subclasses."""

    def _transient(self, action: Action, fp: Footprint) -> int:
        """Return the additional bytes of an action while it runs."""
        kind = action.kind
        if self._freed:
            return max(self._freed + fp.stepping, self._backward(action, fp))
        if kind is Kind.W and self._factors.exchanges(action, fp):
            return fp.ending
        if kind is Kind.F or kind is Kind.W:
            forward = fp.forward + fp.kept * self._evaluates
            return forward if kind is Kind.F else fp.weight_gradients
        if kind is Kind.B or kind is Kind.I:
            return self._backward(action, fp)
        if kind is Kind.UPDATE:
            return self.state.updates[action.part]
        return self.state.norm if kind is Kind.NORM else 0

    def _backward(self, action: Action, fp: Footprint) -> int:
        """Return the additional bytes of a B or I."""
        if action.kind is Kind.B and fp.whole_backward:
            return fp.whole_backward
        if action.kind is Kind.B and self._factors.exchanges(action, fp):
            return fp.ending
        return fp.backward if action.microbatch % self._m else fp.first_backward

    def _moved(self, action: Action) -> int:
        """Return the offloaded bytes of a micro-batch."""
        return sum(part.moved for part in self.footprints[action.stage])

    def _give(self, action: Action, fp: Footprint) -> None:
        """Keep what a forward leaves, or free it after a backward; pass on the output or the
        input's gradient."""
        has_input, before = self._beside(action, -1)
        has_output, after = self._beside(action, 1)
        keeps_input = has_input and action.stage >= self._num_frozen
        if action.kind is Kind.F:
            if not self._evaluates:
                self._kept += fp.kept
                self._inputs += keeps_input * fp.input
            if after is not None:
                self._handed += fp.message
            elif has_output:
                self._waiting[Kind.SEND_F] = fp.output
            return
        self._kept += fp.waiting * (action.kind is Kind.I) - fp.kept
        self._inputs -= keeps_input * fp.input
        if not self._wants_gradient(action.stage, action.part):
            return
        if before is not None:
            self._handed += before.message
        elif has_input:
            self._waiting[Kind.SEND_B] = fp.returning


class RecordedWalk(MemoryWalk):
    """A walk whose micro-batches are recorded as CUDA graphs: each slot of a micro-batch has
    separate memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        shape = self._shape
        self._num_places = num_places(shape.num_ranks, shape.virtual_stages)
        self._pool = 0  # bytes of one micro-batch in a CUDA graph
        self._outside = 0  # bytes outside of graphs
        # largest number of micro-batches in flight, by stage
        self._at_once = defaultdict[int, int](int)
        self._in_flight_on = defaultdict[int, int](int)

    def peak(self, actions: Iterable[Action]) -> StageMemory:
        """Process all actions; return the memory at the peak."""
        most = super().peak(actions)
        slots = sum(min(at_once, self._num_places) for at_once in self._at_once.values())
        return replace(most, graphs=max(0, slots * self._pool + self._outside - self.num_bytes))

    def follow(self, action: Action) -> int:
        """Process an action; return the bytes besides the state that the rank holds meanwhile."""
        held = super().follow(action)
        if action.part == 0:
            self._in_flight_on[action.stage] += ACTION_SPECS[action.kind].holds
        return held

    def _note(self, action: Action, communication: int, transient: int) -> None:
        kept = (self._kept + self._inputs) // max(1, self._in_flight)
        others = sum(max(0, number - self._num_places) for number in self._in_flight_on.values())
        if action.kind is Kind.F:
            others += self._in_flight_on[action.stage] >= self._num_places
        if action.kind in COMPUTE:
            self._at_once[action.stage] = max(
                self._at_once[action.stage],
                self._in_flight_on[action.stage] + (action.kind is Kind.F),
            )
            self._pool = max(self._pool, transient + (action.kind is not Kind.F) * kept)
        self._outside = max(
            self._outside,
            others * kept
            + communication
            + (transient if others or action.kind not in COMPUTE else 0),
        )
