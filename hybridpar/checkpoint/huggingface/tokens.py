"""The tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from hybridpar.config import ModelConfig
from hybridpar.data.tokenizer import BEGIN, END, Tokenizer
from hybridpar.errors import DataError

TOKENIZER = "tokenizer.json"
_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {"bos_token": (BEGIN, END), "eos_token": (END,)},
    "bert": {"pad_token": ("[PAD]",), "cls_token": ("[CLS]",), "sep_token": ("[SEP]",), "mask_token": ("[MASK]",)},
}
"""What transformers calls the special tokens of ours, the first that is there. Documents of our own GPTs are divided by
one token: an end is a start."""
_INPUTS = {"gpt": ["input_ids", "attention_mask"], "bert": ["input_ids", "token_type_ids", "attention_mask"]}
_IN_CONFIG = ("bos_token", "eos_token", "pad_token")


def tokenizer_files(path: Path, model: ModelConfig) -> tuple[dict[str, str], dict[str, int | None]]:
    """The files to write, by name, and the ids that config.json names.

    Raises: DataError if the tokenizer is damaged, or lacks a special token that a BERT needs.
    """
    tokenizer = Tokenizer.load(path)
    text = path.read_text(encoding="utf-8")
    ids = _special_ids(tokenizer, model)
    words = {role: tokenizer.word(number) for role, number in ids.items()}
    if model.kind == "bert" and not json.loads(text).get("post_processor"):
        text = _with_pairs(text, words, ids)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.seq_length,
        "model_input_names": _INPUTS[model.kind], "clean_up_tokenization_spaces": False, **words}
    files = {TOKENIZER: text, "tokenizer_config.json": json.dumps(settings, indent=1),
             "special_tokens_map.json": json.dumps(words, indent=1)}
    return files, {f"{role}_id": ids.get(role) for role in _IN_CONFIG}


def no_tokenizer() -> dict[str, int | None]:
    """The ids of config.json where there is no tokenizer."""
    return {f"{role}_id": None for role in _IN_CONFIG}


def _special_ids(tokenizer: Tokenizer, model: ModelConfig) -> dict[str, int]:
    """Raises: DataError if a BERT's tokenizer lacks one."""
    found = {}
    for role, names in _ROLES[model.kind].items():
        for name in names:
            try:
                found[role] = tokenizer.special(name)
                break
            except DataError:
                if model.kind == "bert":
                    raise
    return found


def _with_pairs(text: str, words: dict[str, str], ids: dict[str, int]) -> str:
    """A tokenizer.json that puts sentences together as they were trained on: [CLS] A [SEP] B [SEP]."""
    inner = tokenizers.Tokenizer.from_str(text)
    cls, sep = words["cls_token"], words["sep_token"]
    pairs = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, ids["cls_token"]), (sep, ids["sep_token"])])
    inner.post_processor = pairs  # type: ignore[assignment]
    return inner.to_str(pretty=True)
