"""From the words of a command line to values, by the rules that values of a TOML file have."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from hybridpar.config.toml import convert

BOOLEANS = {"true": True, "false": False}


def from_words(words: Sequence[str], kind: Any) -> Any:
    """The value of an annotated type that the words of a flag stand for. Raises: ValueError with the rule they break.

    Booleans may be written in any case, and lists of numbers also with commas between them.
    """
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if inner is not str:
            words = [part for word in words for part in re.split(r"[\s,]+", word.strip(" []()")) if part]
        return convert([_read(word, inner) for word in words], kind)
    if len(words) != 1:
        raise ValueError("needs a value")
    return convert(_read(words[0], kind), kind)


def _read(word: str, kind: Any) -> Any:
    """What a word stands for; the word itself where it does not fit."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return next((option for option in typing.get_args(kind) if str(option) == word), word)
    if origin in (typing.Union, UnionType):
        read = [_read(word, part) for part in typing.get_args(kind)]
        return next((value for value in read if not isinstance(value, str)), word)
    if kind is bool:
        return BOOLEANS.get(word.lower(), word)
    if kind is NoneType:
        return None if word.lower() == "none" else word
    if kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            return word
    return Path(word) if kind is Path else word
