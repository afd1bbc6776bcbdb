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
"""Roles of our special tokens in transformers; the first that is there counts. Documents of our own
GPTs are divided by one token: an end is a start."""
_INPUTS = {
    "gpt": ["input_ids", "attention_mask"],
    "bert": ["input_ids", "token_type_ids", "attention_mask"],
}
_IN_CONFIG = ("bos_token", "eos_token", "pad_token")
_CLASSES = {
    "gpt": ("GPT2Tokenizer", "GPT2TokenizerFast"),
    "bert": ("BertTokenizer", "BertTokenizerFast"),
}
"""Classes whose older files we read; absent: the class of the model."""
_BERT_WORDS = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_GPT2_WORDS = {"bos_token": END, "eos_token": END, "unk_token": END}
"""Special tokens of these classes where the folder names none."""

Ids = dict[str, int | list[int] | None]


def tokenizer_files(path: Path, model: ModelConfig) -> tuple[dict[str, str], Ids]:
    """The files to write, by name, and the ids that config.json names.

    What the tokenizer came with, such as its chat template, leaves as it came.
    Raises: DataError if the tokenizer is damaged, or lacks a special token that a BERT needs.
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
        ids[f"{role}_id"] = named if len(named) > 1 else named[0] if named else special.get(role)
    return files, ids


def tokenizer_of(source: Path, model: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a folder, of its tokenizer.json or of what older folders have; None where
    there is none.

    Raises: DataError if it is damaged, or cannot be as the files of the folder say; ConfigError if
        it has more ids than
    the model.
    """
    path = source / TOKENIZER
    tokenizer = Tokenizer.load(path) if path.is_file() else _of_older_files(source, model)
    if tokenizer is not None:
        check_vocab_fits(tokenizer.vocab_size, model.vocab_size, f"the tokenizer of {source}")
    return tokenizer


def _of_older_files(source: Path, model: ModelConfig) -> Tokenizer | None:
    """The tokenizer of vocab.txt (BERT), or of vocab.json and merges.txt (GPT-2). Raises:
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
            f"without a {TOKENIZER} must be {' or '.join(classes)}; "
            f"transformers' AutoTokenizer writes a {TOKENIZER} when it saves it",
        )
    with errors_as(DataError, source / names[0], "is not the vocabulary of a tokenizer"):
        texts = [read_text(source / name, _MAX_BYTES) for name in names]
    made = (_bert if model.kind == "bert" else _gpt2)(folder, *texts)
    return Tokenizer(made, str(source / names[0]), folder)


def _bert(folder: TokenizerFolder, text: str) -> tokenizers.Tokenizer:
    """BERT's word pieces, as transformers' BertTokenizer makes them of vocab.txt."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    vocabulary = {
        word: number for number, word in enumerate(lines)
    }  # of a word that is there twice, the last counts
    words = _BERT_WORDS | dict(folder.words)
    if not folder.flag("do_basic_tokenize", True) or folder.settings.get("never_split"):
        key = "never_split" if folder.settings.get("never_split") else "do_basic_tokenize"
        raise folder.refused(
            key, folder.settings[key], "hybridpar has no such tokenizer; must be absent"
        )
    if missing := [
        word for role, word in words.items() if role in _BERT_WORDS and word not in vocabulary
    ]:
        raise DataError(
            f"{folder.path / 'vocab.txt'}: no tokenizer can be made of it, as it lacks "
            f"{', '.join(missing)}"
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
    """GPT-2's byte pairs, as transformers' GPT2Tokenizer makes them of vocab.json and
    merges.txt."""
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
    except Exception as error:  # what Rust raises is an Exception itself
        raise DataError(f"{path}: no tokenizer can be made of it ({error})") from None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(folder.flag("add_prefix_space", False))
    )
    made.decoder = decoders.ByteLevel()
    folder.honour(made)  # added tokens first, whose ids are written down
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
    if (pad := tokenizer.own("pad_token")) is not None:
        found["pad_token"] = pad
    return found


def _with_pairs(text: str, words: dict[str, str], ids: dict[str, int]) -> str:
    """A tokenizer.json that puts sentences together as they were trained on: [CLS] A [SEP] B
    [SEP]."""
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
