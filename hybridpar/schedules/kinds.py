"""The table of action kinds. All code that reads a plan reads this table, so a new kind is a row
here, a method of the executor and, if it takes time, a cost.

If a stage is cut into segments, there is an action for each segment (segments.py). A backward is
one action B, or two: I computes the gradient of the stage's input, W the gradients of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Kind(str, Enum):
    """Kind of an action."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    NORM = "NORM"
    HOST = "HOST"
    UPDATE = "UPDATE"
    FETCH = "FETCH"
    RELEASE = "RELEASE"
    DROP = "DROP"
    OFFLOAD = "OFFLOAD"
    EVICT = "EVICT"
    RELOAD = "RELOAD"

    # Enum's own is a Python function, and actions are hashed by the million
    __hash__ = str.__hash__
    __str__ = str.__str__


Step = tuple[Kind, int, int]
"""Kind, stage and micro-batch of a computation."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """Properties of all actions of a kind.

    Attributes:
        name: The action, or what a transfer carries, in words.
        needs: Kinds of the same stage and micro-batch that come earlier on the rank, if the plan
            has them. An action of a batch needs the actions of all micro-batches of the batch on
            all stages of the rank; an action of a micro-batch needs the UPDATE that makes its
            weights.
        receive: The transfer of its input.
        send: The transfer of its output.
        flow: 1 to later stages, -1 to earlier ones.
        matching_recv: The receive that matches a send.
        is_async: It starts something and returns; all others take the rank's time.
        per_batch: Its number is a batch.
        per_item: Its number is an item of the rank's state.
        is_offload: It moves activations that a micro-batch keeps between forward and backward.
        cut: 1 if there is one for each segment, from the first to the last; -1: from the last to
            the first.
        holds: Its change of the number of micro-batches whose activations the rank holds.
        reads: It needs the weights of its version.
        adds: It adds to its batch's gradients, which the batch's UPDATE consumes.
        makes: It writes the weights of its version.
        after: A kind whose action of the previous batch comes first.
        part_of: The kind that it is a part of.
        awaits: What a rank that waits before it lacks, in words.
    """

    name: str
    needs: tuple[Kind, ...] = ()
    receive: Kind | None = None
    send: Kind | None = None
    flow: int = 0
    matching_recv: Kind | None = None
    is_async: bool = False
    per_batch: bool = False
    per_item: bool = False
    is_offload: bool = False
    cut: int = 0
    holds: int = 0
    reads: bool = False
    adds: bool = False
    makes: bool = False
    after: Kind | None = None
    part_of: Kind | None = None
    awaits: str = "another rank"

    @property
    def peer_offset(self) -> int:
        """Offset of the stage at a transfer's other end: 1 next, -1 previous, 0 no transfer."""
        if not self.is_async:
            return 0
        return self.flow if self.matching_recv else -self.flow


_K = Kind
_BACKWARD = ActionSpec(
    "backward",
    (_K.F, _K.RECV_B, _K.RELOAD),
    _K.RECV_B,
    _K.SEND_B,
    -1,
    cut=-1,
    holds=-1,
    reads=True,
    adds=True,
    awaits="the gradient",
)
ACTION_SPECS: dict[Kind, ActionSpec] = {
    _K.F: ActionSpec(
        "forward",
        (_K.RECV_F, _K.UPDATE),
        _K.RECV_F,
        _K.SEND_F,
        1,
        cut=1,
        holds=1,
        reads=True,
        awaits="the activation",
    ),
    _K.B: _BACKWARD,
    _K.I: replace(_BACKWARD, name="backward to the input", holds=0, part_of=_K.B),
    _K.W: ActionSpec("backward to the weights", (_K.I,), cut=-1, holds=-1, adds=True, part_of=_K.B),
    _K.SEND_F: ActionSpec("activation", (_K.F,), flow=1, matching_recv=_K.RECV_F, is_async=True),
    _K.RECV_F: ActionSpec("activation", flow=1, is_async=True),
    _K.SEND_B: ActionSpec(
        "gradient", (_K.B, _K.I), flow=-1, matching_recv=_K.RECV_B, is_async=True
    ),
    _K.RECV_B: ActionSpec("gradient", flow=-1, is_async=True),
    _K.REDUCE: ActionSpec("reduction", (_K.B, _K.W), is_async=True, per_batch=True),
    _K.NORM: ActionSpec(
        "norm", (_K.REDUCE,), is_async=True, per_batch=True, cut=-1, awaits="the reduction"
    ),
    _K.HOST: ActionSpec(
        "host update",
        (_K.NORM, _K.REDUCE),
        is_async=True,
        per_batch=True,
        cut=1,
        makes=True,
        after=_K.UPDATE,
        awaits="the norm",
    ),
    _K.UPDATE: ActionSpec(
        "update",
        (_K.HOST, _K.NORM, _K.REDUCE),
        per_batch=True,
        cut=1,
        makes=True,
        awaits="the norm or the host",
    ),
    _K.FETCH: ActionSpec("fetch", is_async=True, per_item=True),
    _K.RELEASE: ActionSpec("release", is_async=True, per_item=True),
    _K.DROP: ActionSpec("drop", is_async=True, per_item=True),
    _K.OFFLOAD: ActionSpec("offload", (_K.F,), is_async=True, is_offload=True),
    _K.EVICT: ActionSpec(
        "evict", (_K.OFFLOAD,), is_async=True, is_offload=True, awaits="the slow tier"
    ),
    _K.RELOAD: ActionSpec("reload", (_K.EVICT,), is_async=True, is_offload=True),
}

PER_BATCH = frozenset(kind for kind, row in ACTION_SPECS.items() if row.per_batch)
"""Kinds whose `microbatch` is a batch number."""
PER_ITEM = frozenset(kind for kind, row in ACTION_SPECS.items() if row.per_item)
"""Kinds whose `microbatch` is the number of an item of the rank's state."""
OFFLOAD_KINDS = tuple(kind for kind, row in ACTION_SPECS.items() if row.is_offload)
"""Kinds that move activations, in their order."""
AWAITS_ACTIVATIONS = frozenset(
    kind
    for kind, row in ACTION_SPECS.items()
    if not {Kind.OFFLOAD, Kind.RELOAD}.isdisjoint(row.needs)
)
"""Kinds that wait for a move of their micro-batch's activations: EVICT, and backwards."""
MOVES = PER_ITEM.union(OFFLOAD_KINDS)
"""Kinds that move state or activations. Schedules do not ask for them: other passes add them."""
BESIDE = frozenset(kind for kind, row in ACTION_SPECS.items() if row.is_async)
"""Asynchronous kinds: they start something and return."""
COMPUTE = frozenset(ACTION_SPECS) - PER_BATCH - BESIDE
"""Kinds that compute with a micro-batch."""
INPUTS = frozenset(kind for kind, row in ACTION_SPECS.items() if row.receive)
"""Kinds that compute with a tensor that another stage has sent."""
