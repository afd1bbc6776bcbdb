"""The section [data]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridpar.config.row_names import NAME_RULE, is_name
from hybridpar.config.typed import Share
from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections import Config


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

    def conflicts(self, config: Config) -> Iterator[Problem]:
        """Settings that do not go together, or not with those of other sections."""
        equal = str([1.0] * len(self.corpus))
        if not all(self.corpus):
            yield Problem(
                "data.corpus", list(self.corpus), "must name a source in each entry", '["stdlib"]'
            )
        if not self.corpus:
            yield Problem("data.corpus", [], "must name at least one source", '["stdlib"]')
        together = " ".join(self.corpus)
        if len(self.corpus) > 1 and Path(together).is_file():
            rule = (
                "are several sources, and together the name of one file, which needs quotation "
                "marks in a shell"
            )
            yield Problem("data.corpus", list(self.corpus), rule, f'["{together}"]')
        if self.weights and len(self.weights) != len(self.corpus):
            rule = f"must have one weight for each of the {len(self.corpus)} corpora"
            yield Problem("data.weights", list(self.weights), rule, equal)
        elif self.weights and not (min(self.weights) >= 0 and sum(self.weights) > 0):
            yield Problem(
                "data.weights", list(self.weights), "must not be negative, and not all zero", equal
            )
        yield from self._conflicts_of_sets()
        if not self.text_key:
            yield Problem("data.text_key", "", "must name a field or a column", '"text"')
        if self.split == 0 and not self.valid_sources and config.train.eval_interval:
            rule = (
                "must hold something out when train.eval_interval > 0 and there is neither "
                "data.valid_corpus nor "
                "data.valid_sets"
            )
            yield Problem("data.split", self.split, rule, "0.02")

    @property
    def valid_sources(self) -> dict[str, tuple[str, ...]]:
        """Sources of each validation set by its name, "" for that of valid_corpus. Empty: what
        `split` holds out."""
        return {"": self.valid_corpus} if self.valid_corpus else dict(self.valid_sets)

    def _conflicts_of_sets(self) -> Iterator[Problem]:
        if self.valid_corpus and self.valid_sets:
            rule = (
                "is one validation set without a name, and data.valid_sets has others: name it "
                "there, too"
            )
            sets = {"other": self.valid_corpus, **self.valid_sets}
            named = ", ".join(f"{name} = {json.dumps(sources)}" for name, sources in sets.items())
            yield Problem(
                "data.valid_corpus",
                list(self.valid_corpus),
                rule,
                f"[], and data.valid_sets = {{{named}}}",
            )
        for name, sources in self.valid_sources.items():
            key = f"data.valid_sets.{name}" if name else "data.valid_corpus"
            if both := sorted({*self.corpus} & {*sources} - {""}):
                yield Problem(key, both, "must not be trained on: it is in data.corpus", "[]")
            if not all(sources) or not sources:
                yield Problem(
                    key,
                    list(sources),
                    "must name a source in each entry",
                    '["other.txt"]' if name else "[]",
                )
            if name and not is_name(name):
                yield Problem(
                    "data.valid_sets", name, f"is the name of a set, which {NAME_RULE}", '"other"'
                )
