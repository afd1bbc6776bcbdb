"""The section [data]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybridpar.config.typed import NotNegative, Share


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = ("stdlib",)
    """Training data: files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them,
    Hugging Face datasets, prefixes of .bin/.idx pairs, or 'stdlib' (the Python library's own
    source)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each entry of `corpus`. Empty: sample all documents alike."""
    format: Literal["text", "chat"] = "text"
    """Kind of the records. text: documents, of which every token is learned. chat: conversations in
    JSON lines, JSON, parquet or Arrow, with "messages" or with "prompt" and "answer", one to a
    sample unless `packing` says otherwise; the loss counts the answers alone."""
    chat_template: str = ""
    """chat: path of a chat template (jinja). Empty: the tokenizer's own."""
    tokenizer: str = ""
    """Path of a tokenizer.json; files beside it are read too. Empty: train a byte-level BPE with
    model.vocab_size entries on the corpus."""
    text_key: str = "text"
    """Field or column that contains a document's text, for JSON, CSV, parquet and Arrow."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Policy for a record that cannot be read (broken JSON, no text under text_key, bytes
    that are not UTF-8). error: stop and name it. skip: leave it out, and report the number and
    the first ones."""
    split: Share = 0.02
    """Share of the documents held out for validation if neither valid_corpus nor valid_sets is
    set."""
    packing: Literal["none", "stream", "best_fit"] = "none"
    """GPT only: how documents share a row of seq_length tokens. none: rows are cut from all text,
    and tokens attend to what precedes them in the row, of whatever document. stream: the same rows,
    but tokens attend within their document, whose positions start at 0. best_fit: as stream, but
    documents are not cut unless they are longer than a row; the rest of a row is padding.
    Conversations (format = "chat") are documents of best_fit; with none, each has its own row."""
    document_length: NotNegative = 0.0
    """Packing: length of the documents that plan, simulate and check assume: the sum of squared
    lengths over the sum of lengths, as attention's work goes by squares. 0: computed from .bin/.idx
    files; of other corpora, a document fills a row, the most that it can cost."""
    valid_corpus: tuple[str, ...] = ()
    """Files of one validation set, tokenized like `corpus`. Empty: `split` holds documents out."""
    valid_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Several validation sets instead of valid_corpus: a table from names to files. Each set has
    its own loss."""
    cache: str = ""
    """Folder for prepared corpora. Empty: data/ in run.dir."""

    @property
    def is_packed(self) -> bool:
        """Whether micro-batches say where documents begin."""
        return self.packing != "none"

    @property
    def valid_sources(self) -> dict[str, tuple[str, ...]]:
        """Sources of each validation set by its name; valid_corpus has the name "". Empty: what
        `split` holds out."""
        return {"": self.valid_corpus} if self.valid_corpus else dict(self.valid_sets)
