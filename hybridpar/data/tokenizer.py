"""A byte-level BPE tokenizer: trained on the corpus with `tokenizers`, or loaded from a
tokenizer.json.

Files beside the tokenizer.json may describe it further (tokenizer_folder.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hybridpar.data.files.pieces import Ends, Part, Piece, in_parts, pieces
from hybridpar.data.tokenizer_folder import SETTINGS, TOKENIZER, TokenizerFolder, decoder_parts
from hybridpar.errors import DataError, HybridparError, config_error
from hybridpar.reading import errors_as, nearest_path, read_text

if TYPE_CHECKING:  # imported where it is used: operators and benchmarks run without it
    import tokenizers

Kind = Literal["gpt", "bert"]
END = "<|endoftext|>"
BEGIN = "<s>"
"""Token that tokenizers made elsewhere may start a text with; tokenizers trained here have none."""
BERT_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
SPECIAL_TOKENS: dict[Kind, tuple[str, ...]] = {"gpt": (END,), "bert": (END, *BERT_TOKENS)}
_ROLES = {
    BEGIN: "bos_token",
    END: "eos_token",
    "[PAD]": "pad_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[MASK]": "mask_token",
}
"""Names of our special tokens in transformers."""
# Words for the same thing in tokenizers made elsewhere, tried in this order where the folder does
# not say which it is.
_SYNONYMS = {
    BEGIN: (BEGIN, "<|begin_of_text|>", "<bos>"),
    END: (END, "<|end_of_text|>", "</s>", "<eos>"),
    "[PAD]": ("[PAD]", "<pad>"),
    "[CLS]": ("[CLS]", "<s>"),
    "[SEP]": ("[SEP]", "</s>"),
    "[MASK]": ("[MASK]", "<mask>"),
}
_NUM_BYTES = 256
_MAX_BYTES = 256 << 20
_MAX_HOLES = 1 << 24
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
"""Stands for a space in tokens of SentencePiece."""
_WORD_BYTES = 4096
"""Longest word that is not divided in training."""
# encoded at a time
_BATCH_CHARACTERS = 2 << 20
_BATCH_PIECES = 2048


@dataclass(frozen=True)
class BertVocabulary:
    """Ids of a tokenizer that a BERT data set needs."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]
    """Ids that are never masked and never used as replacements, including ids without a token."""


class Tokenizer:
    """Text to ids and back. Special tokens that appear in a text are treated as ordinary text.

    Args:
        folder: Contents of the files beside its tokenizer.json.

    Raises:
        DataError: Here and in `load`, `special`, `bert`: the file is damaged, lacks a special token
            that is asked for, or conflicts with the files beside it.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        name: str = "the tokenizer",
        folder: TokenizerFolder | None = None,
    ):
        self._inner = inner
        self._name = name
        self._folder = folder or TokenizerFolder()
        with _errors_of_rust(f"{name}: cannot be as the files beside it say"):
            self._folder.honour(inner)
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()

    @staticmethod
    def load(path: str | Path, *, within: Path | None = None) -> Tokenizer:
        """Read a tokenizer.json, and the files beside it unless it has another name. `within`:
        the run folder that it belongs to; links that lead out of it are refused."""
        import tokenizers

        inside = Path(path, "tokenizer.json")
        if near := str(inside) if inside.is_file() else nearest_path(Path(path)):
            raise DataError(f"{path}: is not a file; try {near}")
        with errors_as(DataError, path, "is not a tokenizer.json", RecursionError):
            text = read_text(Path(path), _MAX_BYTES, within=within)
            if not isinstance(json.loads(text), dict):
                raise ValueError("it is not a JSON object")
        with _errors_of_rust(f"{path}: is not a tokenizer.json"):
            inner = tokenizers.Tokenizer.from_str(text)
        path = Path(path)
        folder = (
            TokenizerFolder.read(path.parent, within=within) if path.name == TOKENIZER else None
        )
        return Tokenizer(inner, str(path), folder)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and the files that belong beside it unless it has another
        name."""
        path = Path(path)
        if path.name != TOKENIZER:
            path.write_text(self.to_json(), encoding="utf-8")
            return
        for name, text in self.files().items():
            (path.parent / name).parent.mkdir(exist_ok=True)
            (path.parent / name).write_text(text, encoding="utf-8")

    def files(self) -> dict[str, str]:
        """Return the texts of tokenizer.json and of the files that belong beside it, by their
        path in a folder."""
        return {TOKENIZER: self.to_json(), **self._folder.files}

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True)

    @cached_property
    def fingerprint(self) -> str:
        text = self.to_json()
        if own := [
            (name, number)
            for name in (END, *BERT_TOKENS)
            if (number := self._find(name)) is not None and number != self._find_known(name)
        ]:
            text += repr(own)  # ids that data depend on, and that tokenizer.json does not say
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """Return the name in errors: its file."""
        return self._name

    @property
    def chat_template(self) -> str | None:
        """Return the chat template that came with it; None if there is none. Raises: DataError."""
        return self._folder.chat_template

    @property
    def template_words(self) -> dict[str, str]:
        """Return the special tokens by role that a chat template may write, as transformers has
        them. Without files beside tokenizer.json these are the ones that an export names."""
        if SETTINGS in self._folder.files or self._folder.words:
            return dict(self._folder.words)
        roles = {"bos_token": (BEGIN, END), "eos_token": (END,)}
        found = {
            role: next(filter(None, map(self._word, names)), "") for role, names in roles.items()
        }
        return {role: word for role, word in found.items() if word}

    def with_chat_template(self, text: str) -> Tokenizer:
        """Return the same tokenizer with another chat template beside it."""
        return Tokenizer(self._inner, self._name, self._folder.with_chat_template(text))

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(self.vocabulary.values()) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token."""
        return self._inner.get_vocab(with_added_tokens=True)

    @cached_property
    def holes(self) -> NDArray[np.int64]:
        """Return the ids below vocab_size that no token has, in ascending order. Raises:
        DataError if there are millions."""
        ids = list(self.vocabulary.values())
        if (size := max(ids) + 1) - len(ids) > _MAX_HOLES:
            raise DataError(
                f"{self._name}: has ids up to {size - 1} but only {len(ids)} tokens; at most "
                f"{_MAX_HOLES} ids may have no token"
            )
        has_token = np.zeros(size, np.bool_)
        has_token[ids] = True
        return np.flatnonzero(~has_token)

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Return how many bytes of text each id stands for, 0 for special tokens and ids that no
        token has; None if that is not known, as with WordPiece. Shapes: returns [vocab_size]."""
        kinds = {part.get("type") for part in decoder_parts(self._inner)}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self._inner.get_added_tokens_decoder()
        for word, token in self.vocabulary.items():
            if token in added:
                lengths[token] = 0 if added[token].special else len(word.encode())
            elif "ByteLevel" in kinds:  # a character for each byte
                lengths[token] = len(word)
            else:
                is_byte = _BYTE.fullmatch(word) is not None
                lengths[token] = 1 if is_byte else len(word.replace(_SPACE, " ").encode())
        return lengths

    def special(self, name: str) -> int:
        """Return the id of a special token by our name for it (END, BEGIN or one of
        BERT_TOKENS): the folder's, else the id of a word that usually has this role."""
        if (token := self._find(name)) is not None:
            return token
        role = _ROLES[name]
        if word := self._folder.words.get(role):
            raise self._folder.refused(role, word, f"{self._name} has no such token")
        raise DataError(
            f"{self._name}: has no token {name} (nor {', '.join(_SYNONYMS[name][1:])}); name it as "
            f"{role} "
            f"in a {SETTINGS} beside it"
        )

    def _find(self, name: str) -> int | None:
        role = _ROLES[name]
        return (
            self.own(role)
            if role in self._folder.words or self.ids(role)
            else self._find_known(name)
        )

    def _word(self, name: str) -> str:
        """Return how one of our special tokens is written; "" if there is none."""
        token = self._find(name)
        return "" if token is None else self.word(token)

    @cached_property
    def _for_rendered(self) -> tokenizers.Tokenizer:
        """Return a copy that knows special tokens in a text. It has no post-processor, as some move
        the beginning of a token behind its white space."""
        import tokenizers

        with _errors_of_rust(f"{self._name}: cannot be copied"):
            copied: Any = tokenizers.Tokenizer.from_str(self.to_json())
        copied.post_processor = None
        copied.encode_special_tokens = False
        copied.no_padding()
        copied.no_truncation()
        return cast("tokenizers.Tokenizer", copied)

    def own(self, role: str) -> int | None:
        """Return the id that the folder gives a role, such as pad_token; None if it gives none,
        or a word that is not a token."""
        if word := self._folder.words.get(role):
            token: int | None = self._inner.token_to_id(word)
            return token
        return next(iter(self.ids(role)), None)

    def _find_known(self, name: str) -> int | None:
        """Return the id of a word that usually has this role."""
        found = (self._inner.token_to_id(word) for word in _SYNONYMS[name])
        return next((token for token in found if token is not None), None)

    def ids(self, role: str) -> tuple[int, ...]:
        """Return the ids of a role, such as eos_token, in the folder's generation_config.json or
        config.json, without ids that no token has."""
        return tuple(
            token for token in self._folder.ids.get(role, ()) if token >= 0 and self._has(token)
        )

    def _has(self, token: int) -> bool:
        return token < self.vocab_size and self._inner.id_to_token(token) is not None

    @cached_property
    def end(self) -> int:
        """Return the id that ends a text. Raises: DataError if there is none."""
        return self.special(END)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Return the ids at which a generated text ends: the end-of-text token, and all that the
        folder names.

        Raises:
            DataError: There is no end-of-text token.
        """
        return frozenset({self.end, *self.ids(_ROLES[END])})

    def word(self, token: int) -> str:
        """Return how a token is written."""
        return str(self._inner.id_to_token(token))

    def bert(self) -> BertVocabulary:
        added = self._inner.get_added_tokens_decoder()
        pad, cls, sep, mask = (self.special(name) for name in BERT_TOKENS)
        special = {
            pad,
            cls,
            sep,
            mask,
            *(i for i, token in added.items() if token.special),
            *self.holes.tolist(),
        }
        return BertVocabulary(self.vocab_size, pad, cls, sep, mask, tuple(sorted(special)))

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text, such as LLaMA's
        <s>; tokenizers trained here have none."""
        if self._inner.post_processor is None:
            return [], []
        with self._encoding():
            found = self._inner.encode("a", add_special_tokens=True)
        ordinary = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        if not ordinary:
            return [], []
        return found.ids[: ordinary[0]], found.ids[ordinary[-1] + 1 :]

    @cached_property
    def document_frame(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the ids before and after a document, which ends with exactly one end-of-text
        token."""
        begin, finish = self.frame
        finish = finish if finish[-1:] == [self.end] else [*finish, self.end]
        return np.array(begin, np.int32), np.array(finish, np.int32)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text, without special tokens. Shapes: returns [t]."""
        return np.concatenate([ids for ids, _ in self.encode_parts(in_parts(text))])

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, like transformers: with the special tokens
        that begin a text."""
        return [*self.frame[0], *self.encode(text).tolist()]

    def encode_parts(self, parts: Iterable[Part]) -> Iterator[tuple[NDArray[np.int32], Ends]]:
        """Yield the ids of texts piece by piece, without special tokens; pieces are encoded in
        parallel.

        Shapes: yields [t], and what ends after it.
        """
        for batch in _batches(pieces(parts, self._num_ids)):
            texts = [piece.context + piece.text if piece.text else "" for piece in batch]
            with self._encoding():
                found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, found, strict=True):
                ids = encoding.ids[piece.num_known :] if piece.text else []
                yield np.array(ids, np.int32), piece.ends
            del found, encoding  # before the next texts arrive

    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Return the ids of rendered conversations, whose special tokens count as such, and the
        character at which each id begins. Shapes: two of [t] for each text.
        """
        with self._encoding():
            found = self._for_rendered.encode_batch(list(texts), add_special_tokens=False)
        return [
            (
                np.array(one.ids, np.int32),
                np.array([start for start, _ in one.offsets], np.int64),
            )
            for one in found
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. A decoder may strip a leading space."""
        with _errors_of_rust(f"{self._name}: cannot decode ids"):
            return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    def _encoding(self) -> AbstractContextManager[None]:
        return _errors_of_rust(
            f"{self._name}: cannot encode a text",
            "; a tokenizer needs an id for any text, such as an unknown token, and "
            "expressions that do not search a text for very long",
        )

    def _num_ids(self, before: str, after: str) -> int | None:
        with self._encoding():
            first = self._inner.encode(before, add_special_tokens=False).ids
            both = self._inner.encode(before + after, add_special_tokens=False).ids
        return len(first) if both[: len(first)] == first else None


@contextmanager
def _errors_of_rust(what: str, advice: str = "") -> Iterator[None]:
    """Turn any error of the library `tokenizers` into a DataError: it has no class of its own,
    and a panic is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, HybridparError):
        raise
    except BaseException as error:
        raise DataError(f"{what} ({error}){advice}") from None


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: Kind = "gpt") -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries (fewer if the texts have no more pairs
    to merge).

    The same texts give the same tokenizer. Special tokens come first, then the bytes, then the
    merges. Words of more than 4096 bytes (a long run of one letter) are divided for training,
    because time grows with the square of their length.

    Raises:
        ConfigError: The vocabulary cannot hold every byte and the special tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size, kind)
    inner = tokenizers.Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = cast(
        Any, pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_WORD_BYTES)])
    )
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS[kind]),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.pre_tokenizer = words
    return Tokenizer(inner)


def check_vocab_size(vocab_size: int, kind: Kind) -> None:
    """Raise a ConfigError if no byte-level tokenizer can be that small."""
    smallest = _NUM_BYTES + len(SPECIAL_TOKENS[kind])
    if vocab_size < smallest:
        rule = (
            f"must be at least {smallest}: a byte-level tokenizer has {_NUM_BYTES} bytes and "
            f"{smallest - _NUM_BYTES} special tokens"
        )
        raise config_error("model.vocab_size", vocab_size, rule, "512")


def check_vocab_fits(used: int, vocab_size: int, what: str) -> None:
    """Raise a ConfigError if ids below `used` do not fit into `vocab_size`."""
    if used > vocab_size:
        rule = f"must be above {used - 1}, the highest id of {what}"
        raise config_error("model.vocab_size", vocab_size, rule, str(-(-used // 64) * 64))


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups that are worth encoding in parallel and fit in memory."""
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
