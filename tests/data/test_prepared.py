import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from data import foreign
from data.documents import add_document

from hybridpar.data import prepared as module
from hybridpar.data.files import pieces
from hybridpar.data.files.indexed import IndexedWriter
from hybridpar.data.prepared import (
    CorpusOptions,
    check_vocab,
    open_prepared,
    prepare,
    prepare_tokenizer,
)
from hybridpar.data.tokenizer import END, Tokenizer, train_tokenizer
from hybridpar.errors import ConfigError, DataError

BERT = CorpusOptions("bert")
TEXTS = [
    f"def function_{i}(a, b):\n    return a + b * {i}\n\n\nprint('One. Two! Three?')\n"
    for i in range(40)
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def test_gpt_documents_come_back_and_end_with_end_of_text(corpus, tmp_path):
    prepared = prepare(corpus, tmp_path / "cache", 400, quiet=True)
    tokenizer = prepared.tokenizer()
    indexed = prepared.open()
    assert indexed.num_documents == len(indexed) == prepared.num_documents == len(TEXTS)
    end = tokenizer.special(END)
    for text, ids in zip(TEXTS, indexed, strict=True):
        assert ids[-1] == end
        assert end not in ids[:-1]
        assert tokenizer.decode(ids[:-1]) == text
    assert prepared.num_tokens == indexed.num_tokens
    assert (prepared.kind, prepared.vocab_size) == ("gpt", tokenizer.vocab_size)
    assert prepared.fingerprint == indexed.fingerprint


def test_bert_sequences_are_sentences(corpus, tmp_path):
    prepared = prepare(corpus, tmp_path / "cache", 400, options=BERT, quiet=True)
    tokenizer = prepared.tokenizer()
    indexed = prepared.open()
    found = [tokenizer.decode(ids) for ids in indexed]
    assert found == [
        line
        for i in range(40)
        for line in (
            f"def function_{i}(a, b):",
            f"return a + b * {i}",
            "print('One.",
            "Two!",
            "Three?')",
        )
    ]
    assert np.diff(indexed.documents).tolist() == [5] * len(TEXTS)
    assert indexed.tokens.min() > 4  # no special ones


def test_documents_have_what_their_tokenizer_puts_around_a_text(corpus, tmp_path, monkeypatch):
    made = foreign.llama()
    made.save(str(tmp_path / "llama.json"))
    monkeypatch.setattr(pieces, "_PIECE", 20)
    monkeypatch.setattr(pieces, "_AROUND", 10)
    prepared = prepare(
        corpus, tmp_path / "cache", 700, tokenizer=tmp_path / "llama.json", quiet=True
    )
    for text, ids in zip(TEXTS, prepared.open(), strict=True):
        assert ids.tolist() == [*made.encode(text).ids, Tokenizer(made).special(END)]
        assert Tokenizer(made).decode(ids[1:-1]) == text


def test_a_second_call_finds_the_result(corpus, tmp_path, monkeypatch):
    first = prepare([corpus], tmp_path / "cache", 400, quiet=True)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    assert prepare(str(corpus), tmp_path / "cache", 400, quiet=True) == first


def test_other_inputs_give_another_result(corpus, tmp_path):
    def folder(vocab_size=400, **inputs):
        cache = tmp_path / "cache"
        return prepare(corpus, cache, vocab_size, quiet=True, **inputs).prefix.parent

    folders = [
        folder(),
        folder(vocab_size=300),
        folder(options=BERT),
        folder(options=CorpusOptions(max_bytes=1000)),
    ]
    folders.append(folder(tokenizer=folders[1] / "tokenizer.json"))
    corpus.write_text(corpus.read_text() + "\n")
    folders.append(folder())
    assert len(set(folders)) == 6
    assert not list((tmp_path / "cache").glob(".*-*-*"))  # nothing half done is left


def test_a_given_tokenizer_is_used(corpus, tmp_path):
    tokenizer = train_tokenizer(["nothing alike"], 300)
    tokenizer.save(tmp_path / "mine.json")
    prepared = prepare(
        corpus, tmp_path / "cache", 300, tokenizer=tmp_path / "mine.json", quiet=True
    )
    assert prepared.tokenizer().fingerprint == tokenizer.fingerprint
    with pytest.raises(DataError, match=r"mine\.json: has no token \[PAD\]"):
        prepare(
            corpus,
            tmp_path / "cache",
            300,
            options=BERT,
            tokenizer=tmp_path / "mine.json",
            quiet=True,
        )
    with pytest.raises(
        ConfigError,
        match=r"vocab_size = 100: must be above 26., the highest id of the tokenizer "
        r".*mine\.json; try 320",
    ):
        prepare(corpus, tmp_path / "cache", 100, tokenizer=tmp_path / "mine.json", quiet=True)


def _prepare_slowly(corpus, folder, barrier, lock):
    if not lock:
        module.fcntl = None
    real = module._encode
    module._encode = lambda *args: (time.sleep(0.2), real(*args))
    barrier.wait()
    prepare(corpus, folder, 400, quiet=True)


@pytest.mark.parametrize("lock", [True, False])
def test_processes_at_the_same_time(corpus, tmp_path, lock):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    args = (corpus, tmp_path / "cache", barrier, lock)
    workers = [context.Process(target=_prepare_slowly, args=args) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
        assert worker.exitcode == 0
    visible = [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]
    assert len(visible) == 1
    assert prepare(corpus, tmp_path / "cache", 400, quiet=True).num_documents == len(TEXTS)


def test_a_failure_leaves_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(corpus, tmp_path / "cache", 400, quiet=True)
    assert all(p.name.endswith(".lock") for p in (tmp_path / "cache").iterdir())


def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        DataError, match=r"file.x: cannot be written \(Not a directory\); name another folder"
    ):
        prepare(corpus, tmp_path / "file" / "x", 300, quiet=True)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexedWriter, "add", full)
    with pytest.raises(DataError, match=r"out: cannot be written \(No space left on device\)"):
        prepare(corpus, tmp_path / "out", 300, quiet=True)
    assert all(path.suffix == ".lock" for path in (tmp_path / "out").iterdir())


def test_progress_goes_to_stderr(corpus, tmp_path, capsys):
    prepare(corpus, tmp_path / "cache", 400)
    out, err = capsys.readouterr()
    assert (out, "encoding" in err) == ("", True)
    prepare(corpus, tmp_path / "other", 400, quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("fingerprint"),
        lambda m: m.update(num_tokens=1),
        lambda m: m.update(vocab_size="many"),
        None,
    ],
)
def test_damaged_results_are_found(corpus, tmp_path, change):
    prepared = prepare(corpus, tmp_path / "cache", 400, quiet=True)
    if change is None:
        tokens = bytearray(prepared.prefix.with_suffix(".bin").read_bytes())
        tokens[100] ^= 1
        prepared.prefix.with_suffix(".bin").write_bytes(tokens)
    else:
        path = prepared.prefix.with_name("manifest.json")
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json: .*; delete the folder"):
        prepare(corpus, tmp_path / "cache", 400, quiet=True)


def test_files_from_elsewhere(tmp_path):
    with IndexedWriter(tmp_path / "theirs_text_document", "<u2") as writer:
        add_document(writer, [4, 511, 3])
    prepared = open_prepared(tmp_path / "theirs_text_document")
    assert (prepared.kind, prepared.vocab_size, prepared.num_tokens) == ("", 512, 3)
    check_vocab(prepared, 512)
    with pytest.raises(
        ConfigError,
        match=r"model\.vocab_size = 511: must be above 511, the highest id of the corpus .*; "
        r"try 512",
    ):
        check_vocab(prepared, 511)
    with pytest.raises(DataError, match=r"data\.tokenizer"):
        prepared.tokenizer()


def test_one_tokenizer_for_several_corpora(corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("something else entirely " * 100)
    path = prepare_tokenizer([corpus, other], tmp_path / "cache", 400, quiet=True)
    assert path == prepare_tokenizer([corpus, other], tmp_path / "cache", 400, quiet=True)
    assert {
        len(
            prepare(c, tmp_path / "cache", 400, tokenizer=path, quiet=True)
            .tokenizer()
            .encode(" entirely")
        )
        for c in (corpus, other)
    } == {1}


def test_an_error_of_another_file_is_not_the_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"), module._lock(tmp_path / "out", "tokens"):
        (tmp_path / "absent").open()


KILLED = """
import os, sys
import hybridpar.data.prepared as prepared
real = getattr(prepared, sys.argv[3])
def killed(*args):
    if sys.argv[3] == "_opened":
        real(*args)
    os.kill(os.getpid(), 9)
setattr(prepared, sys.argv[3], killed)
prepared.prepare(sys.argv[1], sys.argv[2], 400, quiet=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["_train", "_encode", "_opened"])
def test_the_next_call_removes_what_a_killed_one_left(corpus, tmp_path, where):
    """Also one for another vocabulary."""
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", KILLED, corpus, cache, where], timeout=200)
    assert done.returncode == -signal.SIGKILL
    assert len([path for path in cache.iterdir() if path.name.startswith(".preparing.")]) == 1
    prepared = prepare(corpus, cache, 300, quiet=True)
    assert sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock")) == [
        prepared.prefix.parent.name
    ]
