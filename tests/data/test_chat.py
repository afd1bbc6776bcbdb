import json
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridpar.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from hybridpar.data import BatchLoader, open_data
from hybridpar.data.chat import ChatDataset, Conversations
from hybridpar.data.chat_template import ChatTemplate, marked_text, split_marks
from hybridpar.data.corpus import read_parts, source_files
from hybridpar.data.prepared import CorpusOptions, prepare
from hybridpar.data.tokenizer import END, Tokenizer, train_tokenizer
from hybridpar.errors import ConfigError, DataError
from hybridpar.validate import problems

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{%- for m in messages %}"
    "{{- '<|' + m.role + '|>' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + eos_token }}{% endgeneration %}"
    "{%- else %}{{- m.content }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
FORGETS = (  # drops what is before </think> in all answers but the last, as Qwen 3 does
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello, Zoë"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye ..."},
]


def template(text):
    return ChatTemplate(text, "the template", {"eos_token": END})


def answers(marked):
    text, spans = split_marks(marked)
    return [text[a:b] for a, b in spans]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with the tokens of ChatML."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer(["Hello there, and now? Bye .. user assistant\n"] * 4, 320)
    trained._inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    trained.save(folder / "tokenizer.json")
    settings = {"eos_token": "<|im_end|>", "pad_token": END, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def pair(prompt, answer):
    return {"prompt": prompt, "answer": answer}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CHATML, ["Hello, Zoë<|im_end|>\n", "Bye ...<|im_end|>\n"]),
        (MARKED, [f"Hello, Zoë{END}", f"Bye ...{END}"]),
    ],
)
def test_answers_are_what_the_template_marks_or_what_they_add(text, found):
    made = template(text)
    marked = marked_text({"messages": TURNS}, made)
    assert answers(marked) == found
    assert split_marks(marked)[0] == made.render(TURNS)


def test_a_template_whose_prefixes_change_is_refused_by_name():
    with pytest.raises(DataError, match=r"the template: writes .* before message 2 differently"):
        marked_text(
            {"messages": [{**m, "content": f"a</think>{m['content']}"} for m in TURNS]},
            template(FORGETS),
        )
    single = {"messages": TURNS[:2]}
    assert answers(marked_text(single, template(FORGETS))) == ["<assistant>Hello, Zoë"]


@pytest.mark.parametrize(
    ("text", "answer", "message"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "",
            "has nothing to learn: the temp",
        ),
        ("{{ messages[0].content }}", "b", "has nothing to learn"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.value }}<|end|>{% endfor %}",  # no such key
            "b c",
            "writes nothing of its answers",
        ),
        ("{{ messages[1].content }}{% generation %}<|end|>{% endgeneration %}", "b", "has nothing"),
        ("{% generation %}{% endgeneration %}", "b", "has nothing to learn"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}",
            "b",
            "a {% generation %} inside of another",
        ),
    ],
)
def test_a_conversation_without_text_of_answers_is_refused(text, answer, message):
    with pytest.raises(DataError, match=message):
        marked_text(pair("a", answer), template(text))


def test_a_call_of_a_tool_is_an_answer():
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    text = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    )
    found = answers(marked_text({"messages": turns}, template(text)))
    assert found == [f"<assistant>{json.dumps(calls)}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
            "writes more than 16,777,216 characters for one conversation; divide the conversation",
        ),
        ("{{ 'a' * 10000000000 }}", "a product has more than 16,777,216 elements"),
        ("{{ 3000000000 * [1] }}", "a product has more than 16,777,216 elements"),
        ("{{ 9 ** (9 ** 9) }}", "the exponent of a power must be at most 64; it is 387420489"),
    ],
)
def test_a_template_does_not_fill_the_memory(text, message):
    template = ChatTemplate(text, "large.jinja", {})
    with pytest.raises(DataError, match=f"large.jinja: .*{message}"):
        template.render([{"role": "user", "content": "Hi"}])
    assert ChatTemplate("{{ '=' * 3 }}{{ 2 ** 5 * 2 }}", "", {}).render([]) == "===64"


def test_templates_run_in_a_sandbox_without_a_clock():
    for text in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(DataError, match="refuses the conversation"):
            template(text).render(TURNS)
    clock = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}x"
    assert template(clock).render(TURNS) == "x"
    with pytest.raises(DataError, match="only two turns"):
        template("{{ raise_exception('only two turns') }}").render(TURNS)
    with pytest.raises(DataError, match="is not a valid chat template"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, '"messages", or "prompt" and "answer"; it has'),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "message 1 must have a role"),
        ({"messages": [TURNS[0]]}, "must have an answer"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "message 1 must have text"),
        ({"prompt": "a", "answer": "b", "response": "c"}, '"prompt" and "answer"'),
        ({"prompt": "a", "answer": None}, "answer must be text"),
        ({"messages": [{**TURNS[1], "role": "Assistant"}]}, "its roles are .Assistant."),
        ({"prompt": "a", "answer": "\ufdd0"}, r"U\+FDD0"),
        ([1], "is not an object"),
    ],
)
def test_a_record_without_a_conversation_is_named(record, message, tmp_path, tokenizer):
    source = write(tmp_path / "chat.jsonl", [pair("a", "b"), record])
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2 of JSON lines: .*{message}"):
        prepared(source, tmp_path, tokenizer)
    made = prepared(source, tmp_path, tokenizer, on_bad_record="skip")
    assert (made.num_documents, made.num_bad) == (1, 1)


def prepared(source, tmp_path, tokenizer, **options):
    chat = ChatTemplate.of(Tokenizer.load(tokenizer))
    return prepare(
        source,
        tmp_path / "cache",
        400,
        tokenizer=tokenizer,
        options=CorpusOptions(chat=chat, **options),
        quiet=True,
    )


def test_labels_are_the_answers_and_their_ends(tmp_path, tokenizer):
    loaded = Tokenizer.load(tokenizer)
    source = write(tmp_path / "chat.jsonl", [{"messages": TURNS}])
    made = prepared(source, tmp_path, tokenizer)
    dataset = ChatDataset(Conversations(made.open(), 200, (0, 1)), padding=7)
    batch = dataset.batch(np.zeros(1, np.int64), np.zeros(1, np.int64))
    tokens, labels = batch["tokens"][0], batch["labels"][0]
    text = ChatTemplate.of(loaded).render(TURNS)
    ids = loaded.encode_rendered([text])[0][0]
    assert tokens[: len(ids)].tolist() == ids.tolist()
    assert (tokens[len(ids) :] == 7).all()
    counts = labels != -100
    assert (labels[counts] == np.append(tokens[1:], 0)[counts]).all()
    assert loaded.decode(labels[counts]) == "Hello, Zoë<|im_end|>\nBye ...<|im_end|>\n"
    assert dataset.num_targets(np.zeros(1, np.int64), np.zeros(1, np.int64)) == counts.sum()
    for word in ("<|im_start|>", "<|im_end|>"):  # special tokens of the template are single ids
        assert (ids == loaded.vocabulary[word]).sum() == text.count(word)


def test_tables_hold_conversations_as_json_lines_do(tmp_path):
    """Parquet, Arrow, and rows that `datasets` selected; a null is a key that a record lacks."""
    records = [
        {"messages": TURNS, "source": "a"},
        pair("Hi", "Hello"),
        {"messages": [*TURNS[:3], {"role": "assistant", "content": "So", "name": "x"}]},
    ]
    message = pa.struct(dict.fromkeys(("role", "content", "name"), pa.string()))
    columns = {"messages": pa.list_(message)}
    columns |= dict.fromkeys(("source", "prompt", "answer"), pa.string())
    table = pa.table(
        {key: pa.array([one.get(key) for one in records], kind) for key, kind in columns.items()}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, rows in {"rows": table, "chosen": pa.table({"indices": [2, 0]})}.items():
        with pa.ipc.new_stream(saved / f"{name}.arrow", rows.schema) as writer:
            writer.write_table(rows, max_chunksize=2)
    state = {"_data_files": "rows", "_indices_data_files": "chosen"}
    names = {key: [{"filename": f"{name}.arrow"}] for key, name in state.items()}
    (saved / "state.json").write_text(json.dumps(names))
    shows = template("{% for m in messages %}{{ m | tojson }}{% endfor %}")

    def texts(source):
        files = source_files(source, "text")
        parts = read_parts(files, text_from=partial(marked_text, template=shows))
        return [part.text for part in parts]

    expected = texts(write(tmp_path / "c.jsonl", records))
    assert len(expected) == 3
    assert '"So", "name": "x"}' in expected[2]
    shutil.copy(saved / "rows.arrow", tmp_path / "b.arrow")
    assert texts(tmp_path / "a.parquet") == texts(tmp_path / "b.arrow") == expected
    assert texts(saved) == [expected[2], expected[0]]
    pq.write_table(pa.table({"messages": [None, None]}), tmp_path / "empty.parquet")
    with pytest.raises(
        DataError, match=r"empty\.parquet, row 1 of parquet: must have \"messages\""
    ):
        texts(tmp_path / "empty.parquet")


def test_cut_and_left_out_conversations_are_counted_and_named(tmp_path, tokenizer):
    records = [pair("a", "b"), pair("long " * 80, "b"), pair("c", "Bye " * 80), pair("d", "e")]
    made = prepared(write(tmp_path / "chat.jsonl", records), tmp_path, tokenizer)
    conversations = Conversations(made.open(), 60, (0, 4))
    dataset = ChatDataset(conversations, padding=0)
    assert len(dataset) == 3
    left_out, cut = conversations.notes()
    assert "1 conversations have no answer within model.seq_length = 60" in left_out
    assert "number 2 (" in left_out
    assert "1 of 3 conversations are longer" in cut
    assert "number 3 (" in cut
    every = np.arange(3)
    batch = dataset.batch(every, every)
    counted = [dataset.num_targets(every[i : i + 1], every[:1]) for i in every]
    assert counted == (batch["labels"] != -100).sum(1).tolist()
    assert (batch["labels"][1, -1]) != -100  # the answer reaches over the end
    with pytest.raises(ConfigError, match="must reach an answer of at least one of the 1 conv"):
        Conversations(made.open(), 60, (1, 2))


def config_of(tmp_path, tokenizer, source, **data):
    return Config(
        ModelConfig(vocab_size=400, seq_length=64),
        data=DataConfig(corpus=(str(source),), tokenizer=str(tokenizer), format="chat", **data),
        run=RunConfig(dir=str(tmp_path)),
        train=TrainConfig(eval_interval=1),
    )


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_batches_are_equal_on_every_grid_and_hold_documents_out(tmp_path, tokenizer, packing):
    records = [pair(f"What is {i}?", f"It is {i} " * (1 + i % 3)) for i in range(23)]
    source = write(tmp_path / "c.jsonl", records)
    config = config_of(tmp_path, tokenizer, source, split=0.2, packing=packing)
    data = open_data(config, quiet=True)
    whole = BatchLoader(data.train, micro_batch_size=6, num_microbatches=1).microbatch(2, 0)
    parts = [
        BatchLoader(
            data.train, micro_batch_size=1, num_microbatches=3, dp_rank=d, dp_size=2
        ).microbatch(2, i)
        for i in range(3)
        for d in range(2)
    ]
    assert ("document_start" in whole) == (packing == "best_fit")
    for name in whole:
        rows = np.concatenate([one[name].numpy() for one in parts])
        assert (rows == whole[name].numpy()).all()
    if packing == "best_fit":
        return
    texts = [
        {data.tokenizer.decode(row) for row in samples.batch(np.arange(n))["tokens"]}
        for samples, n in ((data.train, 18), (data.valid[""], 5))
    ]
    assert [len(one) for one in texts] == [18, 5]
    assert not texts[0] & texts[1]
    assert data.tokenizer.files()["chat_template.jinja"] == CHATML


def test_packed_conversations_are_whole_and_have_their_labels(tmp_path, tokenizer):
    """One is left out, and one longer than a row is cut at its end, as without packing."""
    records = [
        *(pair(f"What is {i}?", f"It is {i} " * (1 + i % 3)) for i in range(20)),
        pair("long " * 80, "b"),
        {"messages": TURNS},
        pair("c", "Bye " * 80),
    ]
    source = write(tmp_path / "c.jsonl", records)
    alone, packed = (
        open_data(config_of(tmp_path, tokenizer, source, split=0, packing=packing), quiet=True)
        for packing in ("none", "best_fit")
    )
    assert len(alone.notes) == 2
    assert packed.notes == alone.notes
    expected = alone.train.batch(np.arange(22))
    conversations = {}
    for tokens, labels in zip(expected["tokens"], expected["labels"], strict=True):
        last = np.flatnonzero(labels != -100)[-1]
        conversations[tuple(tokens[: last + 1])] = tuple(labels[: last + 1])
    assert len(conversations) == 22
    (dataset,) = packed.train.datasets
    every = np.arange(len(dataset))
    assert len(every) < 20
    batch = dataset.batch(every, every)
    found = []
    for tokens, labels, starts in zip(
        batch["tokens"], batch["labels"], batch["document_start"], strict=True
    ):
        for first in np.unique(starts):
            inside = starts == first
            counted = np.flatnonzero(labels[inside] != -100)
            if len(counted):
                stop = counted[-1] + 1
                found.append(tuple(tokens[inside][:stop]))
                assert conversations[found[-1]] == tuple(labels[inside][:stop])
    assert sorted(found) == sorted(conversations)
    counts = [dataset.num_targets(every[i : i + 1], every[:1]) for i in every]
    assert counts == (batch["labels"] != -100).sum(1).tolist()
    assert sum(counts) == (expected["labels"] != -100).sum()


def test_conversations_are_not_packed_into_rows_that_cut_them(tmp_path, tokenizer):
    source = write(tmp_path / "chat.jsonl", [pair("a", "b")] * 3)
    (found,) = problems(config_of(tmp_path, tokenizer, source, packing="stream"), 1)
    assert (found.field, found.suggestion) == ("data.packing", '"best_fit"')
    assert not list(problems(config_of(tmp_path, tokenizer, source, packing="best_fit"), 1))


def test_a_prepared_corpus_keeps_its_answers_and_is_not_mistaken_for_text(tmp_path, tokenizer):
    source = write(tmp_path / "chat.jsonl", [pair("a", "b")] * 4)
    made = prepared(source, tmp_path, tokenizer)
    config = config_of(tmp_path, tokenizer, made.prefix)
    assert open_data(config, quiet=True).prepared == (made,)
    text = Config(config.model, data=DataConfig(corpus=(str(made.prefix),)), run=config.run)
    with pytest.raises(ConfigError, match="prepared for chat, which does not match this gpt"):
        open_data(text, quiet=True)
    (tmp_path / "plain.txt").write_text("abc " * 100)
    plain = prepare(tmp_path / "plain.txt", tmp_path, 400, tokenizer=tokenizer, quiet=True)
    with pytest.raises(ConfigError, match="prepared for gpt, which does not match this chat"):
        open_data(config_of(tmp_path, tokenizer, plain.prefix), quiet=True)


def test_a_template_file_comes_before_the_tokenizers(tmp_path, tokenizer):
    (tmp_path / "own.jinja").write_text(MARKED)
    source = write(tmp_path / "chat.jsonl", [pair("a", "b")] * 3)
    config = config_of(tmp_path, tokenizer, source, chat_template=str(tmp_path / "own.jinja"))
    data = open_data(config, quiet=True)
    row = data.train.batch(np.arange(1))["tokens"][0]
    assert data.tokenizer.decode(row).startswith("<|user|>a<|assistant|>b<|im_end|>")
    assert data.tokenizer.files()["chat_template.jinja"] == MARKED


def test_missing_templates_tokenizers_and_wrong_sources_are_named(tmp_path, tokenizer):
    source = write(tmp_path / "chat.jsonl", [pair("a", "b")] * 3)
    bare = tmp_path / "bare.json"
    bare.write_text(tokenizer.read_text())
    with pytest.raises(DataError, match=r"bare\.json: has no chat template"):
        open_data(config_of(tmp_path, bare, source), quiet=True)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .*must be set with data\.format"):
        open_data(config_of(tmp_path, "", source), quiet=True)
    table = tmp_path / "chat.csv"
    table.write_text("prompt,answer\na,b\n")
    with pytest.raises(
        DataError, match="is CSV; conversations must be JSON lines, JSON, parquet or Arrow"
    ):
        open_data(config_of(tmp_path, tokenizer, table), quiet=True)
    found = [p.field for p in problems(config_of(tmp_path, tokenizer, "stdlib"), 1)]
    assert found == ["data.corpus"]


def test_white_space_before_an_answer_is_no_part_of_it(tmp_path):
    """GPT-2's post-processor trims white space off offsets."""
    from tokenizers import processors

    trained = train_tokenizer(["a b c\n\n"] * 4, 300)
    trained._inner.post_processor = processors.ByteLevel(trim_offsets=True)
    ids, starts = trained.encode_rendered(["a\n\n b"])[0]
    assert trained.decode(ids) == "a\n\n b"
    assert starts[0] == 0
    assert starts[1] == 1


def test_equals_transformers_on_templates_with_and_without_marks(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tokenizer.parent))
    loaded = Tokenizer.load(tokenizer)
    for text in (CHATML, MARKED):
        ours = ChatTemplate(text, "", loaded.template_words)
        plain, spans = split_marks(marked_text({"messages": TURNS}, ours))
        for asks in (False, True):
            assert ours.render(TURNS, asks=asks) == theirs.apply_chat_template(
                TURNS, chat_template=text, tokenize=False, add_generation_prompt=asks
            )
        found = theirs.apply_chat_template(
            TURNS,
            chat_template=text,
            return_dict=True,
            return_assistant_tokens_mask=text == MARKED,
        )
        ids, starts = loaded.encode_rendered([plain])[0]
        assert ids.tolist() == found["input_ids"]
        if text == MARKED:
            mask = [any(a <= s < b for a, b in spans) for s in starts]
            assert mask == [bool(one) for one in found["assistant_masks"]]
