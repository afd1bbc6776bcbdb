"""Texts in pieces: nothing is lost, the ids are those of the whole text, and memory does not grow
with the text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from data import foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.data.files import pieces as module
from hybridpar.data.files.pieces import Ends, Part, in_parts, pieces, sentences
from hybridpar.data.tokenizer import Tokenizer, train_tokenizer


@pytest.mark.parametrize(
    "made",
    [
        lambda: train_tokenizer(foreign.TEXT, 400)._inner,
        foreign.llama,
        lambda: foreign.llama("first"),
        lambda: foreign.llama("always"),
        foreign.llama_3,
        foreign.unigram,
        foreign.word_piece,
    ],
    ids=[
        "ours",
        "llama",
        "metaspace first",
        "metaspace always",
        "llama 3",
        "unigram",
        "word piece",
    ],
)
def test_ids_of_pieces_are_those_of_the_whole_text(made, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = made()
    random = Random(1)
    tokenizer = Tokenizer(inner)
    text = "".join(random.choice(foreign.WORDS) for _ in range(400))
    whole = inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == whole
    monkeypatch.setattr(module, "_AROUND", 40)
    for size in (1, 2, 5, 17, 60):
        monkeypatch.setattr(module, "_PIECE", size)
        assert len(list(pieces(in_parts(text), tokenizer._num_ids))) > 5
        assert tokenizer.encode(text).tolist() == whole


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=30), st.booleans())), st.integers(1, 20), st.booleans())
def test_pieces_join_to_the_documents(
    found: list[tuple[str, bool]], size: int, allows: bool
) -> None:
    parts = [Part(text, Ends.DOCUMENT if ends else Ends.NOTHING) for text, ends in found] + [
        Part("", Ends.DOCUMENT)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", size)
        patch.setattr(module, "_AROUND", 4)
        patch.setattr(module, "_LONGEST", 30)
        cut = list(pieces(parts, lambda before, after: 0 if allows else None))
    assert _documents(cut) == _documents(parts)
    assert all(len(piece.text) <= 30 + 30 + 4 for piece in cut)


def _documents(parts) -> list[str]:
    texts = [""]
    for part in parts:
        texts[-1] += part.text
        if part.ends:
            texts.append("")
    return texts


def _sentences(*texts: str, size: int = 1) -> list[list[str]]:
    """The sentences of documents that come in parts of so many characters."""
    parts = [
        Part(text[i : i + size], Ends.DOCUMENT if i + size >= len(text) else Ends.NOTHING)
        for text in texts
        for i in range(0, len(text), size)
    ]
    found = [[]]
    rest = ""
    for text, ends in sentences(parts):
        rest += text
        if ends and rest:
            found[-1].append(rest)
            rest = ""
        if ends is Ends.DOCUMENT:
            found.append([])
    return found[:-1]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_sentences(size: int) -> None:
    text = 'One is 1.5 long.  "Two!" (Three?) four\n\n   Five\r\n'
    assert _sentences(text, "Six.", " \n ", size=size) == [
        ["One is 1.5 long.", '"Two!"', "(Three?) four", "Five"],
        ["Six."],
        [],
    ]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["word", "a", " ", "  ", ". ", "! X", "Y", "é"]), max_size=60))
def test_sentences_of_a_long_line_are_cut_as_those_of_a_short_one(words: list[str]) -> None:
    text = "Begin" + "".join(words)
    whole = _sentences(text, size=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONGEST", 12)
        patch.setattr(module, "_AROUND", 4)
        assert _sentences(text, size=3) == whole


_PEAKS = """
import pathlib, sys
from hybridpar.data import CorpusOptions, prepare
kind, tokenizer, *texts = sys.argv[1:]
options = CorpusOptions(kind)
for text in texts:
    prepare(text, text + "-prepared", 300, tokenizer=tokenizer, options=options, quiet=True)
    print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak of its memory there"
)
@pytest.mark.parametrize(("kind", "name"), [("gpt", "text.txt"), ("bert", "text.txt")])
def test_a_long_document_takes_no_more_memory_than_a_short_one(
    tmp_path: Path, kind: str, name: str
) -> None:
    train_tokenizer(foreign.TEXT, 300, "bert").save(tmp_path / "tokenizer.json")
    paths = []
    for num_bytes in (1_500_000, 5_000_000):
        text = "One line of text, with some words in it.\n" * (num_bytes // 41)
        paths.append(tmp_path / f"{num_bytes}-{name}")
        paths[-1].write_text(text)
    command = [sys.executable, "-c", _PEAKS, kind, tmp_path / "tokenizer.json", *paths]
    done = subprocess.run(
        [str(word) for word in command],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"RAYON_NUM_THREADS": "2"},
    )
    short, long = map(int, done.stdout.split())
    # how much is in memory at a time depends on threads of the tokenizer; 3.5 MB more at once would
    # take some 150 MB
    assert long - short < 80_000
