import json
from pathlib import Path

import pytest
import tokenizers
from data import foreign
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from hybridpar.data.tokenizer import BERT_TOKENS, END, Tokenizer, train_tokenizer
from hybridpar.errors import ConfigError, DataError

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "class Adder:\n    def __init__(self):\n        self.sum = 0\n",
] * 20


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300, "bert")


def test_training_is_deterministic_and_saved_whole(trained, tmp_path):
    assert train_tokenizer(iter(TEXTS), 300, "bert").to_json() == trained.to_json()
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.vocab_size == 300
    assert loaded.encode(TEXTS[0]).tolist() == trained.encode(TEXTS[0]).tolist()


def test_a_word_without_end_is_learned_from_in_parts():
    made = train_tokenizer(["a" * 1_000_000], 300)  # whole, it takes minutes
    assert made.encode("a" * 4096).tolist() == [made.vocabulary["a" * 4096]]
    assert made.decode(made.encode(text := "a" * 10_001)) == text
    pre_tokenizer = json.loads(made.to_json())["pre_tokenizer"]
    assert pre_tokenizer["type"] == "ByteLevel", "other texts are cut as before"


def test_special_tokens(trained):
    assert [trained.special(name) for name in (END, *BERT_TOKENS)] == [0, 1, 2, 3, 4]
    assert trained.bert().special == (0, 1, 2, 3, 4)
    with pytest.raises(DataError, match=r"no token \[PAD\]"):
        train_tokenizer(TEXTS, 300, "gpt").bert()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_special_tokens_in_a_text_are_text(trained):
    ids = trained.encode(f"a{END}b[MASK]")
    assert ids.min() > 4
    assert trained.decode(ids) == f"a{END}b[MASK]"


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize(
    "made", [foreign.llama, lambda: foreign.llama("first"), foreign.llama_3, foreign.unigram]
)
@pytest.mark.parametrize("text", ["", "The cat", " sat.\n", "  two", "é 漢字\n\nend"])
def test_prompts_are_those_of_transformers(made, text):
    inner = made()
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=inner)
    assert (
        Tokenizer(tokenizers.Tokenizer.from_str(inner.to_str())).encode_prompt(text)
        == theirs(text).input_ids
    )


@pytest.mark.parametrize(
    ("template", "begin", "finish"),
    [("<s> $A", [1], [2]), ("<s> $A </s>", [1], [2]), ("$A <unk>", [], [0, 2]), ("$A", [], [2])],
)
def test_a_document_has_what_its_tokenizer_adds_and_one_end(template, begin, finish):
    made = foreign.llama()
    special = [(word, made.token_to_id(word)) for word in ("<unk>", "<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=special
    )
    frame = Tokenizer(made).document_frame
    assert [part.tolist() for part in frame] == [begin, finish]


def test_words_need_no_post_processor_and_no_unknown_word():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({END: 0, "w1": 1, "w2": 2}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert Tokenizer(words).encode_prompt("w2 w1") == [2, 1]
    with pytest.raises(DataError, match=r"cannot encode a text .*needs an id for any text"):
        Tokenizer(words).encode_prompt("w2 other")


def test_ids_that_no_token_has():
    words = {"[PAD]": 1, "[CLS]": 2, "[SEP]": 4, "[MASK]": 5, "a": 7, "b": 11}
    made = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a")))
    assert made.vocab_size == 12
    assert made.holes.tolist() == [0, 3, 6, 8, 9, 10]
    assert made.bert().special == (0, 1, 2, 3, 4, 5, 6, 8, 9, 10)


def test_files_of_another_name_have_none_beside_them(trained, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    trained.save(tmp_path / "mine.json")
    assert Tokenizer.load(tmp_path / "mine.json").end == trained.end == 0
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.end, loaded.fingerprint == trained.fingerprint) == (1, False)
    assert loaded.files()["tokenizer_config.json"] == '{"eos_token": "[PAD]"}'


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_too_small_a_vocabulary(kind):
    with pytest.raises(ConfigError, match=r"vocab_size = 256: must be at least 2\d\d: .* try 512"):
        train_tokenizer(TEXTS, 256, kind)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"model": 3}', '{"version": "1.0", "model": {}}']
)
def test_damaged_file(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        Tokenizer.load(path)


def test_damaged_in_the_middle(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    whole = trained.to_json()
    document = json.loads(whole)
    document["model"]["merges"][5] = ["nothing", "known"]
    for text in (whole[: len(whole) // 2], json.dumps(document)):
        path.write_text(text)
        with pytest.raises(DataError):
            Tokenizer.load(path)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(DataError):
        Tokenizer.load(path)
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {"type": "Split", "pattern": {"Regex": "(a+)+$b"}, "behavior": "Isolated", "invert": False},
        {"type": "FixedLength", "length": 0},
    ],
    ids=["searches without end", "no length"],
)
def test_a_tokenizer_that_panics_is_an_error(
    tmp_path: Path, pre_tokenizer: dict[str, object]
) -> None:
    """A panic in Rust is no Exception of Python."""
    document = json.loads(train_tokenizer(["some text"], 300).to_json()) | {
        "pre_tokenizer": pre_tokenizer
    }
    (tmp_path / "made.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.load(tmp_path / "made.json")
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(DataError, match=r"made\.json: cannot encode a text"):
            encode("a" * 60)
