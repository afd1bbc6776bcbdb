"""The bytes that a run has sent between stages and between replicas, by link and codec, over all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybridpar.comm import gather_objects
from hybridpar.state.compression.method import Sent
from hybridpar.train.engine import Engine
from hybridpar.train.faults.links import amount

UNCODED = "none"
WEIGHT_GRADIENTS = "weight gradients"
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True)
class Stream:
    """A kind of data on a link.

    Attributes:
        link: "stage 0 -> 1", or the axis of replicas that gradients are reduced over.
        what: "activations", "gradients" (of activations) or "weight gradients".
        codec: The codec or compression method; "none" without one.
    """

    link: str
    what: str
    codec: str

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts links between stages by number, before the axes."""
        stages = [int(number) for number in re.findall(r"\d+", self.link)]
        return not stages, stages, self.link, self.codec


def sent_by(engine: Engine) -> dict[Stream, Sent]:
    """Return what this rank has sent in training since its engine was built, by stream."""
    streams = _messages(engine)
    streams.update(_weight_gradients(engine))
    return streams


def gather_sent(engine: Engine) -> dict[Stream, Sent]:
    """Return what all ranks together have sent, by stream, in order. Collectives: one gather."""
    totals: dict[Stream, Sent] = {}
    for streams in gather_objects(sent_by(engine), engine.grid.world):
        for stream, sent in streams.items():
            totals.setdefault(stream, Sent()).add_all(sent)
    return {stream: totals[stream] for stream in sorted(totals, key=lambda one: one.order)}


def as_row(sent: Mapping[Stream, Sent], num_batches: int) -> dict[str, Any]:
    """Return the value of "traffic" in a row of metrics.jsonl: totals of so many batches."""
    streams = [
        asdict(stream)
        | {
            "elements": counts.elements,
            "bytes": counts.num_bytes,
            "whole_elements": counts.whole_elements,
            "whole_bytes": counts.whole_bytes,
        }
        for stream, counts in sent.items()
    ]
    return {"batches": num_batches, "streams": streams}


def describe_sent(sent: Mapping[Stream, Sent], num_batches: int) -> list[str]:
    """Return a line for each stream: what a batch sends on average."""
    lines = []
    for stream, counts in sent.items():
        coded = "uncompressed" if stream.codec == UNCODED else f"by {stream.codec}"
        line = (
            f"sent a batch, {stream.link}: {stream.what} {coded}, "
            f"{counts.elements / num_batches:,.0f} numbers in "
            f"{amount(counts.num_bytes / num_batches)}"
        )
        if stream.codec != UNCODED:
            line = (
                f"{line} (1 / {counts.whole_elements / counts.elements:.3g} of the numbers, "
                f"1 / {counts.whole_bytes / counts.num_bytes:.3g} of the bytes)"
            )
        lines.append(line)
    return lines


def _messages(engine: Engine) -> dict[Stream, Sent]:
    """Return what this rank has sent to other stages."""
    forward, backward = engine.config.compression.both_ways
    streams = {}
    for (into, flow, is_coded), sent in engine.executor.traffic.sent.items():
        stages = f"{into - 1} -> {into}" if flow > 0 else f"{into} -> {into - 1}"
        what = "activations" if flow > 0 else "gradients"
        codec = forward if flow > 0 else backward
        streams[Stream(f"stage {stages}", what, codec if is_coded else UNCODED)] = sent
    return streams


def _weight_gradients(engine: Engine) -> dict[Stream, Sent]:
    """Return what this rank has handed to reductions of gradients, each gradient once."""
    partition = engine.state.partition
    compression = engine.state.compression
    item = partition.layout.dtype.itemsize
    streams = {}
    for axis in {axis.name: axis for axis in partition.axes if axis.size > 1}.values():
        plain_bytes = sum(axis.traffic.num_bytes[name] for name in _REDUCTIONS)
        plain_bytes -= compression.uncoded_bytes_over(axis)
        packed = compression.sent(axis)
        if packed.whole_elements:
            codec = engine.config.compression.gradients
            streams[Stream(axis.name, WEIGHT_GRADIENTS, codec)] = packed
        if plain_bytes:
            numel = plain_bytes // item
            plain = Sent(numel, plain_bytes, numel, plain_bytes)
            streams[Stream(axis.name, WEIGHT_GRADIENTS, UNCODED)] = plain
    return streams
