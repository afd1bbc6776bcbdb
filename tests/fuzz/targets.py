"""The readers of files that can come from elsewhere, each with small valid files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from hybridpar import checkpoint
from hybridpar.checkpoint import notes
from hybridpar.checkpoint.folders import best_steps, saved_steps
from hybridpar.checkpoint.huggingface.export import export_folder
from hybridpar.checkpoint.huggingface.load import import_folder
from hybridpar.checkpoint.load import FullWeights, check_files, load
from hybridpar.checkpoint.manifest import MANIFEST
from hybridpar.checkpoint.saved import Saved
from hybridpar.checkpoint.tensorfile import CHUNK, TensorFile
from hybridpar.config import Config, from_mapping, load_toml, to_toml
from hybridpar.data import (
    BertDataset,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    Tokenizer,
    open_prepared,
    prepare,
    train_tokenizer,
)
from hybridpar.data.corpus import SourceFile, documents
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.data.tokenizer import BertVocabulary
from hybridpar.errors import DataError
from hybridpar.grid import ProcessGrid
from hybridpar.planner.cluster import read_cluster
from hybridpar.planner.placement import make_workload, read_document, read_split
from hybridpar.planner.placement.piper import is_instance, make_instance
from hybridpar.planner.profile import read_profile, write_profile
from hybridpar.train import trace
from hybridpar.train.bundle import Bundle, read_bundle
from hybridpar.train.costs import read_costs, run_costs, write_costs
from hybridpar.train.engine import Engine
from hybridpar.train.folder import find_run, settled_early_switch
from hybridpar.train.metrics import read_metrics
from hybridpar.validate import problems

from .mutate import mutate_bytes, mutate_index, mutate_json, mutate_lines, mutate_tensors, mutate_toml
from .samples import CLUSTER, DOCUMENTS, INSTANCE, METRICS, PROFILE, RUN, SPLIT, TEXT, TINY, WORKLOAD

Files = dict[str, bytes]
Mutator = Callable[[bytes, Random], bytes]
SHARD = "pp0-tp0.safetensors"


@dataclass(frozen=True)
class Target:
    """A reader. `make`: writes valid files into a folder, several sets of them. `read`: of the files in a folder.

    `mutators`: by the end of a file's name; files without one stay as they are. `repair`: puts checksums right, as
    somebody who forges files would.
    """

    name: str
    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    mutators: Mapping[str, Mutator]
    repair: Callable[[Files], Files] = lambda files: files
    share: float = 1.0
    """Of the inputs that others get: slow readers get fewer."""

    def mutator_of(self, name: str) -> Mutator | None:
        return next((mutator for end, mutator in self.mutators.items() if name.endswith(end)), None)

    def seeds(self) -> list[Files]:
        """Sets of valid files, by name."""
        return _seeds(self.name)


@functools.cache
def _seeds(name: str) -> list[Files]:
    with tempfile.TemporaryDirectory() as folder:
        made = BY_NAME[name].make(Path(folder))
        return [{path.name: path.read_bytes() for path in one.iterdir() if path.is_file()} for one in made]


def folder_with(folder: Path, **files: str | bytes) -> Path:
    """A new folder with files, whose names have _ for a dot."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


# -- checkpoints -------------------------------------------------------------------------------------------------------


@functools.cache
def _engine(schedule: str = "2bw") -> Engine:
    config = from_mapping({"pipeline": {"schedule": schedule}, "anomalies": {"loss_spike": 9.0},
                           "optim": {"name": "sgd"}, "model": {"bias": False}}, TINY)
    return Engine(config, ProcessGrid(), torch.device("cpu"))


def make_checkpoints(folder: Path) -> list[Path]:
    made = []
    for schedule in ("2bw", "1f1b"):
        engine = Engine(_engine(schedule).config, ProcessGrid(), torch.device("cpu"))
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
            start, stop = max(start, 0), min(stop, len(data))
            pieces += [data[length + at:length + min(at + CHUNK, stop)] for at in range(start, stop, CHUNK)]
        manifest["shards"][0] |= {
            "num_bytes": len(data), "checksums": "".join(f"{zlib.crc32(piece):08x}" for piece in pieces)}
        return files | {MANIFEST: json.dumps(sign(manifest)).encode()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
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
    notes.leave(folder / "aside", (shard, (2, 3)))
    return [folder / "aside"]


# -- data --------------------------------------------------------------------------------------------------------------


def make_indexed(folder: Path) -> list[Path]:
    made = []
    for kind in ("<u2", "<i4", "|u1"):
        made.append(folder / kind[1:])
        made[-1].mkdir()
        with IndexedWriter(made[-1] / "corpus", kind) as writer:
            for length in (5, 30, 0, 9, 17):
                writer.add_document(np.arange(length) % 60, [length // 2, length - length // 2])
    return made


def read_indexed(folder: Path) -> None:
    indexed = IndexedDataset(folder / "corpus")
    assert len(indexed.fingerprint) == 32
    indexed.largest_token()
    for i in range(min(len(indexed), 20)):
        indexed[i].sum()
    GPTDataset(indexed, 8).batch(np.arange(2), np.zeros(2, np.int64))
    vocabulary = BertVocabulary(64, 60, 61, 62, 63, (60, 61, 62, 63))
    BertDataset(indexed, 12, vocabulary, seed=1).batch(np.arange(1), np.zeros(1, np.int64))


def make_prepared(folder: Path) -> list[Path]:
    text = folder_with(folder / "text", a__txt=TEXT) / "a.txt"
    made = [prepare(text, folder / kind, 300, kind=kind, quiet=True).prefix.parent for kind in ("gpt", "bert")]  # type: ignore[arg-type]
    return made


def read_prepared(folder: Path) -> None:
    open_prepared(folder / "corpus").tokenizer()


def make_tokenizers(folder: Path) -> list[Path]:
    made = []
    for kind in ("gpt", "bert"):
        made.append(folder / kind)
        made[-1].mkdir()
        train_tokenizer([TEXT], 300, kind).save(made[-1] / "tokenizer.json")  # type: ignore[arg-type]
    return made


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    assert tokenizer.vocab_size > 0
    tokenizer.decode(tokenizer.encode("two words <|endoftext|>"))
    with contextlib.suppress(DataError):  # a GPT's has no such tokens
        tokenizer.bert()


def read_corpus(folder: Path) -> None:
    files = sorted(folder.iterdir())
    for _ in documents([SourceFile(path, path.name, named=True) for path in files]):
        pass


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def make_theirs(folder: Path) -> list[Path]:
    made = []
    llama = {"position": "rotary", "norm": "rms_norm", "activation": "swiglu", "bias": False, "tie_embeddings": False}
    for name, changes, bytes_a_file in (("gpt2", {}, 10**9), ("llama", llama, 4000)):
        model = replace(TINY.model, **changes)  # type: ignore[arg-type]
        engine = Engine(replace(TINY, model=model), ProcessGrid(), torch.device("cpu"))
        saved = checkpoint.save(folder / "ours" / name, engine, "")
        export_folder(saved, folder / name, max_file_bytes=bytes_a_file)
        made.append(folder / name)
    return made


def read_theirs(folder: Path) -> None:
    output = folder / "imported"
    try:
        import_folder(folder, output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


# -- configurations and plans ------------------------------------------------------------------------------------------


def make_configs(folder: Path) -> list[Path]:
    root = Path(__file__).parent.parent.parent / "scripts" / "configs"
    texts = [(root / name).read_text() for name in ("gpt_tiny.toml", "bert_large.toml")] + [to_toml(TINY)]
    return [folder_with(folder / str(i), config__toml=text) for i, text in enumerate(texts)]


def read_config(folder: Path) -> None:
    config = load_toml(folder / "config.toml")
    problems(config, 8)
    to_toml(config)


def read_run(folder: Path) -> None:
    """What a run looks at when it goes on."""
    read_metrics(folder / "metrics.jsonl")
    here = replace(TINY, run=replace(TINY.run, dir=str(folder.parent), name=folder.name))
    settled_early_switch(replace(here, pipeline=replace(here.pipeline, early_switch="auto")))
    find_run(here)


def make_runs(folder: Path) -> list[Path]:
    return [folder_with(folder / "run", config__toml=RUN, metrics__jsonl=METRICS)]


def make_bundles(folder: Path) -> list[Path]:
    bundle = Bundle(_grid(), 7, {"lm": 2.5}, float("nan"), "corpus", 4, 5, (6,), "non_finite", "the loss is nan",
                    "skip", 1e-3, 1.0, "0123", ((5, 5), (5, 5)), (1.5, float("inf")))
    return [bundle.write(folder).parent]


def _grid() -> Config:
    return replace(TINY, parallel=replace(TINY.parallel, pp=2, dp=2))


def make_costs(folder: Path) -> list[Path]:
    engine = Engine(TINY, ProcessGrid(), torch.device("cpu"))
    recorder = trace.Recorder(engine.executor, 0, 8)
    engine.train(SyntheticLoader(TINY.model, 1, 2), 8, lambda result: recorder.after_step(result.step))
    recorder.close()
    costs = run_costs(TINY, trace.gather(recorder, engine.grid))
    assert costs is not None
    write_costs(costs, folder_with(folder / "costs") / "costs.json")
    return [folder / "costs"]


def make_profiles(folder: Path) -> list[Path]:
    (folder / "p").mkdir()
    write_profile(PROFILE, folder / "p" / "profile.json")
    return [folder / "p"]


def make_graphs(folder: Path) -> list[Path]:
    return [folder_with(folder / "w", graph__json=json.dumps(WORKLOAD), split__json=json.dumps(SPLIT)),
            folder_with(folder / "i", graph__json=json.dumps(INSTANCE), split__json="{}")]


def read_graph(folder: Path) -> None:
    document = read_document(folder / "graph.json")
    if is_instance(document):
        make_instance(document)
        return
    workload = make_workload(document)
    if workload.blocks is not None:
        workload.in_blocks()
    read_split(workload, folder / "split.json")


def make_clusters(folder: Path) -> list[Path]:
    return [folder_with(folder / str(i), cluster__toml=text) for i, text in enumerate(CLUSTER)]


TARGETS = (
    Target("manifest", make_checkpoints, read_manifest, {MANIFEST: mutate_manifest}),
    Target("tensor file", make_checkpoints, read_tensors, {SHARD: mutate_tensors}, share=0.5),
    Target("checkpoint", make_checkpoints, read_checkpoint, {SHARD: mutate_tensors, MANIFEST: mutate_manifest}, resum,
           share=0.1),
    Target("note", make_notes, lambda folder: notes._read(folder / f"{SHARD}.json", TINY), {".json": mutate_json}),
    Target("index", make_indexed, read_indexed, {".idx": mutate_index, ".bin": mutate_bytes}),
    Target("prepared corpus", make_prepared, read_prepared, {
        "manifest.json": mutate_json, ".idx": mutate_index, "tokenizer.json": mutate_json}),
    Target("tokenizer", make_tokenizers, read_tokenizer, {".json": mutate_json}),
    Target("corpus", lambda folder: [folder_with(folder / "c", a__txt=TEXT, b__jsonl=DOCUMENTS)], read_corpus, {
        ".txt": mutate_bytes, ".jsonl": mutate_lines}),
    Target("hugging face", make_theirs, read_theirs, {
        ".safetensors": mutate_tensors, "config.json": mutate_json, "index.json": mutate_json}, share=0.1),
    Target("configuration", make_configs, read_config, {".toml": mutate_toml}, share=0.5),
    Target("run folder", make_runs, read_run, {".toml": mutate_toml, ".jsonl": mutate_lines},
           share=0.3),
    Target("replay bundle", make_bundles, lambda folder: read_bundle(folder / "step_00000007.json"), {
        ".json": mutate_json}),
    Target("costs", make_costs, lambda folder: read_costs(folder / "costs.json"), {".json": mutate_json}),
    Target("profile", make_profiles, lambda folder: read_profile(folder / "profile.json"), {".json": mutate_json}),
    Target("graph", make_graphs, read_graph, {"graph.json": mutate_json, "split.json": mutate_json}),
    Target("cluster", make_clusters, lambda folder: read_cluster(folder / "cluster.toml"), {".toml": mutate_toml}),
)
BY_NAME = {target.name: target for target in TARGETS}
