"""A file of a checkpoint: which tensors of which parameters it has, and their placements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

from hybridpar.checkpoint.format.manifest import ShardFile
from hybridpar.checkpoint.format.tensorfile import TensorFile, TensorInfo
from hybridpar.config import Config, Whole, Within, from_plain, span
from hybridpar.errors import CheckpointError, shown
from hybridpar.grid import AxisSizes, sizes_of
from hybridpar.nn.placement import Init, Placement, Range, Shard
from hybridpar.reading import errors_as, parse_json
from hybridpar.state.kinds import parse_key


class SavedShard:
    """The file of one rank in a checkpoint of `config`.

    Its tensors have the keys of state.kinds, and `placements` has the placements of their
    parameters. `parts` has the elements of the local tensor that the rank updates, for parameters
    that it updates in part; their tensors are vectors, except for kinds that cover full parameters.
    Tensors of kinds that are not `shaped` have any shape. All that is read from `file` is verified
    against the manifest's checksums.

    Raises:
        CheckpointError: The file is missing or damaged, or does not match the manifest or its own
            header.
    """

    def __init__(self, folder: Path, where: ShardFile, config: Config):
        self.where = where
        self.file = TensorFile(folder / where.name, (where.num_bytes, where.checksums))
        with errors_as(CheckpointError, self.file.path, "is damaged"):
            placements, parts = (_parse_json(self.file, key) for key in ("placements", "parts"))
            sizes = sizes_of(config.parallel)
            self.placements = {
                name: _parse_placement(name, value, sizes) for name, value in placements.items()
            }
            self.parts = {
                name: span(value, f"the part of {name}", self._numel(name))
                for name, value in parts.items()
            }
            self._check_blocks(all_have_parameters=config.model.every_block_has_parameters)
            for name, info in self.file.tensors.items():
                self._check_tensor(name, info)

    def _numel(self, name: str) -> int:
        if name not in self.placements:
            raise ValueError(f"{name} has no placement")
        return prod(self._local_shape(name))

    def _local_shape(self, name: str) -> tuple[int, ...]:
        placement = self.placements[name]
        return placement.local_shape(placement.rank_at(self.where.place))

    def _check_blocks(self, *, all_have_parameters: bool) -> None:
        """Check the parameters' blocks against the manifest.

        Every block of GPT and BERT has parameters, so counting them keeps a model from being larger
        than its files. A block of a custom model, such as an activation, may have none.
        """
        own = {str(number) for blocks in self.where.spans for number in blocks}
        found = {
            name.split(".")[1]
            for name in self.placements
            if name.startswith("blocks.") and name.count(".") > 1
        }
        # a tied head is saved with the embedding, and may have no other parameters
        least = len(own) - (len(own) > 1 and any(place.tied for place in self.placements.values()))
        if (all_have_parameters and len(found) < least) or not found <= own:
            says = ", ".join(f"{blocks.start} to {blocks.stop - 1}" for blocks in self.where.spans)
            raise ValueError(
                f"it has parameters of {len(found)} blocks, but its manifest says {says}"
            )

    def _check_tensor(self, name: str, info: TensorInfo) -> None:
        kind, parameter, _ = parse_key(name)
        if parameter not in self.placements:
            raise ValueError(f"{name} has no placement")
        shape = self._local_shape(parameter)
        if not kind.whole and parameter in self.parts:
            start, stop = self.parts[parameter]
            shape = (stop - start,)
        if kind.shaped and info.shape != shape:
            raise ValueError(
                f"{name} has shape {list(info.shape)}, but its placement says {list(shape)}"
            )

    @cached_property
    def kept(self) -> frozenset[tuple[str, str]]:
        """The kinds of state in this file, and which tensors of each, such as ('optimizer',
        'momentum')."""
        return frozenset((kind.name, what) for kind, _, what in map(parse_key, self.file.tensors))


def header_of(placements: Mapping[str, Placement], parts: Mapping[str, Range]) -> dict[str, str]:
    """Return the header in which a file describes its tensors."""
    return {"placements": json.dumps(placements_to_plain(placements)), "parts": json.dumps(parts)}


def placements_to_plain(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Return placements as JSON values: what is needed to join shards, or to reshard them for
    another grid."""
    return {
        name: {
            "shape": list(p.shape),
            "weight_decay": p.weight_decay > 0,
            "tied": p.tied,
            **({} if p.trainable else {"trainable": False}),
            "shard": None
            if p.shard is None
            else {
                "dim": p.shard.dim,
                "ranges": [[list(r) for r in ranges] for ranges in p.shard.ranges],
                **({"axis": p.shard.axis} if p.shard.axis != "tp" else {}),
            },
        }
        for name, p in placements.items()
    }


def _parse_json(file: TensorFile, key: str) -> dict[str, Any]:
    if key not in file.metadata:
        raise ValueError(f"its header has no {key}")
    return from_plain(dict[str, Any], parse_json(file.metadata[key]), key)


@dataclass(frozen=True)
class _Split:
    """A Shard, as JSON has it."""

    dim: Whole
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    axis: str = "tp"


@dataclass(frozen=True)
class _Placed:
    """A placement, as JSON has it, without its initialization."""

    shape: Annotated[tuple[int, ...], Within(0, 2**62)]
    tied: str
    weight_decay: bool = False
    shard: _Split | None = None
    trainable: bool = True


def _parse_placement(name: str, value: Any, sizes: AxisSizes) -> Placement:
    """Convert a JSON value to a placement. Raises: ValueError."""
    read: _Placed = from_plain(_Placed, value, name, lenient=True)
    shard = (
        None if read.shard is None else _parse_split(f"{name}.shard", read.shard, read.shape, sizes)
    )
    return Placement(
        read.shape,
        Init("zeros"),
        shard,
        weight_decay=read.weight_decay,
        tied=read.tied,
        trainable=read.trainable,
    )


def _parse_split(what: str, read: _Split, shape: tuple[int, ...], sizes: AxisSizes) -> Shard:
    if read.dim >= len(shape):
        raise ValueError(
            f"{what}.dim is {shown(read.dim)}, but the parameter has {len(shape)} dimensions"
        )
    if len(read.ranges) != sizes.get(read.axis, 1):
        raise ValueError(
            f"{what}: is split over {len(read.ranges)} ranks, but the grid has "
            f"{shown(read.axis)} = {sizes.get(read.axis, 1)}"
        )
    return Shard(
        read.dim,
        tuple(tuple(span(r, what, shape[read.dim]) for r in ranges) for ranges in read.ranges),
        read.axis,
    )
