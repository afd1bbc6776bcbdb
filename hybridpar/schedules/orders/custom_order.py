"""A custom schedule: for each rank the computations of a batch in its order, as text.

    F0 F1 F2 B0 B1 B2       rank 0      micro-batches count from 0 in a batch; F forward, B backward, or its two parts:
    F0 B0 F1 B1 F2 B2       rank 1      I (gradient of the input) and W (of the weights)
    F0 F0b B0b B0           rank 0      if a rank holds several stages: F0 on the first, F0b on the second of them

All other actions are added as to any schedule (lowering.py), and `check` proves that the lists of
all ranks fit together.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile

from hybridpar.errors import config_error
from hybridpar.schedules.kinds import Kind, Step
from hybridpar.schedules.pipeline_shape import PipelineShape

_WORD = re.compile(r"([FBIW])(\d{1,7})([a-z]?)")
_FIELD = "pipeline.order"
_MOST_SUGGESTED = 128
"""Number of micro-batches, counted on each stage, up to which an order fits into a message."""
EXAMPLE = '["F0 F1 B0 B1", "F0 B0 F1 B1"]'
"""An order of two ranks and two micro-batches, as TOML."""


@lru_cache(maxsize=64)
def parse_order(text: str, rank: int) -> tuple[Step, ...]:
    """Return a rank's steps; stages are its virtual stages, from 0. Raises: ConfigError."""
    steps = []
    for word in text.split():
        if (match := _WORD.fullmatch(word)) is None:
            raise config_error(
                _FIELD,
                word,
                f"of rank {rank} must be F, B, I or W, then the number of a micro-batch within "
                f"the batch, then for a rank's second, third, .. stage a letter b, c, ..",
                EXAMPLE,
            )
        steps.append((Kind(match[1]), ord(match[3] or "a") - ord("a"), int(match[2])))
    return tuple(steps)


def format_order(steps: Iterable[tuple[Kind, int, int]], shape: PipelineShape, rank: int) -> str:
    """Return the line of a rank that computes these kinds, stages and micro-batches."""
    chunks = {stage: chunk for chunk, stage in enumerate(shape.stages_of(rank))}
    return " ".join(_word((kind, chunks[stage], k)) for kind, stage, k in steps)


def _word(step: Step) -> str:
    kind, chunk, k = step
    return f"{kind.value}{k}{chr(ord('a') + chunk) if chunk else ''}"


def check_order(order: Sequence[Sequence[Step]], shape: PipelineShape) -> None:
    """Check an order against the shape of the pipeline. Raises: ConfigError."""
    if len(order) != shape.num_ranks:
        rule = f"must have {shape.num_ranks} entries, one for each rank of parallel.pp"
        raise config_error(_FIELD, len(order), rule, _simple_order(shape))
    for rank, steps in enumerate(order):
        if rule := _problem(steps, shape.num_microbatches, shape.virtual_stages):
            text = " ".join(map(_word, steps))
            shown = text if len(text) < 80 else f"{text[:76]} .."
            raise config_error(_FIELD, shown, f"of rank {rank} {rule}", _simple_order(shape))


def _simple_order(shape: PipelineShape) -> str:
    """Return an order that works, as TOML, or another schedule if the order would be long."""
    m = shape.num_microbatches
    p = shape.num_ranks
    chunks = shape.virtual_stages
    if m * p * chunks > _MOST_SUGGESTED:
        return "pipeline.schedule = 1f1b"
    forwards = [_word((Kind.F, chunk, k)) for chunk in range(chunks) for k in range(m)]
    backwards = [_word((Kind.B, chunk, k)) for chunk in reversed(range(chunks)) for k in range(m)]
    return json.dumps([" ".join(forwards + backwards)] * p)


def _problem(steps: Sequence[Step], m: int, chunks: int) -> str:
    """Return the rule that a rank's steps break; empty if they break none."""
    counts = Counter(steps)
    at = {step: i for i, step in enumerate(steps)}
    for chunk in range(chunks):
        for k in range(m):
            four = [(kind, chunk, k) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
            f, b, i, w = map(_word, four)
            if tuple(counts[step] for step in four) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                return (
                    f"must have {f} and either {b} or both {i} and {w}, each once "
                    f"(pipeline.num_microbatches = {m})"
                )
            row = [at[step] for step in four if step in at]
            if row != sorted(row):
                return f"must run {f} before its backward, and {i} before {w}"
    if extra := [k for _, _, k in steps if k >= m]:
        return f"has micro-batch {extra[0]}, but pipeline.num_microbatches is {m}"
    if other := [step for step in steps if step[1] >= chunks]:
        return (
            f"has {_word(other[0])}, but the rank holds {chunks} stage{'s' * (chunks > 1)} of the "
            "model (pipeline.virtual_stages)"
        )
    return _out_of_order(steps, chunks)


def _out_of_order(steps: Sequence[Step], chunks: int) -> str:
    """Return the broken rule about the order of micro-batches, in which neighbours send and
    gradients accumulate; empty if none is broken.
    """
    for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
        for chunk in range(chunks):
            numbers = [k for kind, own, k in steps if kind in kinds and own == chunk]
            if numbers != sorted(numbers):
                names = " and ".join(kind.value for kind in kinds)
                return (
                    f"must have its {names} in the order of micro-batches: neighbours send, "
                    f"and gradients accumulate, in this order"
                )
    return ""


def runs_ahead(steps: Sequence[Step]) -> int:
    """Return the number of forwards before the one that the first backward follows."""
    return max(sum(1 for _ in takewhile(lambda step: step[0] is Kind.F, steps)) - 1, 0)
