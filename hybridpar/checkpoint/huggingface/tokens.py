"""The tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from hybridpar.checkpoint.huggingface.source import read_json
from hybridpar.config import ModelConfig
from hybridpar.data.tokenizer import BEGIN, END, Tokenizer, check_vocab_fits
from hybridpar.errors import DataError

TOKENIZER = "tokenizer.json"
_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {"bos_token": (BEGIN, END), "eos_token": (END,)},
    "bert": {"pad_token": ("[PAD]",), "cls_token": ("[CLS]",), "sep_token": ("[SEP]",), "mask_token": ("[MASK]",)},
}
"""Roles of our special tokens in transformers; the first that is there counts. Documents of our own GPTs are divided by
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
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.num_positions,
        "model_input_names": _INPUTS[model.kind], "clean_up_tokenization_spaces": False, **words}
    files = {TOKENIZER: text, "tokenizer_config.json": json.dumps(settings, indent=1),
             "special_tokens_map.json": json.dumps(words, indent=1)}
    return files, {f"{role}_id": ids.get(role) for role in _IN_CONFIG}


def tokenizer_of(source: Path, model: ModelConfig) -> str:
    """The tokenizer.json of a folder as it is, or made of what older folders have; empty where there is none.

    Raises: DataError if it is damaged; ConfigError if it has more ids than the model.
    """
    path = source / TOKENIZER
    if path.is_file():
        tokenizer, text = Tokenizer.load(path), path.read_text(encoding="utf-8")
    elif text := _of_older_files(source, model):
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(text))
    else:
        return ""
    check_vocab_fits(tokenizer.vocab_size, model.vocab_size, f"the tokenizer of {source}")
    return text


def _of_older_files(source: Path, model: ModelConfig) -> str:
    """A tokenizer.json of vocab.txt (BERT), or of vocab.json and merges.txt (GPT-2). Raises: DataError."""
    words, pairs = (source / "vocab.txt", None) if model.kind == "bert" else (source / "vocab.json", "merges.txt")
    if not words.is_file() or (pairs and not (source / pairs).is_file()):
        return ""
    settings = source / "tokenizer_config.json"
    plain = read_json(settings) if settings.is_file() else {}
    try:
        if pairs is None:
            made: Any = BertWordPieceTokenizer(str(words), lowercase=bool(plain.get("do_lower_case", True)))
        else:
            made = ByteLevelBPETokenizer(str(words), str(source / pairs))
            made.add_special_tokens([END])
        return str(made.to_str(pretty=True))
    except Exception as error:  # what Rust raises is an Exception itself
        raise DataError(f"{words}: no tokenizer can be made of it ({error})") from None


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
    pairs = processors.TemplateProcessing(single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1",
                                          special_tokens=[(cls, ids["cls_token"]), (sep, ids["sep_token"])])
    inner.post_processor = pairs  # type: ignore[assignment]
    return inner.to_str(pretty=True)
