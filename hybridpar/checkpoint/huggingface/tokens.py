"""The tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from hybridpar.config import ModelConfig
from hybridpar.data.tokenizer import BEGIN, BERT_TOKENS, END, Tokenizer, check_vocab_fits
from hybridpar.data.tokenizer_folder import SETTINGS, SPECIAL, TOKENIZER, TokenizerFolder
from hybridpar.errors import DataError
from hybridpar.reading import errors_as, parse_json, read_text

_MAX_BYTES = 256 << 20
_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {"bos_token": (BEGIN, END), "eos_token": (END,)},
    "bert": dict(
        zip(
            ("pad_token", "cls_token", "sep_token", "mask_token"),
            ((name,) for name in BERT_TOKENS),
            strict=True,
        )
    ),
}
"""Roles of our special tokens in transformers; the first that exists counts. Documents of GPTs
trained here are separated by one token, so the end token is also the start token."""
_INPUTS = {
    "gpt": ["input_ids", "attention_mask"],
    "bert": ["input_ids", "token_type_ids", "attention_mask"],
}
_IN_CONFIG = ("bos_token", "eos_token", "pad_token")
_CLASSES = {
    "gpt": ("GPT2Tokenizer", "GPT2TokenizerFast"),
    "bert": ("BertTokenizer", "BertTokenizerFast"),
}
"""Tokenizer classes whose older files are read; if absent, the class of the model."""
_BERT_WORDS = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_GPT2_WORDS = {"bos_token": END, "eos_token": END, "unk_token": END}
"""Special tokens of these classes if the folder names none."""

Ids = dict[str, int | list[int] | None]


def tokenizer_files(path: Path, model: ModelConfig) -> tuple[dict[str, str], Ids]:
    """Return the files to write, by name, and the ids for config.json.

    Files that came with the tokenizer, such as its chat template, are exported unchanged.

    Raises:
        DataError: The tokenizer is damaged, or lacks a special token that a BERT needs.
    """
    tokenizer = Tokenizer.load(path, within=path.parent)
    files = tokenizer.files()
    special = _special_ids(tokenizer, model)
    words = {role: tokenizer.word(number) for role, number in special.items()}
    if model.kind == "bert" and not json.loads(files[TOKENIZER]).get("post_processor"):
        files[TOKENIZER] = _with_pairs(files[TOKENIZER], words, special)
    if SETTINGS not in files:
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.num_positions,
            "model_input_names": _INPUTS[model.kind],
            "clean_up_tokenization_spaces": False,
            **words,
        }
        files[SETTINGS] = json.dumps(settings, indent=1)
        files.setdefault(SPECIAL, json.dumps(words, indent=1))
    ids: Ids = {}
    for role in _IN_CONFIG:
        named = list(tokenizer.ids(role))
        if len(named) > 1:
            ids[f"{role}_id"] = named
        else:
            ids[f"{role}_id"] = named[0] if named else special.get(role)
    return files, ids


def tokenizer_of(source: Path, model: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer of a folder, from its tokenizer.json or the files of older folders; None
    if there is none.

    Raises:
        DataError: It is damaged, or conflicts with the other files of the folder.
        ConfigError: It has more ids than the model.
    """
    path = source / TOKENIZER
    tokenizer = Tokenizer.load(path) if path.is_file() else _of_older_files(source, model)
    if tokenizer is not None:
        check_vocab_fits(tokenizer.vocab_size, model.vocab_size, f"the tokenizer of {source}")
    return tokenizer


def _of_older_files(source: Path, model: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer in vocab.txt (BERT), or in vocab.json and merges.txt (GPT-2). Raises:
    DataError."""
    names = ("vocab.txt",) if model.kind == "bert" else ("vocab.json", "merges.txt")
    if not all((source / name).is_file() for name in names):
        return None
    folder = TokenizerFolder.read(source)
    classes = _CLASSES[model.kind]
    if (of_class := folder.settings.get("tokenizer_class", classes[0])) not in classes:
        raise folder.refused(
            "tokenizer_class",
            of_class,
            f"must be {' or '.join(classes)} if there is no {TOKENIZER}; load it with "
            f"transformers' AutoTokenizer and save it again, which writes one",
        )
    with errors_as(DataError, source / names[0], "is not the vocabulary of a tokenizer"):
        texts = [read_text(source / name, _MAX_BYTES) for name in names]
    made = (_bert if model.kind == "bert" else _gpt2)(folder, *texts)
    return Tokenizer(made, str(source / names[0]), folder)


def _bert(folder: TokenizerFolder, text: str) -> tokenizers.Tokenizer:
    """Return BERT's WordPiece tokenizer, as transformers' BertTokenizer builds it from
    vocab.txt."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    vocabulary = {
        word: number for number, word in enumerate(lines)
    }  # if a word appears twice, the last one counts
    words = _BERT_WORDS | dict(folder.words)
    if not folder.flag("do_basic_tokenize", True) or folder.settings.get("never_split"):
        key = "never_split" if folder.settings.get("never_split") else "do_basic_tokenize"
        raise folder.refused(key, folder.settings[key], "not supported; must be absent")
    if missing := [
        word for role, word in words.items() if role in _BERT_WORDS and word not in vocabulary
    ]:
        raise DataError(
            f"{folder.path / 'vocab.txt'}: not a valid vocabulary: it lacks {', '.join(missing)}"
        )
    cls = words["cls_token"]
    sep = words["sep_token"]
    inner: Any = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=words["unk_token"]))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(folder.flag("tokenize_chinese_chars", True)),
        strip_accents=folder.flag("strip_accents", None),
        lowercase=bool(folder.flag("do_lower_case", True)),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.add_special_tokens(list(dict.fromkeys(words.values())))
    inner.post_processor = _pairs(cls, sep, vocabulary[cls], vocabulary[sep])
    return inner  # type: ignore[no-any-return]


def _gpt2(folder: TokenizerFolder, vocabulary: str, merges: str) -> tokenizers.Tokenizer:
    """Return GPT-2's byte-level BPE, as transformers' GPT2Tokenizer builds it from vocab.json
    and merges.txt."""
    words = _GPT2_WORDS | dict(folder.words)
    path = folder.path / "vocab.json"
    lines = [
        line.rstrip("\r")
        for line in merges.split("\n")
        if line.strip() and not line.startswith("#version")
    ]
    pairs: Any = [tuple(line.split(" ")) for line in lines]
    try:
        ids = parse_json(vocabulary, dict)
        made: Any = tokenizers.Tokenizer(
            models.BPE(ids, pairs, continuing_subword_prefix="", end_of_word_suffix="")
        )
    except Exception as error:  # errors of Rust are plain Exceptions
        raise DataError(f"{path}: cannot be made into a tokenizer ({error})") from None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(folder.flag("add_prefix_space", False))
    )
    made.decoder = decoders.ByteLevel()
    folder.honour(made)  # added tokens first, since their ids are given
    made.add_special_tokens(
        [
            word
            for role, word in words.items()
            if made.token_to_id(word) is not None or role == "eos_token"
        ]
    )
    begin = [words["bos_token"]] if folder.flag("add_bos_token", False) else []
    end = [words["eos_token"]] if folder.flag("add_eos_token", False) else []
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if begin or end:
        made.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B:1", *end],
            special_tokens=[
                (word, made.token_to_id(word)) for word in dict.fromkeys([*begin, *end])
            ],
        )
    return made  # type: ignore[no-any-return]


def no_tokenizer() -> Ids:
    """Return the ids for config.json if there is no tokenizer."""
    return {f"{role}_id": None for role in _IN_CONFIG}


def _special_ids(tokenizer: Tokenizer, model: ModelConfig) -> dict[str, int]:
    """Return the ids of a BERT's special tokens. Raises: DataError if its tokenizer lacks one."""
    found = {}
    for role, names in _ROLES[model.kind].items():
        for name in names:
            try:
                found[role] = tokenizer.special(name)
                break
            except DataError:
                if model.kind == "bert":
                    raise
    if (pad := tokenizer.own("pad_token")) is not None:
        found["pad_token"] = pad
    return found


def _with_pairs(text: str, words: dict[str, str], ids: dict[str, int]) -> str:
    """Return a tokenizer.json that joins sentences as in training: [CLS] A [SEP] B [SEP]."""
    inner: Any = tokenizers.Tokenizer.from_str(text)
    inner.post_processor = _pairs(
        words["cls_token"], words["sep_token"], ids["cls_token"], ids["sep_token"]
    )
    return str(inner.to_str(pretty=True))


def _pairs(cls: str, sep: str, cls_id: int, sep_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, cls_id), (sep, sep_id)],
    )
