"""Rules for samples that a user gives to GPT or BERT, so that errors name the sample that breaks
one.

    tokens, labels       [seq_length] whole numbers: ids of the vocabulary; a label of -100 does not
                         count
    token_types          [seq_length] 0 or 1; sentence_labels 0, 1 or -100: BERT only
    padding_mask         [seq_length] booleans, True for a real token; may be left out
    positions            [seq_length] whole numbers; may be left out
    document_start       [seq_length] whole numbers, the place in the row where each token's document
                         begins: it attends to no token before; may be left out; GPT only

Samples that are packed into rows (data.packing) have tokens and labels alone, of one length each.

Without these checks a wrong id would be an index error deep in the model or, with tensor
parallelism, a wrong loss without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import ModelConfig, ModelSpec
from hybridpar.errors import DataError, shown

Arrays = dict[str, NDArray[Any]]
IGNORED = -100
"""The label that does not count."""


class SampleRules:
    """Rules for samples of a custom model: none, as only the model knows them."""

    num_checked: int = 0
    """Number of samples of a dataset that are checked before a run starts."""

    def check(self, sample: Arrays, what: str) -> None:
        """Raise a DataError that begins with `what` if a sample breaks a rule."""

    def as_input(self, batch: Arrays) -> Arrays:
        """Return a batch of samples with the types that the model reads. Shapes: unchanged."""
        return batch


@dataclass(frozen=True)
class _Entry:
    """Rules for an entry of a sample. `shape` None: one dimension of any size above 0. `limit`: its
    numbers are below it; None: booleans. `limit_is`: the meaning of the limit."""

    shape: tuple[int, ...] | None
    limit: int | None
    limit_is: str = ""
    may_ignore: bool = False
    is_required: bool = True


class TokenRules(SampleRules):
    """Rules for samples of GPT and BERT.

    Args:
        model: The model.
        packed: Whether samples are packed into rows, so that they have any length.
    """

    num_checked = 16

    def __init__(self, model: ModelConfig, *, packed: bool = False):
        self._kind = model.kind
        each = (model.seq_length,)
        vocabulary = model.vocab_size, "model.vocab_size"
        length = None if packed else each
        self._entries = {
            "tokens": _Entry(length, *vocabulary),
            "labels": _Entry(length, *vocabulary, may_ignore=True),
        }
        if packed:
            return
        if model.kind == "bert":
            self._entries["token_types"] = _Entry(each, 2, "the number of segments")
            self._entries["sentence_labels"] = _Entry(
                (),
                2,
                "the number of answers",
                may_ignore=True,
                is_required=model.sentence_head != "none",
            )
        self._entries["padding_mask"] = _Entry(each, None, is_required=False)
        most = model.position_rows or 2**31  # rotary positions need no table
        self._entries["positions"] = _Entry(
            each, most, "the number of positions", is_required=False
        )
        if model.kind == "gpt":
            self._entries["document_start"] = _Entry(
                each, model.seq_length, "model.seq_length", is_required=False
            )

    def check(self, sample: Arrays, what: str) -> None:
        needed = [name for name, entry in self._entries.items() if entry.is_required]
        if missing := [name for name in needed if name not in sample]:
            raise DataError(
                f"{what} has no {shown(missing[0])}, only {shown(list(sample))}; a {self._kind} "
                f"requires {', '.join(needed)}"
            )
        if unknown := [name for name in sample if name not in self._entries]:
            raise DataError(
                f"{what} has the unknown key {shown(unknown[0])}; a {self._kind} reads "
                f"{', '.join(self._entries)}"
            )
        for name, array in sample.items():
            if flaw := _flaw(name, array, self._entries[name]):
                raise DataError(f"{what}: {flaw}")
        if (starts := sample.get("document_start")) is not None:
            ahead = np.flatnonzero(starts > np.arange(len(starts)))
            if ahead.size:
                at = int(ahead[0])
                raise DataError(
                    f"{what}: document_start[{at}] is {starts[at]}, out of range: 0 to {at}, as a "
                    "document begins at its first token"
                )
        if sample["tokens"].shape != sample["labels"].shape:
            raise DataError(
                f"{what} has {len(sample['tokens'])} tokens and {len(sample['labels'])} labels; "
                "must have a label for each token"
            )

    def as_input(self, batch: Arrays) -> Arrays:
        found = {
            name: array if array.dtype == np.bool_ else array.astype(np.int64, copy=False)
            for name, array in batch.items()
        }
        if "document_start" in found:
            return document_entries(found["document_start"]) | {
                name: array for name, array in found.items() if name != "document_start"
            }
        return found


def document_entries(starts: NDArray[np.int64]) -> Arrays:
    """Return what a micro-batch says of its documents. Shapes: starts [b, s], the place in the row
    where each token's document begins -> `document_start` int32, `positions` int64, both [b, s]."""
    return {
        "document_start": starts.astype(np.int32),
        "positions": np.arange(starts.shape[1]) - starts,
    }


def rules_of(model: ModelSpec) -> SampleRules:
    """Return the rules for a model's samples."""
    return SampleRules() if model.text_format is None else TokenRules(model.text_format)


def _flaw(name: str, array: NDArray[Any], entry: _Entry) -> str:
    """Return what is wrong with an entry; "" if nothing is."""
    if entry.shape is None:
        if array.ndim != 1 or not array.size:
            return f"{name} has shape {list(array.shape)}; must have one dimension, of 1 or more"
    elif array.shape != entry.shape:
        length = (
            f"[{entry.shape[0]}], as model.seq_length is {entry.shape[0]}"
            if entry.shape
            else "[], one number"
        )
        return f"{name} has shape {list(array.shape)}; must have {length}"
    if entry.limit is None:
        return "" if array.dtype == np.bool_ else f"{name} has type {array.dtype}; must be booleans"
    if array.dtype.kind not in "iu":
        return f"{name} has type {array.dtype}; must be whole numbers, such as int64"
    wrong = (array < 0) | (array >= entry.limit)
    if entry.may_ignore:
        wrong &= array != IGNORED
    if not wrong.any():
        return ""
    at = int(np.flatnonzero(wrong)[0])
    place = f"{name}[{at}]" if entry.shape else name
    ignored = f", or {IGNORED} where it does not count" if entry.may_ignore else ""
    return (
        f"{place} is {array.flat[at]}, out of range: 0 to {entry.limit - 1} ({entry.limit_is} - "
        f"1){ignored}"
    )
