"""Tokenizers of folders from elsewhere: ids, special tokens and chat template are those of
transformers, also back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoint.exchange import OURS, make_theirs, save_ours
from data import foreign
from tokenizers import normalizers, pre_tokenizers
from train.runs import write_config

from hybridpar.checkpoint.huggingface import export_folder, import_folder
from hybridpar.checkpoint.huggingface.tokens import tokenizer_of
from hybridpar.cli import main
from hybridpar.config import ModelConfig
from hybridpar.data import Tokenizer, train_tokenizer
from hybridpar.data.tokenizer import END
from hybridpar.errors import DataError

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
ODD_TEXTS = [
    "",
    "Stones",
    "a river",
    " two  spaces ",
    "ÉCOLE Café",
    "cafe\u0301",
    "漢字 stone",
    "a\u2028b\x0bc\x85d",
    "It's\ta\r\nstone.",
    "\u200d\ufeff",
    "STONE İ",
    "don't  river!",
]
BERT_WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "stone",
    "##s",
    "a",
    "river",
    "A",
    "caf",
    "##e",
    "##é",
    "cafe",
    "école",
    "ecole",
    "É",
    "##COLE",
    "漢",
    "字",
    "漢字",
    "##字",
    "two",
    "two",
    "spaces",
    "it",
    "'",
    "don",
    "##t",
    "t",
    "!",
    "i",
    "\u2028",
    "b",
]
BERT, GPT = ModelConfig(kind="bert", vocab_size=512), ModelConfig(vocab_size=1024)


def write(folder: Path, name: str, plain: object) -> None:
    (folder / name).write_text(
        plain if isinstance(plain, str) else json.dumps(plain), encoding="utf-8"
    )


def same_ids(folder: Path, model: ModelConfig) -> Tokenizer:
    """Ours of a folder has the ids of theirs, without and with what is put around a text."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = tokenizer_of(folder, model)
    assert ours is not None
    for text in ODD_TEXTS:
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"], (
            text
        )
        begin, finish = ours.frame
        assert [*begin, *ours.encode(text).tolist(), *finish] == theirs(text)["input_ids"], text
    return ours


# -- settings

BERT_SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
    {"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": True},
    {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
]


@pytest.mark.parametrize("settings", BERT_SETTINGS, ids=str)
def test_settings_of_an_older_bert(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A word that is there twice has the last number, and the first is a hole."""
    write(tmp_path, "config.json", {"model_type": "bert", "vocab_size": 512})
    write(tmp_path, "vocab.txt", "\n".join(BERT_WORDS) + "\n")
    write(tmp_path, "tokenizer_config.json", settings)
    ours = same_ids(tmp_path, BERT)
    assert ours.holes.tolist() == [BERT_WORDS.index("two")]
    assert BERT_WORDS.index("two") in ours.bert().special


@pytest.mark.parametrize("settings", BERT_SETTINGS, ids=str)
@pytest.mark.parametrize("lowercase", [True, False])
def test_settings_beside_a_berts_tokenizer_json(
    tmp_path: Path, settings: dict[str, Any], lowercase: bool
) -> None:
    write(tmp_path, "config.json", {"model_type": "bert", "vocab_size": 512})
    (tmp_path / "vocab").mkdir()
    write(tmp_path / "vocab", "vocab.txt", "\n".join(dict.fromkeys(BERT_WORDS)) + "\n")
    made = tokenizer_of(tmp_path / "vocab", BERT)
    assert made is not None
    inner = tokenizers.Tokenizer.from_str(made.to_json())
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    inner.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **settings})
    same_ids(tmp_path, BERT)


def gpt2_files(folder: Path) -> tokenizers.Tokenizer:
    """vocab.json and merges.txt; the tokenizer of which they are."""
    inner = tokenizers.Tokenizer.from_str(
        train_tokenizer([*ODD_TEXTS * 9, "stones river"], 400).to_json()
    )
    plain = json.loads(inner.to_str())["model"]
    write(folder, "config.json", {"model_type": "gpt2", "vocab_size": 1024})
    write(folder, "vocab.json", plain["vocab"])
    write(
        folder,
        "merges.txt",
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in plain["merges"]) + "\n",
    )
    return inner


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_prefix_space": True},
        {"add_bos_token": True, "bos_token": "<|endoftext|>"},
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|user|>"},
    ],
    ids=str,
)
def test_settings_of_an_older_gpt2(tmp_path: Path, settings: dict[str, Any]) -> None:
    inner = gpt2_files(tmp_path)
    write(tmp_path, "tokenizer_config.json", settings)
    write(
        tmp_path,
        "added_tokens.json",
        {"<|user|>": inner.get_vocab_size(), "<tool>": inner.get_vocab_size() + 1},
    )
    write(
        tmp_path,
        "special_tokens_map.json",
        {
            "pad_token": {
                "content": "<|user|>",
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
                "normalized": False,
            }
        },
    )
    ours = same_ids(tmp_path, GPT)
    assert ours.special("[PAD]") == inner.get_vocab_size()
    assert ours.encode("a <tool>").tolist()[-1] == inner.get_vocab_size() + 1, (
        "a word of its own in a text, too"
    )
    assert ours.word(ours.special(END)) == settings.get("eos_token", END)


@pytest.mark.parametrize("wanted", [True, False])
def test_add_prefix_space_beside_a_tokenizer_json(tmp_path: Path, wanted: bool) -> None:
    inner = gpt2_files(tmp_path)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not wanted)  # type: ignore[assignment]
    inner.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        "tokenizer_config.json",
        {"add_prefix_space": wanted, "tokenizer_class": "GPT2Tokenizer"},
    )
    ours = same_ids(tmp_path, GPT)
    assert ours.decode(ours.encode("river")).startswith(" ") is wanted


def sequence(add_prefix_space: bool) -> tokenizers.Tokenizer:
    inner = foreign.llama_3()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [  # type: ignore[assignment]
            pre_tokenizers.Digits(),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        ]
    )
    return inner


@pytest.mark.parametrize(
    ("made", "settings", "says"),
    [
        (
            foreign.llama,
            {"add_prefix_space": False},
            "add_prefix_space = False: conflicts with tokenizer.json, which puts a space before "
            "a text",
        ),
        (lambda: foreign.llama("first"), {"add_prefix_space": False}, "add_prefix_space = False"),
        (
            lambda: foreign.llama("never"),
            {"add_prefix_space": True},
            "add_prefix_space = True: .* puts no space",
        ),
        (
            lambda: sequence(False),
            {"add_prefix_space": True},
            r"add_prefix_space = True: .*set it to false",
        ),
        (
            foreign.llama,
            {"add_prefix_space": "yes"},
            "add_prefix_space = 'yes': must be true or false",
        ),
        (
            foreign.llama_3,
            {"do_lower_case": True},
            "do_lower_case = True: conflicts with the normalizer of tokenizer.json",
        ),
        (foreign.unigram, {"strip_accents": True}, "strip_accents = True"),
        (foreign.word_piece, {"strip_accents": 1}, "strip_accents = 1: must be true or false"),
        (foreign.llama, {"eos_token": ["</s>"]}, "eos_token = .*must be a token"),
        (foreign.llama, {"added_tokens_decoder": {"5": "</s>"}}, "added_tokens_decoder has '5'"),
        (
            foreign.llama,
            {"added_tokens_decoder": {"9": {"content": "</s>"}}},
            r"</s> = 9: does not match the tokenizer, which gives it the id 2",
        ),
        (foreign.llama, {"added_tokens_decoder": []}, "added_tokens_decoder"),
    ],
)
def test_settings_that_a_tokenizer_cannot_have_are_named(
    tmp_path: Path, made: Callable[[], tokenizers.Tokenizer], settings: dict[str, Any], says: str
) -> None:
    made().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", settings)
    with pytest.raises(DataError, match=rf"tokenizer_config\.json: {says}"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (foreign.llama, {"add_prefix_space": True, "do_lower_case": False}),
        (foreign.llama, {"add_prefix_space": None}),
        (lambda: foreign.llama("never"), {"add_prefix_space": False}),
        (lambda: sequence(True), {"add_prefix_space": True}),
        (
            foreign.word_piece,
            {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
        ),
        (foreign.llama, {"eos_token": None, "bos_token": "", "pad_token": {"content": "<unk>"}}),
    ],
)
def test_settings_that_change_nothing(
    tmp_path: Path, made: Callable[[], tokenizers.Tokenizer], settings: dict[str, Any]
) -> None:
    made().save(str(tmp_path / "tokenizer.json"))
    before = Tokenizer.load(tmp_path / "tokenizer.json")
    write(tmp_path, "tokenizer_config.json", settings)
    assert Tokenizer.load(tmp_path / "tokenizer.json").to_json() == before.to_json()


@pytest.mark.parametrize(
    ("name", "plain", "says"),
    [
        (
            "added_tokens.json",
            {"<new>": 701},
            r"added_tokens\.json: <new> = 701: does not match the tokenizer, which gives it the "
            r"id 7\d\d|"
            r"<new> = 701: .* gives it the id \d+",
        ),
        (
            "added_tokens.json",
            {"<new>": "7"},
            r"added_tokens\.json: '<new>' = '7': must be a text and its id",
        ),
        (
            "generation_config.json",
            {"eos_token_id": "2"},
            r"generation_config\.json: eos_token_id = '2': must be an id",
        ),
        (
            "config.json",
            {"eos_token_id": [True]},
            r"config\.json: eos_token_id = \[True\]: must be an id",
        ),
        ("generation_config.json", "{", r"generation_config\.json: is not valid JSON"),
        (
            "special_tokens_map.json",
            [],
            r"special_tokens_map\.json: must be a JSON object, not a list",
        ),
    ],
)
def test_damaged_files_beside_a_tokenizer(
    tmp_path: Path, name: str, plain: object, says: str
) -> None:
    made = foreign.llama()
    made.save(str(tmp_path / "tokenizer.json"))
    if isinstance(plain, dict) and plain.get("<new>") == 701:
        plain = {"<new>": made.get_vocab_size() + 1}
        says = (
            rf"added_tokens\.json: <new> = {made.get_vocab_size() + 1}: does not match the "
            rf"tokenizer, which gives it the id"
        )
    write(tmp_path, name, plain)
    with pytest.raises(DataError, match=says):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_older_files_of_another_class_are_refused(tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(
        DataError,
        match=r"tokenizer_class = 'Qwen2Tokenizer': must be GPT2",
    ):
        tokenizer_of(tmp_path, GPT)
    write(tmp_path, "vocab.txt", "\n".join(BERT_WORDS))
    write(tmp_path, "tokenizer_config.json", {"do_basic_tokenize": False})
    with pytest.raises(DataError, match=r"do_basic_tokenize = False: not supported"):
        tokenizer_of(tmp_path, BERT)


# -- special tokens


@pytest.mark.parametrize(
    ("files", "eos", "ends"),
    [
        ({}, 2, {2}),
        ({"config.json": {"eos_token_id": 5}}, 5, {5}),
        (
            {
                "config.json": {"eos_token_id": 5},
                "generation_config.json": {"eos_token_id": [7, 6]},
            },
            7,
            {6, 7},
        ),
        (
            {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": None}},
            2,
            {2},
        ),
        ({"config.json": {"eos_token_id": 10**6}}, 2, {2}),  # as of a model with another tokenizer
        ({"config.json": {"eos_token_id": -1}}, 2, {2}),
        (
            {
                "generation_config.json": {"eos_token_id": [7, 6]},
                "tokenizer_config.json": {"eos_token": "<0x01>"},
            },
            4,
            {4, 6, 7},
        ),
        (
            {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "<0x01>"}}},
            4,
            {4},
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<0x01>"},
                "special_tokens_map.json": {"eos_token": "<0x02>"},
            },
            5,
            {5},
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<0x01>", "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": "<0x02>"},
            },
            4,
            {4},
        ),
    ],
)
def test_the_folders_own_end_of_text(
    tmp_path: Path, files: dict[str, Any], eos: int, ends: set[int]
) -> None:
    foreign.llama().save(str(tmp_path / "tokenizer.json"))  # <unk> <s> </s> <0x00> <0x01> ..
    for name, plain in files.items():
        write(tmp_path, name, plain)
    made = Tokenizer.load(tmp_path / "tokenizer.json")
    assert made.special(END) == eos
    assert made.ends == ends
    assert made.document_frame[1].tolist() == [eos]
    (tmp_path / "copy").mkdir()
    made.save(tmp_path / "copy" / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "copy" / "tokenizer.json")
    assert (again.special(END), again.ends, again.fingerprint) == (eos, ends, made.fingerprint)
    plain = Tokenizer(foreign.llama())
    assert (made.fingerprint == plain.fingerprint) is (eos == 2)
    if "tokenizer_config.json" in files:
        write(tmp_path, "config.json", {"model_type": "llama"})
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
            tmp_path, local_files_only=True
        )
        assert theirs.eos_token_id == eos


def test_an_end_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    foreign.llama().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    with pytest.raises(
        DataError, match=r"tokenizer_config\.json: eos_token = '<\|im_end\|>': .* has no such token"
    ):
        Tokenizer.load(tmp_path / "tokenizer.json").special(END)


# -- what leaves with an export

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHORT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "a stone?"}, {"role": "assistant", "content": "a river"}]
FORMS: dict[str, dict[str, Any]] = {
    "in the settings": {"tokenizer_config.json": {"chat_template": TEMPLATE}},
    "a file": {"chat_template.jinja": TEMPLATE},
    "several": {"chat_template.jinja": TEMPLATE, "additional_chat_templates/short.jinja": SHORT},
    "a list": {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": TEMPLATE}]}
    },
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("form", FORMS)
def test_the_chat_template_and_the_roles_leave_as_they_came(tmp_path: Path, form: str) -> None:
    """Through an import, a run that goes on from it, and an export."""
    theirs = make_theirs(tmp_path / "theirs", "llama", vocab_size=320, **SIZES)
    inner = tokenizers.Tokenizer.from_str(train_tokenizer(["a stone? a river"], 280).to_json())
    inner.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"])
    inner.save(str(theirs / "tokenizer.json"))
    files: dict[str, Any] = dict(FORMS[form])
    files["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "bos_token": "<|endoftext|>",
        **files.get("tokenizer_config.json", {}),
    }
    ends = [inner.token_to_id("<|end|>"), inner.token_to_id("<|endoftext|>")]
    files["generation_config.json"] = {"eos_token_id": ends, "temperature": 0.6, "do_sample": True}
    for name, plain in files.items():
        (theirs / name).parent.mkdir(exist_ok=True)
        write(theirs, name, plain)
    assert main(["import", str(theirs), str(tmp_path / "ours")]) == 0
    write_config(tmp_path)
    assert (
        main(
            [
                "train",
                str(tmp_path / "ours" / "config.toml"),
                "--data.corpus",
                str(tmp_path / "corpus.txt"),
                "--run.dir",
                str(tmp_path / "runs"),
                "--data.split",
                "0.2",
                "--train.num_steps",
                "1",
                "--train.device",
                "cpu",
                "--train.threads",
                "1",
                "--json",
            ]
        )
        == 0
    )
    made = export_folder(tmp_path / "runs" / "ours-trained", tmp_path / "back")
    for name in files:
        assert (made.folder / name).read_bytes() == (theirs / name).read_bytes(), name
    before, after = (
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for folder in (theirs, made.folder)
    )
    for options in (
        {},
        {"add_generation_prompt": True},
        *([{"chat_template": "short"}] if form == "several" else []),
    ):
        text = before.apply_chat_template(CHAT, tokenize=False, **options)
        assert after.apply_chat_template(CHAT, tokenize=False, **options) == text
        assert "<|user|>a stone?" in text
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.special_tokens_map == before.special_tokens_map
    model = transformers.AutoModelForCausalLM.from_pretrained(made.folder, local_files_only=True)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == ends
    assert model.config.pad_token_id == inner.token_to_id("<|pad|>")


def test_a_tokenizer_of_ours_leaves_with_its_roles(tmp_path: Path) -> None:
    save_ours(tmp_path / "run" / "checkpoints", OURS["llama"])
    foreign_words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "x": 2}, "x")
    )
    foreign_words.save(str(tmp_path / "run" / "tokenizer.json"))
    made = export_folder(tmp_path / "run", tmp_path / "theirs")
    loaded = transformers.AutoTokenizer.from_pretrained(made.folder, local_files_only=True)
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    import_folder(made.folder, tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again" / "tokenizer.json").ends == {1}
