"""The readers of our own checkpoints."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from hybridpar import checkpoint
from hybridpar.checkpoint import handover
from hybridpar.checkpoint.folders import best_steps, saved_steps
from hybridpar.checkpoint.format.manifest import MANIFEST
from hybridpar.checkpoint.format.tensorfile import CHUNK, TensorFile
from hybridpar.checkpoint.load import FullWeights, check_files, load
from hybridpar.checkpoint.saved import Saved
from hybridpar.config import from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

from .mutate import mutate_json, mutate_tensors
from .samples import TINY
from .target import Files, Target

SHARD = "pp0-tp0.safetensors"


@functools.cache
def _engine(schedule: str = "2bw") -> Engine:
    config = from_mapping(
        {
            "pipeline": {"schedule": schedule},
            "anomalies": {"loss_spike": 9.0},
            "optim": {"name": "sgd"},
            "model": {"bias": False},
        },
        TINY,
    )
    return Engine(JobPlan(config), ProcessGrid(), torch.device("cpu"))


def make_checkpoints(folder: Path) -> list[Path]:
    made = []
    for schedule in ("2bw", "1f1b"):
        engine = Engine(JobPlan(_engine(schedule).config), ProcessGrid(), torch.device("cpu"))
        engine.train(SyntheticLoader(TINY.model, 1, 2), 3, lambda step: None)
        made.append(checkpoint.save(folder / schedule, engine, "corpus", 2.5))
    return made


def read_checkpoint(folder: Path) -> None:
    manifest = checkpoint.read_manifest(folder)
    check_files(folder, manifest)
    full = FullWeights(folder)
    for name in full.placements:
        full.read(name)
    load(Saved(folder, manifest), _engine())


def read_manifest(folder: Path) -> None:
    step = folder / "step_00000003"
    if not step.exists():
        step.symlink_to(folder, target_is_directory=True)
    best_steps(folder, 3)
    assert saved_steps(folder) == [3]
    checkpoint.read_manifest(folder)


def sign(document: Any) -> Any:
    """A manifest with its checksum put right."""
    if isinstance(document, dict):
        document.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        return document | {"sha256": digest}
    return document


def mutate_manifest(data: bytes, random: Random) -> bytes:
    try:
        return mutate_json(data, random, sign)
    except TypeError:  # keys that cannot be sorted
        return mutate_json(data, random)


def resum(files: Files) -> Files:
    """The manifest of a checkpoint with the size and the checksums of its shard put right."""
    try:
        manifest = json.loads(files[MANIFEST])
        data = files[SHARD]
        length = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:length])
        pieces = [data[:length]]
        spans = sorted(e["data_offsets"] for key, e in header.items() if key != "__metadata__")
        for start, stop in spans:
            start = max(start, 0)
            stop = min(stop, len(data))
            pieces += [
                data[length + at : length + min(at + CHUNK, stop)]
                for at in range(start, stop, CHUNK)
            ]
        manifest["shards"][0] |= {
            "num_bytes": len(data),
            "checksums": "".join(f"{zlib.crc32(piece):08x}" for piece in pieces),
        }
        return files | {MANIFEST: json.dumps(sign(manifest)).encode()}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ):
        return files  # what cannot be put right stays wrong


def read_tensors(folder: Path) -> None:
    file = TensorFile(folder / SHARD)
    file.check()
    for name, info in file.tensors.items():
        count = info.num_bytes // info.dtype.itemsize
        file.read(name, np.array([[0, 0, count]]), torch.empty(count, dtype=info.dtype))


def make_notes(folder: Path) -> list[Path]:
    shard = checkpoint.read_manifest(make_checkpoints(folder)[0]).shards[0]
    (folder / "aside").mkdir()
    handover.leave(folder / "aside", (shard, (2, 3)))
    return [folder / "aside"]


TARGETS = (
    Target("manifest", make_checkpoints, read_manifest, {MANIFEST: mutate_manifest}),
    Target("tensor file", make_checkpoints, read_tensors, {SHARD: mutate_tensors}, share=0.5),
    Target(
        "checkpoint",
        make_checkpoints,
        read_checkpoint,
        {SHARD: mutate_tensors, MANIFEST: mutate_manifest},
        resum,
        share=0.1,
    ),
    Target(
        "note",
        make_notes,
        lambda folder: handover._read(folder / f"{SHARD}.json", TINY),
        {".json": mutate_json},
    ),
)
