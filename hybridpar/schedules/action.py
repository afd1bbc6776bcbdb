"""Action: one thing a rank does, as data. A plan is a sequence of them for each rank (pipeline
stage).

    F12@1v3     stage 1 runs micro-batch 12 forward with weights W(3)        I12@1v3, W12@1v3: a backward in two parts,
    B12@1v3     ... and backward, with the same weights                      gradients of the input and of the weights
    RECV_F12@1  posts the receive of its input       SEND_F12@1  sends its output on
    RECV_B12@1  posts the receive of its gradient    SEND_B12@1  sends its input's gradient back
    REDUCE4@1   starts the reduction of batch 4's gradients over replicas (and of tied embeddings
                over the end stages)
    NORM4@1     starts the grid-wide reduction of batch 4: gradient norm, loss, inf check
    UPDATE4@1   waits for that, and makes W(5) of W(4)
    HOST4@1     waits for that, and has the host make W(5); UPDATE4@1 then waits for the host
                (lowering.py)
    F12@1.2v3   ... part 2 of the stage alone, where its blocks are cut into parts (parts.py)
    FETCH17@1   starts to bring item 17 of the rank's state into the fast tier (residency.py)
    RELEASE17@1 gives up its room there, once it is written back    DROP17@1  ... its content is void
    OFFLOAD12@1 starts to write what micro-batch 12 keeps to the slow tier (offload.py)
    EVICT12@1   waits for that, and gives up its memory             RELOAD12@1  starts to bring it back

Where a rank holds several stages, REDUCE, NORM, HOST, UPDATE and what moves items are of all of
them, and name the first, which has the rank's number. What each kind needs, makes and holds is in
kinds.py.
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


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank; prints as, for example, `F12@1v3`.

    `microbatch` counts from 0 over the whole run (its batch is microbatch // m); REDUCE, NORM, HOST
    and UPDATE hold the batch number there, and FETCH, RELEASE and DROP the item's. `version` is the
    weight version that a computation uses, or that a HOST or an UPDATE makes (batch + 1). `part` is
    0 where nothing is cut.
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
        return (
            text
            if self.version == _implied_version(self.kind, self.microbatch)
            else f"{text}v{self.version}"
        )


Plan = Mapping[
    int, Sequence[Action]
]  # by rank on the pipeline axis, which is the stage where each has one

_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_PATTERN = re.compile(rf"({_KINDS})(\d+)@(\d+)(?:\.(\d+))?(?:v(-?\d+))?")


def _implied_version(kind: Kind, microbatch: int) -> int:
    """The version that the text form leaves out."""
    return microbatch + 1 if ACTION_SPECS[kind].makes else NO_VERSION


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises: ConfigError if no action does."""
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
    """The actions of a text; any white space separates. Raises: ConfigError at the first word that
    is not an action."""
    return tuple(map(parse_action, text.split()))
