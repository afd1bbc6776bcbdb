"""The section [data]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybridpar.config.typed import Share


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = ("stdlib",)
    """Files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them, Hugging Face
    datasets, prefixes of .bin/.idx pairs, or 'stdlib' (the Python library's own source)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each corpus; empty: all in one."""
    tokenizer: str = ""
    """A tokenizer.json, with the files beside it; empty: a byte-level BPE of model.vocab_size
    entries is trained on the corpus."""
    text_key: str = "text"
    """The field or column that holds a document's text, in files that have those."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Policy for a record that cannot be read (broken JSON, no text or null under text_key, bytes
    that are not UTF-8): an error that names it, or skip: leave it out, and name and count those
    that were."""
    split: Share = 0.02
    """Share of the documents held out for validation, where there is neither valid_corpus nor
    valid_sets."""
    valid_corpus: tuple[str, ...] = ()
    """Sources of validation, together; the tokenizer is that of `corpus`. Empty: what `split` holds
    out."""
    valid_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Several validation sets, instead of valid_corpus: a table of names, each with its sources.
    Each set has its own loss."""
    cache: str = ""
    """Folder of prepared corpora; empty: data/ in run.dir."""

    @property
    def valid_sources(self) -> dict[str, tuple[str, ...]]:
        """Sources of each validation set by its name, "" for that of valid_corpus. Empty: what
        `split` holds out."""
        return {"": self.valid_corpus} if self.valid_corpus else dict(self.valid_sets)
