"""The readers of corpora and tokenizers."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.data import (
    BertDataset,
    CorpusOptions,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    Tokenizer,
    open_prepared,
    prepare,
    train_tokenizer,
)
from hybridpar.data.corpus import corpus_files, read_parts
from hybridpar.data.files.bad_records import BadRecords
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
                for size in (length // 2, length - length // 2):
                    writer.add(np.arange(size) % 60)
                    writer.end_sequence()
                writer.end_document()
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
    made = [
        prepare(text, folder / kind, 300, options=CorpusOptions(kind), quiet=True).prefix.parent
        for kind in ("gpt", "bert")
    ]  # type: ignore[arg-type]
    return made


def read_prepared(folder: Path) -> None:
    open_prepared(folder / "corpus").tokenizer()


BESIDE: dict[str, Any] = {
    "tokenizer_config.json": {
        "eos_token": "two",
        "add_prefix_space": False,
        "do_lower_case": False,
        "pad_token": {"content": "<pad>"},
    },
    "special_tokens_map.json": {"bos_token": "<s>"},
    "generation_config.json": {"eos_token_id": [1, 2]},
    "config.json": {"pad_token_id": 3},
}
"""Files that may be beside a tokenizer.json."""


def make_tokenizers(folder: Path) -> list[Path]:
    made = []
    for kind in ("gpt", "bert"):
        made.append(folder / kind)
        made[-1].mkdir()
        tokenizer = train_tokenizer([TEXT], 300, kind)  # type: ignore[arg-type]
        tokenizer.save(made[-1] / "tokenizer.json")
        for name, plain in {**BESIDE, "added_tokens.json": {"two": tokenizer.vocab_size}}.items():
            (made[-1] / name).write_text(json.dumps(plain))
    return made


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    assert tokenizer.vocab_size > 0
    tokenizer.decode(tokenizer.encode("two words <|endoftext|>"))
    assert tokenizer.files()
    with contextlib.suppress(DataError):
        assert tokenizer.end in tokenizer.ends
    with contextlib.suppress(DataError):  # a GPT's has no such tokens
        tokenizer.bert()


def make_formats(folder: Path) -> list[Path]:
    """In a process of its own: Arrow's threads do not live on in the ones that are forked for the
    inputs."""
    process = multiprocessing.get_context("fork").Process(target=_write_formats, args=(folder,))
    process.start()
    process.join()
    return sorted(folder.iterdir())


def _write_formats(folder: Path) -> None:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    records = [{"id": i, "text": line} for i, line in enumerate(TEXT.splitlines())]
    csv = "id,text\n" + "".join(f'{r["id"]},"{r["text"]}"\n' for r in records)
    table = pyarrow.table({"text": [r["text"] for r in records]})
    parquet, arrow, stream, zstd = (pyarrow.BufferOutputStream() for _ in range(4))
    pyarrow.parquet.write_table(table, parquet, row_group_size=9)
    for sink, make in ((arrow, pyarrow.ipc.new_file), (stream, pyarrow.ipc.new_stream)):
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    with pyarrow.CompressedOutputStream(zstd, "zstd") as compressed:
        compressed.write(csv.encode())
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    columns = {"p__parquet": parquet, "f__arrow": arrow, "s__arrow": stream, "c__zst": zstd}
    for name, sink in columns.items():
        folder_with(folder / name, **{name: sink.getvalue().to_pybytes()})
    folder_with(
        folder / "texts", a__json=json.dumps(records), b__csv=csv, c__gz=gzip.compress(csv.encode())
    )
    selected = state | {"_indices_data_files": [{"filename": "indices.arrow"}]}
    for name, content in (("saved", state), ("selected", selected)):
        saved = folder_with(folder / name, state__json=json.dumps(content))
        (saved / "data-0.arrow").write_bytes(stream.getvalue().to_pybytes())
    indices = pyarrow.BufferOutputStream()
    rows = pyarrow.table({"indices": pyarrow.array([3, 1], pyarrow.uint64())})
    with pyarrow.ipc.new_stream(indices, rows.schema) as writer:
        writer.write_table(rows)
    (folder / "selected" / "indices.arrow").write_bytes(indices.getvalue().to_pybytes())


def read_formats(folder: Path) -> None:
    sources = [folder] if (folder / "state.json").is_file() else sorted(folder.iterdir())
    with contextlib.suppress(DataError):
        for _ in read_parts(corpus_files(sources), bad=BadRecords(skips=True)):
            pass
    for _ in read_parts(corpus_files(sources)):
        pass


TARGETS = (
    Target("index", make_indexed, read_indexed, {".idx": mutate_index, ".bin": mutate_bytes}),
    Target(
        "prepared corpus",
        make_prepared,
        read_prepared,
        {"manifest.json": mutate_json, ".idx": mutate_index, "tokenizer.json": mutate_json},
    ),
    Target("tokenizer", make_tokenizers, read_tokenizer, {".json": mutate_json}),
    Target(
        "corpus",
        lambda folder: [folder_with(folder / "c", a__txt=TEXT, b__jsonl=DOCUMENTS)],
        read_formats,
        {".txt": mutate_bytes, ".jsonl": mutate_lines},
    ),
    Target(
        "formats",
        make_formats,
        read_formats,
        {
            ".json": mutate_json,
            ".csv": mutate_bytes,
            ".gz": mutate_bytes,
            ".zst": mutate_bytes,
            ".parquet": mutate_bytes,
            ".arrow": mutate_bytes,
        },
    ),
)
