"""Action: one step of a rank, as data. A plan is a sequence of actions for each rank (pipeline
stage).

    F12@1v3     stage 1 runs micro-batch 12 forward with weights W(3)        I12@1v3, W12@1v3: a backward in two parts,
    B12@1v3     ... and backward, with the same weights                      gradients of the input and of the weights
    RECV_F12@1  posts the receive of its input       SEND_F12@1  sends its output
    RECV_B12@1  posts the receive of its gradient    SEND_B12@1  sends its input's gradient
    REDUCE4@1   starts the reduction of batch 4's gradients over replicas (and of tied embeddings
                over the end stages)
    NORM4@1     starts the grid-wide reduction of batch 4: gradient norm, loss, inf check
    UPDATE4@1   waits for the norm, and makes W(5) from W(4)
    HOST4@1     waits for the norm, and starts the host's computation of W(5); UPDATE4@1 then waits
                for the host (lowering.py)
    F12@1.2v3   ... segment 2 of the stage alone, if its blocks are cut into segments (segments.py)
    FETCH17@1   starts to load item 17 of the rank's state into the fast tier (residency.py)
    RELEASE17@1 frees its memory there, once it is written back     DROP17@1  ... its content is void
    OFFLOAD12@1 starts to write micro-batch 12's activations to the slow tier (offload.py)
    EVICT12@1   waits for that, and frees their memory              RELOAD12@1  starts to read them back

If a rank holds several stages, REDUCE, NORM, HOST, UPDATE and the moves of items apply to all of
them, and name the first one, which has the rank's number. kinds.py lists what each kind needs,
makes and holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.errors import config_error
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.kinds import COMPUTE as COMPUTE
from hybridpar.schedules.kinds import PER_BATCH as PER_BATCH
from hybridpar.schedules.kinds import PER_ITEM as PER_ITEM
from hybridpar.schedules.kinds import Kind as Kind

NO_VERSION = -1


@dataclass(slots=True, unsafe_hash=True)
class Action:
    """One step of one rank; prints as, for example, `F12@1v3`.

    Actions are never changed. They are not frozen, because a frozen one takes three times as long to
    make, and plans have millions.

    Attributes:
        microbatch: Counts from 0 over the whole run (its batch is microbatch // m). REDUCE, NORM,
            HOST and UPDATE have the batch number here, and FETCH, RELEASE and DROP the item's
            number.
        version: The weight version that a computation uses, or that a HOST or an UPDATE makes
            (batch + 1).
        part: Segment of the stage; 0 if the stage is not cut.
    """

    kind: Kind
    stage: int
    microbatch: int
    version: int = NO_VERSION
    part: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.kind.value}{self.microbatch}@{self.stage}{f'.{self.part}' if self.part else ''}"
        )
        if self.version == _implied_version(self.kind, self.microbatch):
            return text
        return f"{text}v{self.version}"


# by rank on the pipeline axis, which is the stage if each rank has one
Plan = Mapping[int, Sequence[Action]]

_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_PATTERN = re.compile(rf"({_KINDS})(\d+)@(\d+)(?:\.(\d+))?(?:v(-?\d+))?")


def _implied_version(kind: Kind, microbatch: int) -> int:
    """Return the version that the text form leaves out."""
    return microbatch + 1 if ACTION_SPECS[kind].makes else NO_VERSION


def parse_action(text: str) -> Action:
    """Return the action that prints as `text`. Raises: ConfigError if no action does."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise config_error(
            "action",
            text,
            f"must be KIND MICROBATCH @ STAGE [. PART] [v VERSION] without spaces; KIND is one of "
            f"{', '.join(kind.value for kind in Kind)}",
            "F12@1v3 or SEND_F12@1",
        )
    kind = Kind(match[1])
    microbatch = int(match[2])
    version = _implied_version(kind, microbatch) if match[5] is None else int(match[5])
    return Action(kind, int(match[3]), microbatch, version, int(match[4] or 0))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return the actions of a text, separated by white space. Raises: ConfigError."""
    return tuple(map(parse_action, text.split()))
