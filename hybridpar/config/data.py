"""The section [data]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridpar.config.typed import Share
from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections import Config


@dataclass(frozen=True)
class DataConfig:
    corpus: tuple[str, ...] = ("stdlib",)
    """Files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them, Hugging Face datasets, prefixes of
    .bin/.idx pairs, or 'stdlib' (the Python library's own source)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each corpus; empty: all in one."""
    tokenizer: str = ""
    """A tokenizer.json, with the files beside it; empty: a byte-level BPE of model.vocab_size entries is trained on the
    corpus."""
    text_key: str = "text"
    """The field or column that holds a document's text, in files that have those."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Policy for a record that cannot be read (broken JSON, no text or null under text_key, bytes that are not UTF-8):
    an error that names it, or skip: leave it out, and name and count those that were."""
    split: Share = 0.02
    """Share of the documents held out for validation, where there is no valid_corpus."""
    valid_corpus: tuple[str, ...] = ()
    """Sources of validation, together; the tokenizer is that of `corpus`. Empty: what `split` holds out."""
    cache: str = ""
    """Folder of prepared corpora; empty: data/ in run.dir."""

    def conflicts(self, config: Config) -> Iterator[Problem]:
        """Settings that do not go together, or not with those of other sections."""
        equal = str([1.0] * len(self.corpus))
        if not all(self.corpus):
            yield Problem("data.corpus", list(self.corpus), "must name a source in each entry", '["stdlib"]')
        if not self.corpus:
            yield Problem("data.corpus", [], "must name at least one source", '["stdlib"]')
        if self.weights and len(self.weights) != len(self.corpus):
            rule = f"must have one weight for each of the {len(self.corpus)} corpora"
            yield Problem("data.weights", list(self.weights), rule, equal)
        elif self.weights and not (min(self.weights) >= 0 and sum(self.weights) > 0):
            yield Problem("data.weights", list(self.weights), "must not be negative, and not all zero", equal)
        if both := sorted({*self.corpus} & {*self.valid_corpus} - {""}):
            yield Problem("data.valid_corpus", both, "must not be trained on: it is in data.corpus", "[]")
        if not all(self.valid_corpus):
            yield Problem("data.valid_corpus", list(self.valid_corpus), "must name a source in each entry", "[]")
        if not self.text_key:
            yield Problem("data.text_key", "", "must name a field or a column", '"text"')
        if self.split == 0 and not self.valid_corpus and config.train.eval_interval:
            rule = "must hold something out when train.eval_interval > 0 and there is no data.valid_corpus"
            yield Problem("data.split", self.split, rule, "0.02")
