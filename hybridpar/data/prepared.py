"""Token files made of text: corpus -> tokenizer -> .bin/.idx, once; later calls with the same
inputs find the result.

A prepared corpus is a folder `<kind>-<key>` with corpus.bin, corpus.idx, tokenizer.json and
manifest.json, and bad_records.txt if records were left out. It is built aside and renamed into
place as a whole: complete or absent, however many processes prepare it at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridpar.data.chat import CHAT, write_conversations
from hybridpar.data.chat_template import ChatTemplate, marked_text
from hybridpar.data.corpus import (
    TEXT_KEY,
    SourceFile,
    corpus_files,
    corpus_key,
    num_bytes,
    read_parts,
    source_files,
)
from hybridpar.data.files.bad_records import BadRecords
from hybridpar.data.files.indexed import IndexedDataset, IndexedWriter, token_dtype
from hybridpar.data.files.pieces import Ends, Part, pieces, sentences
from hybridpar.data.files.record_place import TextFrom
from hybridpar.data.tokenizer import (
    END,
    Kind,
    Tokenizer,
    check_vocab_fits,
    check_vocab_size,
    train_tokenizer,
)
from hybridpar.errors import DataError, config_error
from hybridpar.reading import errors_as, read_json
from hybridpar.scratch import remove_left_folders, scratch_folder

if TYPE_CHECKING:  # imported where it is used: operators and benchmarks run without it
    from rich.progress import Progress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OnBadRecord = Literal["error", "skip"]
BAD_RECORDS = "bad_records.txt"
"""Name of the file with a line for each bad record that was left out."""
_SCRATCH = ".preparing"
"""Prefix of the folders in which corpora are built; the next call removes folders that killed
processes have left."""
_FORMAT = 2
_MAX_MANIFEST = 1 << 20
_FIELDS = {
    "format": int,
    "kind": str,
    "vocab_size": int,
    "num_documents": int,
    "num_tokens": int,
    "fingerprint": str,
}
_AGAIN = "delete the folder and prepare the corpus again"
_TRAINING_BYTES = 16 << 20  # text that a tokenizer is trained on; more changes its merges little


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus on disk."""

    prefix: Path
    kind: str
    """'gpt', 'bert' or 'chat'; empty, without a tokenizer, for .bin/.idx files from elsewhere."""
    tokenizer_path: Path | None
    vocab_size: int
    """All ids are below this."""
    num_documents: int
    num_tokens: int
    fingerprint: str
    num_bad: int = 0
    """Number of records that could not be read and were left out."""
    first_bad: tuple[str, ...] = ()
    """Messages about the first of them."""

    def notes(self) -> list[str]:
        """Return lines for the user about records that were left out."""
        if not self.num_bad:
            return []
        names = self.prefix.with_name(BAD_RECORDS)
        return [
            f"{self.prefix}: {self.num_bad} bad records were left out ({names})",
            *self.first_bad,
            *["..."] * (self.num_bad > len(self.first_bad)),
        ]

    def open(self) -> IndexedDataset:
        """Open the token file. Raises: DataError if the files are damaged."""
        return IndexedDataset(self.prefix)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises: DataError if it is missing or damaged."""
        if self.tokenizer_path is None:
            raise DataError(
                f"{self.prefix}: these .bin/.idx files do not say which tokenizer they were "
                f"made with; set data.tokenizer"
            )
        return Tokenizer.load(self.tokenizer_path)


@dataclass(frozen=True)
class CorpusOptions:
    """How the text of a corpus is read, and for which models it is prepared.

    Attributes:
        kind: Model family that the corpus is for.
        text_key: Field or column with the text, for formats that have any.
        max_bytes: Use only so much text. None: all.
        on_bad_record: What to do with a record that cannot be read (bad_records.py).
        chat: Template that makes texts of records, which are conversations. None: they are texts.
    """

    kind: Kind = "gpt"
    text_key: str = TEXT_KEY
    max_bytes: int | None = None
    on_bad_record: OnBadRecord = "error"
    chat: ChatTemplate | None = None

    @property
    def skips(self) -> bool:
        """Whether bad records are left out."""
        return self.on_bad_record == "skip"

    @property
    def prepares(self) -> str:
        """Kind of data that the result prepares: `kind`, or "chat" for conversations."""
        return CHAT if self.chat else self.kind

    @property
    def text_from(self) -> TextFrom | None:
        """The function that makes texts of records of JSON; None: they are under text_key."""
        return partial(marked_text, template=self.chat) if self.chat else None


def prepare(
    sources: str | Path | Sequence[str | Path],
    folder: str | Path,
    vocab_size: int,
    *,
    tokenizer: str | Path | None = None,
    options: CorpusOptions = CorpusOptions(),
    quiet: bool = False,
) -> Prepared:
    """Tokenize a corpus into `folder`, or find it there; train a tokenizer of `vocab_size` entries
    if none is given.

    GPT: a document is one sequence, with the tokens that the tokenizer puts before and after a
    text, and an end-of-text token at its end. BERT: sequences are sentences. Conversations: a
    document is a conversation, whose sequences are by turns text without and with answers
    (chat.py). Texts are encoded piece by piece, so long ones take no more memory.

    Args:
        sources: Files, folders or data sets (corpus.py).
        folder: Folder of prepared corpora.
        vocab_size: Entries of the vocabulary, and most that a given tokenizer may have.
        tokenizer: A tokenizer.json; None: train one.
        options: How the text is read.
        quiet: Show no progress on stderr.

    Raises:
        DataError: Sources are unreadable, files in `folder` are damaged, or it cannot be written.
        ConfigError: The vocabulary is too small, or there is no tokenizer for conversations.
    """
    named = [sources] if isinstance(sources, (str, Path)) else sources
    files = corpus_files(named, options.text_key)
    kind = options.kind
    loaded = Tokenizer.load(tokenizer) if tokenizer else None
    if options.chat and loaded is None:
        raise config_error(
            "data.tokenizer",
            "",
            "must be set for conversations: it has the chat template's special tokens",
            "the tokenizer.json of the model",
        )
    if loaded is None:
        check_vocab_size(vocab_size, kind)
    else:
        check_vocab_fits(loaded.vocab_size, vocab_size, f"the tokenizer {tokenizer}")
        _ = loaded.bert() if kind == "bert" else loaded.special(END)  # fail now rather than halfway
    name = loaded.fingerprint if loaded else f"trained {vocab_size}"
    policy = [options.on_bad_record] * options.skips
    chat = [options.chat.fingerprint] if options.chat else []
    inputs = [_FORMAT, options.prepares, name, options.max_bytes, corpus_key(files), *policy, *chat]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    target = Path(folder) / f"{options.prepares}-{key}"
    with _lock(Path(folder), target.name):
        if not target.exists():
            with _progress(quiet) as progress:
                _build(files, target, _Job(options, loaded, vocab_size, progress))
    return open_prepared(target / "corpus")


def prepare_tokenizer(
    sources: Sequence[str | Path],
    folder: str | Path,
    vocab_size: int,
    *,
    options: CorpusOptions = CorpusOptions(),
    quiet: bool = False,
) -> Path:
    """Train one tokenizer for several corpora, with equal shares of each, or find it; return its
    tokenizer.json. For arguments and errors see `prepare`."""
    kind = options.kind
    check_vocab_size(vocab_size, kind)
    groups = [source_files(source, options.text_key) for source in sources]
    keys = [corpus_key(files) for files in groups]
    policy = [options.on_bad_record] * options.skips
    inputs = json.dumps([_FORMAT, kind, vocab_size, keys, *policy])
    key = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    target = Path(folder) / f"tokenizer-{kind}-{key}.json"
    with _lock(Path(folder), target.stem):
        if not target.exists():
            share = _TRAINING_BYTES // len(groups)
            parts = (
                part
                for files in groups
                for part in read_parts(files, share, BadRecords(skips=options.skips))
            )
            with _progress(quiet) as progress:
                trained = _train(parts, vocab_size, kind, (progress, share * len(groups)))
            with scratch_folder(_SCRATCH, target.parent) as scratch:
                trained.save(scratch / target.name)
                os.replace(scratch / target.name, target)
    return target


def open_prepared(prefix: str | Path) -> Prepared:
    """Open a corpus that `prepare` made, or any .bin/.idx pair (all ids of the latter are read
    once, to find the largest).

    Raises:
        DataError: A file is missing or damaged.
    """
    prefix = Path(prefix)
    manifest = prefix.with_name("manifest.json")
    if prefix.name != "corpus" or not manifest.is_file():
        return _opened(prefix, "", None)
    stated = _read_manifest(manifest)
    found = _opened(prefix, stated["kind"], stated["vocab_size"])
    for field in ("num_documents", "num_tokens", "fingerprint"):
        if stated[field] != getattr(found, field):
            raise DataError(
                f"{manifest}: {field} is {stated[field]!r}, but {prefix}.bin and .idx have "
                f"{getattr(found, field)!r}; {_AGAIN}"
            )
    return replace(found, num_bad=stated["num_bad"], first_bad=tuple(stated["first_bad"]))


def _opened(prefix: Path, kind: str, vocab_size: int | None) -> Prepared:
    """Return a pair of `kind` with the tokenizer beside it; without a kind, a pair from
    elsewhere. `vocab_size` None: from its ids."""
    indexed = IndexedDataset(prefix)
    size = indexed.largest_token() + 1 if vocab_size is None else vocab_size
    return Prepared(
        prefix,
        kind,
        prefix.with_name("tokenizer.json") if kind else None,
        size,
        indexed.num_documents,
        indexed.num_tokens,
        indexed.fingerprint,
    )


def check_vocab(prepared: Prepared, vocab_size: int) -> None:
    """Raise a ConfigError if the corpus has ids that do not fit into `vocab_size`."""
    check_vocab_fits(prepared.vocab_size, vocab_size, f"the corpus {prepared.prefix}")


@dataclass(frozen=True)
class _Job:
    """A corpus to build. `tokenizer` None: one of `vocab_size` entries is trained."""

    options: CorpusOptions
    tokenizer: Tokenizer | None
    vocab_size: int
    progress: Progress


def _build(files: Sequence[SourceFile], target: Path, job: _Job) -> None:
    options = job.options
    total = min(num_bytes(files), options.max_bytes or num_bytes(files))
    with scratch_folder(_SCRATCH, target.parent) as scratch:
        aside = scratch / target.name
        aside.mkdir()
        tokenizer = job.tokenizer
        if tokenizer is None:
            limit = min(_TRAINING_BYTES, options.max_bytes or _TRAINING_BYTES)
            parts = read_parts(files, limit, BadRecords(skips=options.skips))
            tokenizer = _train(
                parts, job.vocab_size, options.kind, (job.progress, min(limit, total))
            )
        if options.chat:
            tokenizer = tokenizer.with_chat_template(options.chat.text)
        tokenizer.save(aside / "tokenizer.json")
        with (
            IndexedWriter(aside / "corpus", token_dtype(tokenizer.vocab_size)) as writer,
            (aside / BAD_RECORDS).open("w", encoding="utf-8") as journal,
        ):
            bad = BadRecords(skips=options.skips, journal=journal)
            parts = _tracked(
                read_parts(files, options.max_bytes, bad, options.text_from),
                job.progress,
                "encoding",
                total,
            )
            _encode(parts, tokenizer, writer, options.prepares)
        if not bad.count:
            (aside / BAD_RECORDS).unlink()
        made = _opened(aside / "corpus", options.prepares, tokenizer.vocab_size)
        manifest = {
            "format": _FORMAT,
            **{field: getattr(made, field) for field in _FIELDS if field != "format"},
            "num_bad": bad.count,
            "first_bad": bad.first,
        }
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process has made the same result first
                raise


def _train(
    parts: Iterable[Part], vocab_size: int, kind: Kind, shown: tuple[Progress, int]
) -> Tokenizer:
    """Train a tokenizer. `shown`: where progress is shown, and the number of characters in all."""
    tracked = _tracked(parts, shown[0], "training tokenizer", shown[1])
    return train_tokenizer((piece.text for piece in pieces(tracked)), vocab_size, kind)


def _encode(parts: Iterable[Part], tokenizer: Tokenizer, writer: IndexedWriter, kind: str) -> None:
    if kind == CHAT:
        write_conversations(parts, tokenizer, writer)
        return
    if kind == "bert":
        for ids, ends in tokenizer.encode_parts(sentences(parts)):
            writer.add(ids)
            if ends:
                writer.end_sequence(keep_empty=False)
            if ends is Ends.DOCUMENT:
                writer.end_document(keep_empty=False)
        return
    begin, finish = tokenizer.document_frame
    starts = True
    for ids, ends in tokenizer.encode_parts(parts):
        if starts:
            writer.add(begin)
        writer.add(ids)
        if ends:
            writer.add(finish)
            writer.end_sequence()
            writer.end_document()
        starts = bool(ends)


def _read_manifest(path: Path) -> dict[str, Any]:
    with errors_as(DataError, path, "is not a manifest", failure="is not a manifest"):
        stated = read_json(path, _MAX_MANIFEST)
    for field, kind in _FIELDS.items():
        if not isinstance(stated, dict) or not isinstance(stated.get(field), kind):
            raise DataError(f"{path}: has no {field} of type {kind.__name__}; {_AGAIN}")
    # older manifests have neither
    number = stated.setdefault("num_bad", 0)
    first = stated.setdefault("first_bad", [])
    if not (
        isinstance(number, int)
        and isinstance(first, list)
        and all(isinstance(line, str) for line in first)
    ):
        raise DataError(
            f"{path}: its num_bad must be a number and its first_bad a list of lines; {_AGAIN}"
        )
    return stated  # type: ignore[no-any-return]


def _progress(quiet: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _tracked(parts: Iterable[Part], progress: Progress, what: str, total: int) -> Iterator[Part]:
    task = progress.add_task(what, total=total)
    for part in parts:
        yield part
        progress.advance(task, len(part.text))
    progress.update(task, completed=total)


@contextlib.contextmanager
def _lock(folder: Path, name: str) -> Iterator[None]:
    """Let the first process work while others wait; if files cannot be locked, each does the work.

    Raises:
        DataError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{name}.lock").open("w") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
            remove_left_folders(_SCRATCH, folder)
            yield
    except OSError as error:
        if error.filename and not Path(error.filename).resolve().is_relative_to(folder.resolve()):
            raise  # the error is about something else
        raise DataError(
            f"{folder}: cannot be written ({error.strerror or error}); name another folder"
        ) from None
