"""The tensors of a Megatron checkpoint, assembled from the shards of its tensor and pipeline ranks.

    FOLDER/latest_checkpointed_iteration.txt            100, or release
    FOLDER/iter_0000100/mp_rank_TT/model_optim_rng.pt           tensor rank TT, without pipeline
    FOLDER/iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt       tensor rank TT of pipeline rank PPP

Each file is {"model": tensors, "args": Namespace, "checkpoint_version": number, ..}, with "model0",
"model1", .. if a rank has several virtual stages. A model.safetensors with the same names may
replace it, and an args.json takes precedence over the arguments in the files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybridpar.checkpoint.format.pickled import Inert, load_pickled, tensors_in
from hybridpar.checkpoint.huggingface.source import DAMAGED, dtype_name, read_json
from hybridpar.checkpoint.megatron.family import INERT, OLD, RENAMED, SPLIT
from hybridpar.errors import CheckpointError, shown
from hybridpar.reading import errors_as, open_regular

LATEST = "latest_checkpointed_iteration.txt"
ARGUMENTS = "args.json"
_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?")
_PICKLED = ("model_optim_rng.pt", "model_rng.pt")
_SAFE = "model.safetensors"
_LONGEST_TRACKER = 100
_WORDS = "embedding.word_embeddings.weight"
_CHUNK = re.compile(r"model([0-9]{0,6})")
_PLAIN = (bool, int, float, str, type(None))
_LONGEST_LIST = 10_000
"""Most integers of an argument that is a list, one for each layer."""
_LAYER = re.compile(r"decoder\.layers\.([0-9]{1,6})\.(.*)")

Place = tuple[int, int]  # pipeline rank, tensor rank


def is_megatron(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint of Megatron-LM, or a folder of such
    checkpoints."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return LATEST in names or any(
        _RANK.fullmatch(n) or re.fullmatch(r"iter_\d{7}", n) for n in names
    )


class MegatronFiles:
    """The tensors of a full model, by the names of family.py; a Weights.

    Attributes: `folder` of the iteration; `args` Megatron's arguments; `rows` of the embedding,
    padding included; `num_ranks` (tensor, pipeline); `is_core` whether Megatron Core's model, and
    not an older one, has such tensors.

    Raises:
        CheckpointError: Files are missing or damaged, have another format, or do not match each
            other.
    """

    def __init__(self, folder: Path):
        self.folder = _iteration(folder)
        places = _places(self.folder)
        tp, pp = (1 + max(place[i] for place in places) for i in (1, 0))
        for stage, rank in ((i // tp, i % tp) for i in range(min(tp * pp, len(places) + 1))):
            if (stage, rank) not in places:
                raise CheckpointError(
                    f"{self.folder}: has no file of tensor rank {rank}, pipeline rank {stage}, "
                    "with "
                    f"{tp} x {pp} ranks in all"
                )
        self.num_ranks = tp, pp
        shards = {place: _read_shard(path) for place, path in places.items()}
        self.args, self.version = self._arguments(shards[0, 0].plain)
        self.is_core = not any(shard.has_old_names for shard in shards.values())
        self._check_ranks()
        self._parts = _together(
            self.folder, {place: shard.chunks for place, shard in shards.items()}, tp, pp
        )
        if _WORDS not in self._parts:
            raise CheckpointError(
                f"{self.folder}: has no {_WORDS}; only GPT models can be imported"
            )
        self._vocab_size = sys.maxsize
        self.rows = self._shape(_WORDS)[0]
        self._vocab_size = self.rows
        self.dtypes = {name: self._dtype(name) for name in self._parts}
        self.shapes = {name: self._shape(name) for name in self._parts}

    def cut_vocabulary(self, size: int) -> None:
        """Keep only the first `size` rows of embedding and output layer."""
        self._vocab_size = size
        self.shapes = {name: self._shape(name) for name in self._parts}

    def _arguments(self, plain: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Return the arguments and the version. Values that are neither plain nor empty are
        replaced by the names of their types, which match no value that we know."""
        beside = (self.folder / ARGUMENTS, self.folder.parent / ARGUMENTS)
        args = next((read_json(path) for path in beside if path.is_file()), None)
        if args is None and isinstance(plain.get("args"), Inert):
            args = vars(plain["args"])
        if args is None:
            raise CheckpointError(
                f"{self.folder}: has no arguments, which describe the model; write Megatron's "
                f"arguments, as names and values, into {self.folder / ARGUMENTS}"
            )
        version = plain.get(
            "checkpoint_version", args.get("checkpoint_version", 0 if "args" in plain else 3)
        )
        if (
            isinstance(version, bool)
            or not isinstance(version, (int, float))
            or version not in (0, 1, 2, 3)
        ):
            raise CheckpointError(
                f"{self.folder}: has checkpoint_version {version!r}; supported: 0 to 3"
            )
        return {key: v if _is_plain(v) else type(v).__name__ for key, v in args.items()}, int(
            version
        )

    def _check_ranks(self) -> None:
        tp = self.args.get("tensor_model_parallel_size", self.args.get("model_parallel_size"))
        said = tp, self.args.get("pipeline_model_parallel_size")
        if any(a not in (None, b) for a, b in zip(said, self.num_ranks, strict=True)):
            raise CheckpointError(
                f"{self.folder}: has files for {self.num_ranks[0]} tensor and "
                f"{self.num_ranks[1]} pipeline ranks, which do not match its arguments: "
                f"{said[0]} and {said[1]}"
            )

    def _dtype(self, name: str) -> str:
        kinds = {dtype_name(part.dtype) for part in self._parts[name]}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self.folder}: {name} has types {', '.join(sorted(kinds))} on different ranks"
            )
        return kinds.pop()

    def _shape(self, name: str) -> tuple[int, ...]:
        parts, dim = self._parts[name], _split_dim(name)
        shape = list(parts[0].shape)
        if dim is not None:
            if any(part.dim() <= dim for part in parts):
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {shape}; must have at least {dim + 1} "
                    f"dimensions"
                )
            shapes = [list(part.shape) for part in parts]
            if any(x[:dim] + x[dim + 1 :] != shape[:dim] + shape[dim + 1 :] for x in shapes):
                raise CheckpointError(
                    f"{self.folder}: {name} has shapes {shown(shapes)} on its tensor ranks; "
                    f"they may differ in dimension {dim} only"
                )
            shape[dim] = sum(part.shape[dim] for part in parts)
        if self._has_vocabulary(name):
            shape[0] = min(shape[0], self._vocab_size)
        return tuple(shape)

    def _has_vocabulary(self, name: str) -> bool:
        return bool(SPLIT[0][0].fullmatch(name))

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises: CheckpointError if ranks that should have equal tensors do not."""
        parts, dim = self._parts[name], _split_dim(name)
        if dim is None:
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise CheckpointError(
                    f"{self.folder}: {name} differs between tensor ranks, but must be the same "
                    f"on all"
                )
            return parts[0]
        if ".linear_qkv." in name:
            parts = [self._by_head(part) for part in parts]
        if ".linear_fc1." in name and self.args.get("swiglu"):
            if any(len(part) % 2 for part in parts):
                raise CheckpointError(
                    f"{self.folder}: {name} has {len(parts[0])} rows on a rank; must be even"
                )
            parts = [half for i in range(2) for half in (part.chunk(2)[i] for part in parts)]
        whole = torch.cat(parts, dim)
        return whole[: self._vocab_size] if self._has_vocabulary(name) else whole

    def _by_head(self, part: Tensor) -> Tensor:
        """Return the queries, keys and values head by head, as later versions have them."""
        if self.version >= 2:
            return part
        heads = self.args["num_attention_heads"] // self.num_ranks[0]
        channels = self.args["hidden_size"] // self.args["num_attention_heads"]
        if isinstance(self.args.get("kv_channels"), int):
            channels = self.args["kv_channels"]
        shape = (3, heads, channels) if self.version == 0 else (heads, channels, 3)
        if len(part) != 3 * heads * channels:
            raise CheckpointError(
                f"{self.folder}: {len(part)} rows of queries, keys and values, not 3 * {heads} * "
                f"{channels}"
            )
        split = part.reshape(*shape, *part.shape[1:])
        moved = split.transpose(0, 1) if self.version == 0 else split.transpose(1, 2)
        return moved.reshape(part.shape)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _LONGEST_LIST and all(isinstance(one, int) for one in value)
    return isinstance(value, _PLAIN) or (isinstance(value, dict) and not value)


def _iteration(folder: Path) -> Path:
    """Return the folder with the ranks' files: the folder itself, or the one that the tracker
    names."""
    if any(_RANK.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    tracker = folder / LATEST
    if tracker.is_file():
        with open_regular(tracker) as file:
            text = file.read(_LONGEST_TRACKER).decode(errors="replace").strip()
        if not re.fullmatch(r"[0-9]{1,9}|release", text):
            raise CheckpointError(
                f"{tracker}: contains {text[:40]!r}; must be the number of an iteration, or release"
            )
        inner = folder / (text if text == "release" else f"iter_{int(text):07d}")
    else:
        inner = folder
    if not inner.is_dir():
        raise CheckpointError(f"{inner}: does not exist, but {tracker} names it")
    if any((inner / name).exists() for name in ("metadata.json", ".metadata", "common.pt")):
        raise CheckpointError(
            f"{inner}: is a distributed checkpoint (torch_dist), which is not supported; "
            f"convert it with Megatron-LM's --ckpt-convert-format torch --ckpt-convert-save "
            f"FOLDER and import FOLDER"
        )
    if any(_RANK.fullmatch(path.name) for path in inner.iterdir()):
        return inner
    raise CheckpointError(
        f"{inner}: has no folder mp_rank_00 or mp_rank_00_000; name the folder of one iteration"
    )


def _places(folder: Path) -> dict[Place, Path]:
    """Return the file of each rank."""
    found: dict[Place, Path] = {}
    for inner in sorted(folder.iterdir()):
        if not (rank := _RANK.fullmatch(inner.name)):
            if inner.name.startswith("mp_rank_"):
                raise CheckpointError(
                    f"{inner}: must be named mp_rank_TT or mp_rank_TT_PPP, by tensor and "
                    f"pipeline rank; models with experts are not supported"
                )
            continue
        place = int(rank[2] or 0), int(rank[1])
        files = [inner / name for name in (*_PICKLED, _SAFE) if (inner / name).is_file()]
        if not files:
            raise CheckpointError(f"{inner}: has none of {', '.join((*_PICKLED, _SAFE))}")
        if place in found:
            raise CheckpointError(
                f"{inner}: belongs to the same rank as {found[place].parent.name}"
            )
        found[place] = files[0]
    return found


class _Shard(NamedTuple):
    """A rank's file: the tensors of each of its stages, by the names of family.py, and all else
    in it."""

    chunks: list[dict[str, Tensor]]
    plain: Mapping[str, Any]
    has_old_names: bool


def _read_shard(path: Path) -> _Shard:
    if path.suffix == ".safetensors":
        with errors_as(CheckpointError, path, DAMAGED, SafetensorError, failure=DAMAGED):
            return _shard_of([load_file(path)], {}, path)
    plain = load_pickled(path, INERT)
    if not isinstance(plain, Mapping):
        raise CheckpointError(
            f"{path}: holds a {type(plain).__name__}, not a checkpoint of Megatron-LM"
        )
    chunks = sorted(
        (int(found[1] or 0), key)
        for key in plain
        if isinstance(key, str) and (found := _CHUNK.fullmatch(key))
    )
    if not chunks:
        raise CheckpointError(f"{path}: has no 'model'")
    return _shard_of([tensors_in(plain[key], path) for _, key in chunks], plain, path)


def _shard_of(chunks: list[dict[str, Tensor]], plain: Mapping[str, Any], path: Path) -> _Shard:
    has_old_names = any(OLD.search(name) for chunk in chunks for name in chunk)
    return _Shard([_named(chunk, path) for chunk in chunks], plain, has_old_names)


def _named(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        name = theirs
        for old, new in RENAMED:
            name = old.sub(new, name)
        if name in found:
            raise CheckpointError(f"{path}: has {name} twice, once as {theirs}")
        found[name] = tensor
    return found


def _together(
    folder: Path, shards: Mapping[Place, list[dict[str, Tensor]]], tp: int, pp: int
) -> dict[str, list[Tensor]]:
    """Return every tensor of the full model as its shards on the tensor ranks. Stages are in
    order of virtual stage, then rank."""
    found: dict[str, list[Tensor]] = {}
    num_chunks = len(shards[0, 0])
    if any(len(chunks) != num_chunks for chunks in shards.values()):
        raise CheckpointError(f"{folder}: ranks have different numbers of stages")
    first = 0
    for chunk, stage in product(range(num_chunks), range(pp)):
        ranks = [shards[stage, rank][chunk] for rank in range(tp)]
        if different := set().union(*ranks).difference(set(ranks[0]).intersection(*ranks)):
            raise CheckpointError(
                f"{folder}: {min(different)} is not on all tensor ranks of pipeline rank {stage}"
            )
        count = 0
        for name in ranks[0]:
            where = name
            if layer := _LAYER.fullmatch(name):
                count = max(count, int(layer[1]) + 1)
                where = f"decoder.layers.{first + int(layer[1])}.{layer[2]}"
            if where in found:
                raise CheckpointError(f"{folder}: {where} is on pipeline rank {stage} too")
            found[where] = [rank[name] for rank in ranks]
        first += count
    return found


def _split_dim(name: str) -> int | None:
    return next((dim for pattern, dim in SPLIT if pattern.fullmatch(name)), None)
