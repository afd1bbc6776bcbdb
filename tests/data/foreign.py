"""Tokenizers as others make them, trained on a little text."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = (
    "The",
    " cat",
    "\n",
    "  ",
    ".\n",
    "\n\n",
    " it's",
    "12345",
    "漢字",
    "。",
    "\t",
    " ",
    "é",
    "A,B",
    "(x)",
    " mat",
    " happy",
    "\r\n",
    "…",
    " 7.5",
    "…\u00a0",
)
TEXT = [
    "The cat sat on the mat. It was happy, wasn't it?\nTwo   spaces; tabs\tand CAPS and 12345 "
    "numbers.\n\n"
    "New paragraph é ü 漢字かな交じり文。次の文。\n"
] * 30
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def llama(scheme: str = "") -> tokenizers.Tokenizer:
    """A tokenizer like LLaMA's: <s> before a text, "▁" before its first word. `scheme`: by a
    Metaspace; empty: by a normalizer."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts: list[Any]
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[assignment]
        parts = [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
    else:
        made.normalizer = normalizers.Sequence(  # type: ignore[assignment]
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        parts = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    made.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    made.train_from_iterator((word for text in TEXT for word in text.split()), trainer)
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def llama_3() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [  # type: ignore[assignment]
            pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=500,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    made.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return made


def word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    made.train_from_iterator(
        TEXT,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    return made
