"""A checkpoint folder and its table of contents.

    checkpoints/
        step_00000100/
            pp0-tp0.safetensors  pp0-tp1.safetensors ...     the shards of each pipeline stage and tensor part
            pp0-tp0-dp1.safetensors ...                      what other replicas keep: with ZeRO
                                                             optimizer state, and what they have not
                                                             sent of compressed gradients
            pp0-tp0-site1.safetensors ...                    of several sites: the same of each but
                                                             the first
            manifest.json                                    written last: who made them, at which
                                                             step, checksums, its own among them
        step_00000200/ ...

A shard's tensors have the keys of state.kinds, and its own header says how they are placed
(shards.py); nothing is pickled, and no name leads out of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from hybridpar import __version__
from hybridpar.checkpoint.format.files import sync, write_text
from hybridpar.config import (
    FINITE,
    Config,
    Whole,
    Within,
    from_mapping,
    from_plain,
    rank_of_stage,
    span,
    to_mapping,
)
from hybridpar.data import FROM_THE_START, DataStart
from hybridpar.errors import CheckpointError, ConfigError, shown
from hybridpar.grid import ALONE, BATCH, EXPERT_AXES, MODEL, Place, sizes_of, where_of
from hybridpar.reading import errors_as, parse_json, read_limited

FORMAT = 3
MANIFEST = "manifest.json"
_CHECKSUM = "sha256"
_MAX_BYTES = 64 << 20
_NAME = re.compile(r"\.?step_([0-9]{8,18})(\.old)?")


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class ShardFile:
    """A file of a checkpoint: what the rank at `place` wrote; axes that divide the model come
    first.

    `blocks` has the first block of the stage and the one after its last; for a rank with several
    virtual stages, a pair for each. `checksums` are the result of tensorfile.write_tensors.
    """

    place: Place
    blocks: tuple[int, ...]
    num_bytes: int
    checksums: str

    @property
    def name(self) -> str:
        return file_name(self.place)

    @property
    def spans(self) -> tuple[range, ...]:
        """The blocks of each virtual stage."""
        return tuple(map(range, self.blocks[::2], self.blocks[1::2]))

    def as_plain(self) -> dict[str, Any]:
        """Return JSON values that `parse_shard` reads."""
        return {
            "name": self.name,
            **self.place,
            "blocks": self.blocks,
            "num_bytes": self.num_bytes,
            "checksums": self.checksums,
        }


def saved_place(config: Config, place: Place = ALONE) -> Place:
    """Return `place` as a checkpoint writes it: the axes that divide the model first."""
    return {name: place.get(name, 0) for name in (*MODEL, *sizes_of(config.parallel))}


def file_name(place: Place) -> str:
    """Return the name of the file of the rank at `place`, such as pp0-tp1.safetensors or
    pp0-tp1-dp2.safetensors."""
    return (
        "-".join(f"{name}{index}" for name, index in place.items() if name in MODEL or index)
        + ".safetensors"
    )


@dataclass(frozen=True)
class TrainingState:
    """The state of training besides its tensors; equal on all ranks of a site.

    `versions`: weight versions that all stages have saved. `num_updates`: steps that the optimizer
    made. `loss_scales`: the loss scale of each version. `recent`: recent losses and norms, if
    anomalies are looked for. `data_start`: position of batches in the data stream. `outer_start`:
    the step after which sites began to train apart.
    """

    batches_done: Whole
    versions: Annotated[tuple[int, ...], Within(0)]
    num_updates: Whole = 0
    loss_scaler: Annotated[Mapping[str, float], FINITE] = field(default_factory=dict)
    loss_scales: Annotated[Mapping[int, float], FINITE] = field(default_factory=dict)
    recent: Annotated[Mapping[str, tuple[float, ...]], FINITE] = field(default_factory=dict)
    data_start: DataStart = FROM_THE_START
    outer_start: Whole = 0

    @staticmethod
    def of(meta: Mapping[str, Any]) -> TrainingState:
        """Return the state from the plain values of Engine.state_meta or a manifest.

        Raises:
            ValueError: The values are inconsistent.
        """
        state: TrainingState = from_plain(TrainingState, meta, "state", lenient=True)
        done = state.batches_done
        versions = state.versions
        if not versions or list(versions) != sorted(set(versions)) or versions[-1] != done:
            raise ValueError(f"versions must ascend to batches_done = {done}")
        steps = state.num_updates, state.data_start.batch, state.outer_start, *state.loss_scales
        if not all(0 <= step <= done for step in steps):
            raise ValueError(
                f"num_updates, data_start, outer_start and loss_scales must belong to steps up "
                f"to batches_done = {done}"
            )
        return state

    def as_meta(self) -> dict[str, Any]:
        """Return plain values for Engine.load_state."""
        return asdict(self) | {
            "versions": list(self.versions),
            "loss_scales": {str(v): scale for v, scale in self.loss_scales.items()},
        }


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents.

    `corpus`: fingerprint of the data. `val_loss`: validation loss at this step. `state`: state of
    the first site. `other_sites`: states of the others.
    """

    config: Config
    corpus: str
    state: TrainingState
    shards: tuple[ShardFile, ...]
    val_loss: float | None = None
    other_sites: tuple[TrainingState, ...] = ()

    def of_site(self, site: int) -> Manifest:
        """Return the manifest with the given site's state as `state`."""
        return replace(self, state=(self.state, *self.other_sites)[site])

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.state.batches_done

    def to_json(self) -> str:
        parallel = self.config.parallel
        step = self.step
        others = {"cp": parallel.cp} if parallel.cp > 1 else {}
        others |= {"ep": parallel.ep} if parallel.ep > 1 else {}
        others |= {"sites": parallel.sites} if parallel.sites > 1 else {}
        document = {
            "format": FORMAT,
            "step": step,
            "grid": {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, **others},
            "data": {"corpus": self.corpus, "samples": self._position()},
            "val_loss": self.val_loss,
            "versions": {"hybridpar": __version__, "torch": torch.__version__},
            "state": self.state.as_meta(),
            **(
                {"other_sites": [state.as_meta() for state in self.other_sites]}
                if self.other_sites
                else {}
            ),
            "shards": [shard.as_plain() for shard in self.shards],
            "config": to_mapping(self.config),
        }
        return _with_checksum(document)

    def _position(self) -> int:
        """Position in the data stream."""
        return self.state.data_start.position(self.step, self.config.global_batch_size)


def _with_checksum(document: Mapping[str, Any]) -> str:
    return json.dumps({**document, _CHECKSUM: _checksum(document)}, indent=1)


def _checksum(document: Mapping[str, Any]) -> str:
    """Return a checksum of JSON values, independent of their layout. Floats are written so that
    they read back equal."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing or damaged, has another format, or its step does not match
            the folder's name.
    """
    path = folder / MANIFEST
    with errors_as(CheckpointError, path, "is damaged"):
        document = _read_document(path)
        try:
            manifest = _parse(document)
        except ConfigError as error:  # its checksum is right, so another version wrote it
            raise CheckpointError(f"{path}: {error}") from None
    if step_of(folder.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{folder}: its manifest is for step {manifest.step}, so the folder was renamed or "
            f"copied; rename it to {folder_name(manifest.step)} if that name is free, or move "
            f"it out of {folder.absolute().parent}"
        )
    return manifest


def misnamed_step(folder: Path) -> int | None:
    """Return the step of a manifest if it does not match the folder's name; None if it matches
    or is damaged."""
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        step: int = from_plain(Whole, _read_document(folder / MANIFEST).get("step"), "step")
        return None if step_of(folder.name) in (None, step) else step
    return None


def _read_document(path: Path) -> dict[str, Any]:
    """Return the values of a manifest, without its checksum. Raises: OSError, ValueError,
    CheckpointError."""
    document = from_plain(
        dict[str, Any], parse_json(read_limited(path, _MAX_BYTES, within=path.parent)), "it"
    )
    if (version := document.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path}: has format {shown(version)}; this version of hybridpar reads format {FORMAT}"
        )
    if document.pop(_CHECKSUM, "") != _checksum(document):
        raise ValueError("its checksum does not match")
    return document


def add_val_loss(folder: Path, val_loss: float) -> None:
    """Add a step's validation loss to the manifest of its checkpoint. A crash leaves the old or the
    new manifest.

    Raises:
        CheckpointError: The manifest is damaged or cannot be written.
    """
    path = folder / MANIFEST
    with errors_as(CheckpointError, path, "is damaged", failure="cannot be rewritten"):
        document = _read_document(path) | {"val_loss": val_loss}
        write_text(path, _with_checksum(document))
        sync(folder)


@dataclass(frozen=True)
class _Data:
    """Position of training in its data, as JSON has it."""

    corpus: str
    samples: Whole


@dataclass(frozen=True)
class _Document:
    """manifest.json, as JSON has it."""

    config: dict[str, Any]
    data: _Data
    state: dict[str, Any]
    step: Whole
    shards: tuple[Any, ...]
    other_sites: tuple[Any, ...] = ()
    val_loss: Annotated[float | None, FINITE] = None


def _parse(document: Any) -> Manifest:
    """Convert the JSON document to a Manifest. Raises: ValueError, ConfigError."""
    read: _Document = from_plain(_Document, document, "it", lenient=True)
    config, state = from_mapping(read.config), TrainingState.of(read.state)
    if min(sizes_of(config.parallel).values()) < 1:
        raise ValueError("its grid is empty")
    others = tuple(map(TrainingState.of, read.other_sites))
    if any(read.step != of_site.batches_done for of_site in (state, *others)):
        raise ValueError("it names two steps")
    if len(others) != config.parallel.sites - 1:
        raise ValueError(
            f"it has the state of {len(others) + 1} sites, which does not match its grid's "
            f"{config.parallel.sites}"
        )
    manifest = Manifest(
        config,
        read.data.corpus,
        state,
        tuple(parse_shard(shard, config) for shard in read.shards),
        read.val_loss,
        others,
    )
    if read.data.samples != manifest._position():
        raise ValueError("its step does not match its position in the data")
    _check_stages(manifest)
    return manifest


@dataclass(frozen=True)
class _Shard:
    """A ShardFile without its place, as JSON has it."""

    name: str
    blocks: tuple[int, ...]
    num_bytes: Whole
    checksums: str


def parse_shard(entry: Any, config: Config) -> ShardFile:
    """Convert a JSON entry to a file of a checkpoint of `config`. Raises: ValueError."""
    read = from_plain(_Shard, entry, "a shard", lenient=True)
    sizes = sizes_of(config.parallel)
    place = {
        name: from_plain(Annotated[int, Within(0, sizes[name] - 1)], entry.get(name), name)
        for name in saved_place(config)
    }
    for i in range(0, max(len(read.blocks), 1), 2):
        span(read.blocks[i : i + 2], "blocks", config.model.num_blocks)
    shard = ShardFile(place, read.blocks, read.num_bytes, read.checksums)
    if read.name != shard.name:
        raise ValueError(
            f"the file of {where_of([place['pp']], place)} must be called {shard.name}, "
            f"not {shown(read.name)}"
        )
    if not re.fullmatch("([0-9a-f]{8})+", shard.checksums):
        raise ValueError(f"{shard.name} has no checksums")
    return shard


def _check_stages(manifest: Manifest) -> None:
    """Check that every pipeline stage and tensor-parallel rank of each site has one file, and that
    the stages cover all blocks.

    Raises:
        ValueError: They do not.
    """
    parallel = manifest.config.parallel
    if len({shard.name for shard in manifest.shards}) < len(manifest.shards):
        raise ValueError("it names a file twice")
    copies = [name for name in BATCH if name not in EXPERT_AXES]
    firsts = [
        shard for shard in manifest.shards if not any(shard.place.get(name) for name in copies)
    ]
    if len(firsts) != parallel.pp * parallel.ep * parallel.tp * parallel.sites:
        experts = f", {parallel.ep} expert-parallel" if parallel.ep > 1 else ""
        raise ValueError(
            f"its files do not match {parallel.pp} stages{experts} and {parallel.tp} "
            f"tensor-parallel ranks"
        )
    held = {(shard.place["pp"], shard.blocks) for shard in manifest.shards}
    stages = sorted(
        (start, stop, pp)
        for pp, blocks in dict(held).items()
        for start, stop in zip(blocks[::2], blocks[1::2], strict=True)
    )
    edges = [0, *(stop for _, stop, _ in stages)]
    around = [
        rank_of_stage(number, parallel.pp, manifest.config.pipeline.stage_layout)
        for number in range(len(stages))
    ]
    if (
        len(held) != parallel.pp
        or [s for s, _, _ in stages] != edges[:-1]
        or [pp for _, _, pp in stages] != around
    ):
        raise ValueError("its stages do not follow each other")
    if edges[-1] != manifest.config.model.num_blocks:
        raise ValueError(
            f"its stages have {edges[-1]} blocks in all, but its model has "
            f"{manifest.config.model.num_blocks}"
        )
