import json
from dataclasses import replace

import numpy as np
import pytest
from data.documents import add_document

from hybridpar.config import Config, DataConfig, ModelConfig, TrainConfig
from hybridpar.data import BatchLoader, BertDataset, GPTDataset, IndexedWriter, open_data
from hybridpar.errors import ConfigError, DataError

MODEL = {"vocab_size": 400, "seq_length": 32}


def opened(data, folder, **model):
    config = Config(
        ModelConfig(**MODEL | model),
        data=replace(data, cache=str(folder)),
        train=TrainConfig(seed=1, eval_interval=1),
    )
    return open_data(config, quiet=True)


@pytest.fixture
def texts(tmp_path):
    for name in ("one", "two"):
        lines = [
            f"The {name} text, number {i}.\nIt has\nfour lines.\n{'Long! ' * (i % 9)}"
            for i in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in lines)
        )
    return tuple(str(tmp_path / f"{name}.jsonl") for name in ("one", "two"))


@pytest.mark.parametrize(("kind", "dataset"), [("gpt", GPTDataset), ("bert", BertDataset)])
def test_text_without_weights_is_one_corpus(texts, tmp_path, kind, dataset):
    data = opened(DataConfig(texts, split=0.1), tmp_path / "c", kind=kind)
    assert len(data.prepared) == len(data.train.datasets) == 1
    assert data.prepared[0].num_documents == 120
    assert isinstance(data.train.datasets[0], dataset)
    assert len(data.valid[""].datasets[0]) * 4 < len(data.train.datasets[0])
    batch = BatchLoader(data.train, micro_batch_size=2, num_microbatches=1).microbatch(0, 0)
    assert batch["tokens"].shape == (2, 32)
    assert batch["tokens"].max() < data.tokenizer.vocab_size <= 400


def test_weights_blend_corpora_that_share_a_tokenizer(texts, tmp_path):
    config = DataConfig(texts, weights=(3.0, 1.0), split=0.1)
    data = opened(config, tmp_path / "c")
    assert data.train.shares == data.valid[""].shares == (3, 1)
    assert len({p.tokenizer().fingerprint for p in data.prepared}) == 1


def test_prepared_corpora_can_be_named(texts, tmp_path):
    config = DataConfig(texts[:1], split=0)
    first = opened(config, tmp_path / "c")
    assert not first.valid
    for name in (str(first.prepared[0].prefix), f"{first.prepared[0].prefix}.bin"):
        again = opened(DataConfig((name,), split=0), tmp_path / "d")
        assert again.train.fingerprint == first.train.fingerprint
        assert again.tokenizer is None or again.tokenizer.fingerprint == first.tokenizer.fingerprint
    mixed = opened(DataConfig((name, texts[1]), split=0), tmp_path / "d")
    assert len(mixed.train.datasets) == 2
    assert mixed.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_a_validation_corpus_of_its_own(texts, tmp_path):
    def of(corpus, **options):
        return opened(DataConfig(corpus, **options), tmp_path / "c")

    whole = of(texts[:1], split=0)
    data = of(texts[:1], valid_corpus=texts[1:])
    assert data.train.fingerprint == whole.train.fingerprint  # nothing of the corpus is held out
    assert len(data.valid[""].datasets) == 1
    assert data.tokenizer.fingerprint == whole.tokenizer.fingerprint
    held_out = data.valid[""].datasets[0].batch(np.arange(3), np.zeros(3, np.int64))["tokens"]
    assert "two text" in data.tokenizer.decode(held_out.reshape(-1))
    again = (
        of(texts[:1], valid_corpus=texts[1:])
        .valid[""]
        .datasets[0]
        .batch(np.arange(3), np.full(3, 7))["tokens"]
    )
    np.testing.assert_array_equal(again, held_out)  # at every evaluation
    weighted = of(
        texts,
        weights=(3.0, 1.0),
        valid_corpus=(str(data.prepared[0].prefix), __file__),
        tokenizer=str(data.prepared[0].tokenizer_path),
    )
    assert weighted.train.shares == (3, 1)
    assert len(weighted.valid[""].datasets) == 2


@pytest.fixture
def theirs(tmp_path):
    with IndexedWriter(tmp_path / "theirs", "<u2") as writer:
        add_document(writer, range(300), [10] * 30)
    return str(tmp_path / "theirs")


def test_files_of_megatron(theirs, tmp_path):
    data = opened(DataConfig((theirs,), split=0.2), tmp_path)
    assert data.tokenizer is None
    assert len(data.train.datasets[0]) == 7
    with pytest.raises(ConfigError, match=r"data\.tokenizer = '': must be set: BERT"):
        opened(DataConfig((theirs,), split=0.2), tmp_path, kind="bert")
    with pytest.raises(ConfigError, match=r"vocab_size = 299"):
        opened(DataConfig((theirs,), split=0), tmp_path, vocab_size=299)


def test_conflicting_settings(texts, theirs, tmp_path):
    def of(kind="gpt", corpus=texts, split=0.1, **options):
        return opened(DataConfig(corpus, split=split, **options), tmp_path / "c", kind=kind)

    with pytest.raises(ConfigError, match=r"data\.tokenizer = '': must be set for .*one\.jsonl"):
        of(corpus=(texts[0], theirs))
    with pytest.raises(DataError, match="does not exist"):
        of(corpus=("missing.txt",))
    with pytest.raises(
        ConfigError,
        match=r"data\.tokenizer = '': must be set for .*one\.jsonl, because data\.corpus is",
    ):
        of(corpus=(theirs,), valid_corpus=texts[:1])
    with pytest.raises(DataError, match=r"missing\.txt: does not exist"):
        of(valid_corpus=("missing.txt",))
    gpt = str(of().prepared[0].prefix)
    with pytest.raises(ConfigError, match="was prepared for gpt, which does not match this bert"):
        of(
            kind="bert",
            corpus=(gpt,),
            tokenizer=str(of(kind="bert").prepared[0].tokenizer_path),
        )
    other = str(of(corpus=texts[:1]).prepared[0].tokenizer_path)
    with pytest.raises(ConfigError, match="does not match the tokenizer that"):
        of(corpus=(gpt,), tokenizer=other)
    with pytest.raises(ConfigError, match=r"data\.split"):
        of(corpus=(gpt,), split=0.001)
