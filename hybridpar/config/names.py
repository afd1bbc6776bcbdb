"""Finds the name that was probably meant by one that is unknown: of a key, a section, a flag or a
command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LIKE = 0.7
"""Likeness from which on a name may have been meant, as difflib counts it. Below are names that
share letters only."""
_TYPED_WRONG = 0.85
"""Likeness from which on a word is taken for a misspelled one."""
_MOST_MEANT = 3
"""Most names that one word may stand for."""
_SHORT_LIST = 20
"""Most names of a list that a message shows."""
_SAME = {
    "batch_size": ("train.micro_batch_size",),
    "block_size": ("model.seq_length",),
    "context_length": ("model.seq_length",),
    "d_model": ("model.hidden_size",),
    "dataset": ("data.corpus",),
    "data_path": ("data.corpus",),
    "embed_dim": ("model.hidden_size",),
    "epochs": ("train.num_steps",),
    "gradient_accumulation_steps": ("pipeline.num_microbatches",),
    "iterations": ("train.num_steps",),
    "layers": ("model.num_layers",),
    "learning_rate": ("optim.lr",),
    "max_iters": ("train.num_steps",),
    "max_steps": ("train.num_steps",),
    "n_embd": ("model.hidden_size",),
    "n_head": ("model.num_heads",),
    "n_layer": ("model.num_layers",),
    "optimizer": ("optim.name",),
    "precision": ("train.dtype",),
    "scheduler": ("optim.decay", "pipeline.schedule"),
    "sequence_length": ("model.seq_length",),
    "steps": ("train.num_steps",),
    "warmup": ("optim.warmup_steps", "pipeline.warmup"),
    "zero_stage": ("parallel.zero",),
}
"""Names that other frameworks give to keys of the configuration."""


def meant(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that `word` may stand for, the likeliest first; none where nothing is
    like it.

    Args:
        word: An unknown name, with or without the name of a section and a dot before it.
        known: Names, with or without a section.
    """
    names = sorted(known)
    word = word.lower().replace("-", "_")
    section, _, key = word.rpartition(".")
    same_key = [name for name in names if name.rpartition(".")[2] == key]
    elsewhere = (
        key
        if key in _SAME
        else next(iter(difflib.get_close_matches(key, _SAME, 1, _TYPED_WRONG)), "")
    )
    others = [name for name in _SAME.get(elsewhere, ()) if name in names]
    nearest_section = difflib.get_close_matches(
        section, {name.rpartition(".")[0] for name in names} - {""}, 1, _LIKE
    )
    beside = [name for name in same_key if name.rpartition(".")[0] in nearest_section]
    return (
        beside or (others if key in _SAME else []) or same_key or _like(word, key, names) or others
    )


def _like(word: str, key: str, names: Sequence[str]) -> list[str]:
    """Return the name whose key is most like a word, of the same section if it has one."""
    beside = [name for name in names if name.rpartition(".")[0] == word.rpartition(".")[0]]
    begins = [name for name in beside if name.rpartition(".")[2].startswith(key)]
    begins = begins or [
        name for name in names if len(key) > 1 and name.rpartition(".")[2].startswith(key)
    ]
    if begins:
        return begins[:_MOST_MEANT]
    likeness = {
        name: difflib.SequenceMatcher(None, key, name.rpartition(".")[2]).ratio() for name in names
    }
    if "." not in word:  # a dot may be missing
        whole = {name: difflib.SequenceMatcher(None, word, name).ratio() for name in names}
        likeness = {name: max(ratio, whole[name]) for name, ratio in likeness.items()}
    near = [name for name in names if likeness[name] >= _LIKE]
    return sorted(near, key=lambda name: (name not in beside, -likeness[name]))[:1]


def as_list(names: Iterable[str], what: str) -> str:
    """Return a rule that lists all names; empty where there are too many to read."""
    listed = list(names)
    return f"{what} {', '.join(listed)}" if len(listed) <= _SHORT_LIST else ""
