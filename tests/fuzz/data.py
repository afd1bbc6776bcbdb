"""The readers of corpora and tokenizers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

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
from hybridpar.data.tokenizer import BertVocabulary
from hybridpar.errors import DataError

from .mutate import mutate_bytes, mutate_index, mutate_json, mutate_lines
from .samples import DOCUMENTS, TEXT
from .target import Target, folder_with


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


TARGETS = (
    Target("index", make_indexed, read_indexed, {".idx": mutate_index, ".bin": mutate_bytes}),
    Target("prepared corpus", make_prepared, read_prepared, {
        "manifest.json": mutate_json, ".idx": mutate_index, "tokenizer.json": mutate_json}),
    Target("tokenizer", make_tokenizers, read_tokenizer, {".json": mutate_json}),
    Target("corpus", lambda folder: [folder_with(folder / "c", a__txt=TEXT, b__jsonl=DOCUMENTS)], read_corpus, {
        ".txt": mutate_bytes, ".jsonl": mutate_lines}),
)
