"""Text as a stream: documents in parts, cut where a tokenizer would divide them anyway, so that
memory does not grow.

    parts     .. The cat sat o | n the mat. It was ..     as they were read
    pieces    .. The cat       |  sat on the mat. ..      encoded, each behind some text before it

A piece is encoded behind its context, whose ids are left out: what a tokenizer does at the start of
a text (a "▁", a space) happens at the start of a document alone. A cut is before white space, else
at the edge of a word, and is made only where the tokenizer divides the text around it: the ids of
what is before it are the first ids of both sides together. Byte-level tokenizers divide before
white space everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

PART = 1 << 20
"""Characters, or bytes of a file, that are read at a time."""
_PIECE = 1 << 17
_AROUND = 128
"""Characters on each side of a cut that the tokenizer is asked about."""
_LONGEST = 1 << 22
"""Most characters without a place to cut, such as four million letters without a space; after
these a cut is made anywhere."""
_TRIES = 32
_PLACES = (re.compile(r"(?<=\S)(?=\s)"), re.compile(r"\b"))
_INSIDE_WORD = re.compile(r"(?<=\w)(?=\w)")
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]*[A-Z])")


class Ends(IntEnum):
    """Kind of end after a part of a text."""

    NOTHING = 0
    SEQUENCE = 1
    DOCUMENT = 2


class Part(NamedTuple):
    """Text of a document, which the next part continues unless this one ends the document."""

    text: str
    ends: Ends


class Piece(NamedTuple):
    """Text that is encoded at once."""

    context: str
    """Text before it that is encoded with it."""
    num_known: int
    """Number of ids of the context."""
    text: str
    ends: Ends


NumIds = Callable[[str, str], int | None]
"""Function of two adjacent texts: the number of ids of the first if the tokenizer divides them
there, else None."""


def in_parts(text: str) -> Iterator[Part]:
    """Yield a document of any length in parts of limited length."""
    last = max((len(text) - 1) // PART * PART, 0)
    for start in range(0, last, PART):
        yield Part(text[start : start + PART], Ends.NOTHING)
    yield Part(text[last:], Ends.DOCUMENT)


def pieces(parts: Iterable[Part], num_ids: NumIds = lambda before, after: 0) -> Iterator[Piece]:
    """Join the parts and cut them into pieces; without `num_ids`, where a byte-level tokenizer
    divides text."""
    context = ""
    num_known = 0
    rest = ""
    for text, ends in parts:
        rest += text
        while len(rest) > _PIECE + _AROUND:
            cut, found = _find_cut(context, rest, num_ids)
            if not cut and len(rest) < _LONGEST:
                break
            cut = cut or _PIECE
            yield Piece(context, num_known, rest[:cut], Ends.NOTHING)
            context = (context + rest[max(cut - _AROUND, 0) : cut])[-_AROUND:] if found else ""
            num_known = found
            rest = rest[cut:]
        if ends:
            yield Piece(context, num_known, rest, ends)
            context = ""
            num_known = 0
            rest = ""


def _find_cut(context: str, rest: str, num_ids: NumIds) -> tuple[int, int]:
    """Return the first place to cut after a piece's length, and how many ids the text before it
    has; zeros if there is none."""
    for pattern in _PLACES:
        for match in islice(pattern.finditer(rest, _PIECE, len(rest) - _AROUND), _TRIES):
            cut = match.start()
            before = (context + rest[max(cut - _AROUND, 0) : cut])[-_AROUND:]
            if (found := num_ids(before, rest[cut : cut + _AROUND])) is not None:
                return cut, found
    return 0, 0


def sentences(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the lines of documents, cut further at the ends of sentences, as sequences; blank
    lines are left out."""
    rest = ""
    for text, ends in parts:
        rest += text
        lines = rest.splitlines(keepends=True)
        rest = "" if ends or not lines else lines.pop()
        for line in lines:
            yield from (
                Part(sentence, Ends.SEQUENCE)
                for sentence in _SENTENCE_END.split(line.strip())
                if sentence
            )
        if len(rest) > _LONGEST:  # of one line
            *whole, rest = _SENTENCE_END.split(rest.lstrip())
            yield from (Part(sentence, Ends.SEQUENCE) for sentence in whole if sentence)
            if len(rest) > _LONGEST and (found := _INSIDE_WORD.search(rest, _LONGEST - _AROUND)):
                yield Part(rest[: found.start()], Ends.NOTHING)
                rest = rest[found.start() :]
        if ends:
            yield Part("", Ends.DOCUMENT)
