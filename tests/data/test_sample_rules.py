"""The form of samples that a user gives to GPT or BERT: what is wrong is named with the sample's
number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train.runs import fork_ranks, tiny

from hybridpar import ModelConfig, Trainer
from hybridpar.config import Config, DataConfig, Launch, ParallelConfig
from hybridpar.data import BatchLoader, Data, open_data
from hybridpar.errors import ConfigError, DataError
from hybridpar.train.job import train

GPT = ModelConfig(seq_length=8, vocab_size=300)
BERT = ModelConfig(kind="bert", seq_length=8, vocab_size=300)
IDS = np.arange(8)


def gpt(**entries: Any) -> dict[str, Any]:
    sample = {"tokens": IDS, "labels": np.where(IDS < 4, -100, IDS)} | entries
    return {name: value for name, value in sample.items() if value is not None}


def bert(**entries: Any) -> dict[str, Any]:
    return gpt(**{"token_types": IDS // 4, "sentence_labels": 1, "padding_mask": IDS < 7} | entries)


def config_of(model: ModelConfig, folder: Path) -> Config:
    return Config(model, ParallelConfig(dp=1), data=DataConfig(cache=str(folder)))


def opened(model: ModelConfig, train: Any, folder: Path) -> Data:
    return open_data(config_of(model, folder), datasets={"train": train})


@pytest.mark.parametrize(
    "sample",
    [
        gpt(),
        gpt(tokens=IDS.astype(np.uint16), labels=IDS.astype(np.int32)),
        gpt(tokens=IDS.tolist()),
        gpt(tokens=torch.arange(8)),
        gpt(labels=np.full(8, -100)),
        gpt(padding_mask=IDS < 7, positions=IDS),
    ],
)
def test_samples_of_a_gpt(tmp_path: Path, sample: dict[str, Any]) -> None:
    data = opened(GPT, [sample] * 3, tmp_path)
    batch = BatchLoader(data.train, micro_batch_size=2, num_microbatches=1).microbatch(0, 0)
    assert {name: (array.dtype, tuple(array.shape)) for name, array in batch.items()} == {
        name: (torch.bool if name == "padding_mask" else torch.int64, (2, 8)) for name in sample
    }
    assert torch.equal(
        batch["labels"][0], torch.as_tensor(np.asarray(sample["labels"]).astype(np.int64))
    )
    assert data.train.num_targets(np.arange(2)) == 2 * int((batch["labels"][0] != -100).sum())


@pytest.mark.parametrize(
    "sample", [bert(), bert(padding_mask=None), bert(sentence_labels=np.int8(-100))]
)
def test_samples_of_a_bert(tmp_path: Path, sample: dict[str, Any]) -> None:
    batch = opened(BERT, [sample] * 3, tmp_path).train.batch(np.arange(2))
    assert batch["sentence_labels"].shape == (2,)
    assert set(batch) == set(sample)


WRONG = [
    (GPT, gpt(labels=None), r"has no 'labels', only \['tokens'\]; a gpt requires tokens, labels"),
    (
        GPT,
        gpt(loss_mask=IDS),
        r"has the unknown key 'loss_mask'; a gpt reads tokens, labels, padding_mask",
    ),
    (
        GPT,
        gpt(tokens=IDS[:7]),
        r"tokens has shape \[7\]; must have \[8\], as model\.seq_length is 8",
    ),
    (GPT, gpt(labels=np.zeros((2, 8), int)), r"labels has shape \[2, 8\]"),
    (GPT, gpt(tokens=IDS / 2), r"tokens has type float64; must be whole numbers"),
    (GPT, gpt(tokens=IDS > 3), r"tokens has type bool; must be whole numbers"),
    (
        GPT,
        gpt(tokens=IDS + 293),
        r"tokens\[7\] is 300, out of range: 0 to 299 \(model\.vocab_size - 1\)$",
    ),
    (
        GPT,
        gpt(tokens=np.where(IDS == 2, -100, IDS)),
        r"tokens\[2\] is -100, out of range: 0 to 299",
    ),
    (
        GPT,
        gpt(labels=IDS + 293),
        r"labels\[7\] is 300, out of range: .*, or -100 where it does not count$",
    ),
    (GPT, gpt(labels=IDS - 1), r"labels\[0\] is -1, out of range: 0 to 299"),
    (
        GPT,
        gpt(positions=IDS + 1),
        r"positions\[7\] is 8, out of range: 0 to 7 \(the number of positions - 1\)",
    ),
    (GPT, gpt(padding_mask=IDS), r"padding_mask has type int64; must be booleans"),
    (GPT, gpt(tokens=[[1], [2, 3]]), r"'tokens' cannot be converted to an array"),
    (GPT, gpt(tokens=["a"] * 8), r"'tokens' has the type <U1; must be numbers"),
    (
        BERT,
        gpt(),
        r"has no 'token_types', only .*; a bert requires tokens, labels, token_types, "
        r"sentence_labels",
    ),
    (
        BERT,
        bert(token_types=IDS),
        r"token_types\[2\] is 2, out of range: 0 to 1 \(the number of segments - 1\)",
    ),
    (BERT, bert(sentence_labels=2), r"sentence_labels is 2, out of range: 0 to 1"),
    (
        BERT,
        bert(sentence_labels=[1]),
        r"sentence_labels has shape \[1\]; must have \[\], one number",
    ),
]


@pytest.mark.parametrize(
    ("model", "sample", "message"), WRONG, ids=[message[:30] for *_, message in WRONG]
)
def test_bad_samples_are_named_with_their_number(
    tmp_path: Path, model: ModelConfig, sample: dict[str, Any], message: str
) -> None:
    right = gpt() if model is GPT else bert()
    where = rf"dataset\('train'\) of {model.kind}\[%s\].*{message}"
    for number, samples in (
        (0, [sample, right]),
        (1, [right, sample]),
        (50, [*[right] * 50, sample, *[right] * 49]),
    ):
        with pytest.raises(DataError, match=where % number):
            opened(model, samples, tmp_path)
    drawn = opened(model, [*[right] * 40, sample, *[right] * 59], tmp_path).train
    for draw in (drawn.batch, drawn.num_targets):
        with pytest.raises(DataError, match=where % 40):
            draw(np.arange(100))
    stream = opened(model, lambda start: iter([right, right, sample][start:]), tmp_path).train
    with pytest.raises(DataError, match=where.replace(r"\[%s\]", ", sample %s") % 2):
        stream.batch(np.arange(3))


def test_objects_that_are_no_samples(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"must be a list of samples, each a dict of arrays; it is a dict of "
        r"\['labels', 'tokens'\]",
    ):
        opened(GPT, {"tokens": [IDS], "labels": [IDS]}, tmp_path)
    with pytest.raises(
        ConfigError, match=r"datasets = \['valid'\]: must have training samples under \"train\""
    ):
        open_data(config_of(GPT, tmp_path), datasets={"valid": [gpt()]})


def test_other_integers_are_the_same_data(tmp_path: Path) -> None:
    """The fingerprint is of the arrays as they are given: checkpoints of earlier versions go on."""
    data = opened(GPT, [gpt(tokens=IDS.astype(np.int32))] * 3, tmp_path)
    assert data.train.batch(np.arange(1))["tokens"].dtype == np.int64
    assert (
        data.train.fingerprint
        == opened(GPT, [gpt(tokens=IDS.astype(np.int32))] * 3, tmp_path).train.fingerprint
    )


def samples(model: ModelConfig, *wrong: int) -> list[dict[str, Any]]:
    ids = np.arange(model.seq_length)
    return [
        {"tokens": ids, "labels": np.where(ids > 3, ids, -100) + 9999 * (i in wrong)}
        for i in range(64)
    ]


def test_a_trainer_refuses_before_anything_is_written(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    with pytest.raises(DataError, match=r"dataset\('valid'\) of gpt\[63\]: labels\[0\] is 9899"):
        Trainer(
            config=config,
            datasets={"train": samples(config.model), "valid": samples(config.model, 63)},
        ).fit()
    assert not list(config.run.folder.glob("config.toml"))


@pytest.mark.ranks
def test_all_ranks_say_which_sample_is_wrong_when_it_is_drawn(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        parallel={"pp": 2},
        train={"num_steps": 16, "eval_interval": 0, "save_interval": 0},
    )
    given = {"train": samples(config.model, 2), "valid": None}

    def run() -> None:
        try:
            train(config, Launch.from_environment(), datasets=given)
        except Exception as error:
            print(f"refused: {error}\n", end="", flush=True)

    out = fork_ranks(2, run)
    told = [line for line in out.splitlines() if line.startswith("refused: ")]
    assert len(told) == 2, out
    assert all(
        "dataset('train') of gpt[2]: labels[0] is 9899, out of range" in line for line in told
    ), out
    assert "Traceback" not in out
