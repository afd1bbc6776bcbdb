"""Reads checkpoints: to go on training on the same grid, or all shards put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpar.checkpoint.files import sha256
from hybridpar.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ShardFile,
    check_compatible,
    folder_of,
    placements_from_plain,
    read_manifest,
    saved_steps,
)
from hybridpar.checkpoint.save import Trainee
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.errors import CheckpointError
from hybridpar.nn.placement import Placement


@dataclass(frozen=True)
class Shard:
    """One file. `parts`: of parameters that its writer updates in part, which elements of the local tensor."""

    tensors: Mapping[str, Tensor]
    state: dict[str, Any]
    placements: dict[str, Placement]
    parts: dict[str, tuple[int, int]]


def resume(root: Path, engine: Trainee, corpus: str, say: Callable[[str], None]) -> int:
    """Loads the newest checkpoint under `root` that is whole into `engine`; its step, or 0 where there is none.

    A damaged one is passed over, and `say` is told so. Collectives: on all ranks of the grid.
    Raises: CheckpointError, on all ranks: another model, grid or corpus, or no checkpoint is whole.
    """
    grid = engine.grid
    steps = gather_objects(saved_steps(root), grid.world)[0]
    for step in steps:
        folder = folder_of(root, step)
        damage, mismatch = "", ""
        try:
            manifest = read_manifest(folder)
            mismatch = _mismatch(manifest, engine.config, corpus, folder)
            if not mismatch:
                pp, tp, dp = grid.pp.rank, grid.tp.rank, grid.dp.rank if engine.config.parallel.zero else 0
                shard = read_shard(folder, find_shard(manifest, pp, tp, folder, dp))
                tensors = dict(shard.tensors)
                if dp:
                    first = read_shard(folder, find_shard(manifest, pp, tp, folder)).tensors
                    tensors |= {name: t for name, t in first.items() if name.startswith("weights/")}
                # memory of its own: what was read may be a mapping of a file that is soon removed
                engine.load_state({n: t.to(engine.device, copy=True) for n, t in tensors.items()}, shard.state)
        except CheckpointError as error:
            damage = str(error)
        outcomes = gather_objects((damage, mismatch), grid.world)
        if wrong := [text for _, text in outcomes if text]:
            raise CheckpointError(wrong[0])
        if damages := [text for text, _ in outcomes if text]:
            say(f"{damages[0]}: passed over")
            continue
        return step
    if steps:
        raise CheckpointError(f"{root}: none of the {len(steps)} checkpoints is whole; move them away to start again")
    return 0


def _mismatch(manifest: Manifest, config: Config, corpus: str, folder: Path) -> str:
    try:
        check_compatible(manifest.config, config, folder)
    except CheckpointError as error:
        return str(error)
    if manifest.corpus != corpus:
        return (f"{folder} was trained on other data than data.corpus = {list(config.data.corpus)} holds now "
                f"(fingerprint {manifest.corpus}, now {corpus}); choose another run.name")
    return ""


def find_shard(manifest: Manifest, pp: int, tp: int, folder: Path, dp: int = 0) -> ShardFile:
    """Raises: CheckpointError if the manifest does not list the part."""
    for shard in manifest.shards:
        if (shard.pp, shard.tp, shard.dp) == (pp, tp, dp):
            return shard
    raise CheckpointError(f"{folder}: has no part of stage {pp}, tensor part {tp}")


def read_shard(folder: Path, expected: ShardFile) -> Shard:
    """One file, after its size and checksum were compared with the manifest's.

    Raises: CheckpointError if it is missing or damaged.
    """
    shard = open_shard(folder, expected)
    try:
        return replace(shard, tensors=dict(shard.tensors))
    except SafetensorError as error:
        raise CheckpointError(f"{folder / expected.name}: is damaged ({error})") from None


class _InFile(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        self._names = frozenset(self._file.keys())

    @property
    def header(self) -> dict[str, str]:
        return self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_shard(folder: Path, expected: ShardFile, *, check: bool = True) -> Shard:
    """As read_shard, but no tensor is read yet. `check`: whether the checksum is compared, or the size alone."""
    path = folder / expected.name
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            raise CheckpointError(f"{path}: has {size} bytes, should have {expected.num_bytes}")
        if check and sha256(path) != expected.sha256:
            raise CheckpointError(f"{path}: is damaged (its checksum differs from the manifest's)")
        tensors = _InFile(path)
        header = tensors.header
        parts = {name: (int(a), int(b)) for name, (a, b) in json.loads(header.get("parts", "{}")).items()}
        placements = placements_from_plain(json.loads(header["placements"]))
        return Shard(tensors, json.loads(header["state"]), placements, parts)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged ({type(error).__name__}: {error})") from None


def newest(root: Path, say: Callable[[str], None]) -> Path:
    """The folder of the newest checkpoint under `root` that is whole. Raises: CheckpointError if there is none."""
    for step in saved_steps(root):
        folder = folder_of(root, step)
        try:
            for shard in read_manifest(folder).shards:
                read_shard(folder, shard)
            return folder
        except CheckpointError as error:
            say(f"{error}: passed over")
    raise CheckpointError(f"{root}: holds no whole checkpoint")


def find(path: str | Path, say: Callable[[str], None]) -> Path:
    """The checkpoint that a path names: itself, or the newest of a run folder that is whole.

    Raises: CheckpointError if there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a run folder, nor a checkpoint in one")
    return path if (path / MANIFEST).is_file() else newest(path / "checkpoints", say)


class FullWeights:
    """The newest weights of a checkpoint, put together one at a time: the fp32 master where there is one.

    A weight that is tied across stages appears under both its names. `check`: whether checksums are compared.
    Raises: CheckpointError if a file is missing or damaged.
    """

    def __init__(self, folder: Path, *, check: bool = True):
        self.folder, self.manifest = folder, read_manifest(folder)
        self._shards = {(s.pp, s.tp, s.dp): open_shard(folder, s, check=check) for s in self.manifest.shards}
        self._num_tp = self.manifest.config.parallel.tp
        self._stage: dict[str, int] = {}
        self.placements: dict[str, Placement] = {}
        for pp in range(self.manifest.config.parallel.pp):
            for tp in range(self._num_tp):
                find_shard(self.manifest, pp, tp, folder)
            self.placements |= self._shards[pp, 0, 0].placements
            self._stage |= dict.fromkeys(self._shards[pp, 0, 0].placements, pp)

    def read(self, name: str) -> Tensor:
        """The global tensor of a parameter. Raises: CheckpointError."""
        place, pp = self.placements[name], self._stage[name]
        return place.assemble([_newest_weight(name, pp, tp, self._shards) for tp in range(self._num_tp)])

    def find_tied(self, name: str, tied: str) -> str | None:
        """What a parameter is called here: its name, or that of one that is tied to it; None where there is neither."""
        if name in self.placements:
            return name
        return next((other for other, place in self.placements.items() if tied and place.tied == tied), None)


def load_full(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """The configuration, and all of FullWeights. Shapes: the global ones, by parameter name. Raises: as there."""
    full = FullWeights(folder)
    return full.manifest.config, {name: full.read(name) for name in full.placements}


def _newest_weight(name: str, pp: int, tp: int, shards: Mapping[tuple[int, int, int], Shard]) -> Tensor:
    """A local tensor of a stage and tensor part; of a master that is kept in parts, those of all its keepers."""
    shard = shards[pp, tp, 0]
    found = shard.tensors.get(f"weights/{max(shard.state['versions'])}/{name}")
    if found is None:
        raise CheckpointError(f"the shard of stage {pp}, tensor part {tp} does not hold {name}")
    pieces, tied = {}, shard.placements[name].tied
    for keeper in (s for (_, t, _), s in shards.items() if t == tp):  # those of a tied weight may be on another stage
        for other, known in keeper.placements.items():
            if other == name or (tied and known.tied == tied):
                master = keeper.tensors.get(f"master/{other}")
                if master is not None:
                    pieces[keeper.parts.get(other, (0, found.numel()))] = master
    if not pieces:
        return found
    whole = torch.cat([pieces[part].flatten() for part in sorted(pieces)])
    if whole.numel() != found.numel():
        raise CheckpointError(f"the parts of master/{name} do not make up the whole")
    return whole.view(found.shape)
