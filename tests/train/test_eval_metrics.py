"""Perplexity, bits per byte, accuracy, and runs that end early by one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import gpt, start
from ranks import run_ranks
from torch import Tensor, nn
from train.runs import metrics, tiny, write_corpus

import hybridpar as hp
from hybridpar.config import Config, Launch, TrainConfig, from_mapping
from hybridpar.data import BatchLoader, open_data
from hybridpar.data.blend import Blend
from hybridpar.data.mapped import MappedDataset
from hybridpar.data.tokenizer import train_tokenizer
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.train.early_stopping import EarlyStopping
from hybridpar.train.job import train
from hybridpar.validate import problems

SIZES = (3, 12, 2, 8, 37)
CUTS: list[dict[str, dict[str, Any]]] = [
    {"train": {"micro_batch_size": 12}, "pipeline": {"num_microbatches": 1}},
    {
        "train": {"micro_batch_size": 1},
        "pipeline": {"num_microbatches": 3},
        "parallel": {"dp": 2, "pp": 2},
    },
    {"parallel": {"tp": 2, "sequence": True}},
    {"parallel": {"sites": 2}, "train": {"micro_batch_size": 1}, "model": {"logits_chunk": 3}},
]


def make(cut: dict[str, dict[str, Any]]) -> Config:
    every = {"dtype": "fp64", "eval_metrics": ["accuracy", "perplexity"]}
    return gpt(SIZES, {"parallel": {"dp": 1}, "train": every}, cut)


def numbers_of(config: Config, num_samples: int) -> dict[str, float]:
    engine, loader = start(config)
    return engine.evaluate(loader, num_samples // loader_size(config))


def loader_size(config: Config) -> int:
    return config.global_batch_size


def expected(config: Config, num_samples: int) -> float:
    """The share of right labels, sample by sample, from all logits of one process."""
    model = config.transformer
    blocks = build_blocks(
        model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=torch.float64
    )
    for number, block in blocks.items():
        named = [
            (f"blocks.{number}.{name}", parameter.detach(), placement)
            for name, parameter, placement in named_placements(block)
        ]
        initialize(named, config.train.seed)
    right = total = 0
    from hybridpar.data.synthetic import SyntheticLoader

    loader = SyntheticLoader(model, num_samples, 1, 0, 1)
    batch = loader.microbatch(0, 0)
    x: Any = None
    for number in range(model.num_blocks - 1):
        x = blocks[number](x, batch, None)
    found = blocks[model.num_blocks - 1].logits(x).argmax(-1)  # type: ignore[operator]
    counts = batch["labels"] != -100
    right = int((found == batch["labels"])[counts].sum())
    total = int(counts.sum())
    assert right
    return right / total


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_accuracy_is_the_share_of_all_labels_on_every_grid(cut: dict[str, Any]) -> None:
    config = make(cut)
    parallel = config.parallel
    ranks = parallel.tp * parallel.pp * parallel.dp * parallel.sites
    for numbers in run_ranks(numbers_of, ranks, config, 12):
        assert numbers["accuracy"] == pytest.approx(expected(config, 12), abs=1e-12)


@dataclass(frozen=True)
class Sums(hp.ModelSpec):
    """Its loss is the sum of what samples say, over all labels."""

    num_blocks: int = 2

    def block(self, number: int, build: Any) -> nn.Module:
        return Sum(number, build.dtype)

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (9,)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return int(sample["count"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return SAMPLES[number % 2]


class Sum(nn.Module):
    def __init__(self, number: int, dtype: torch.dtype):
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor | None, batch: dict[str, Tensor], key: Any) -> Any:
        if self.number == 0:
            return batch["values"].to(self.weight.dtype) * self.weight
        assert x is not None
        return {"loss": (x * self.weight).sum() / batch["num_targets"]}


SAMPLES = [
    {"values": np.array([2.0] + [0.0] * 8), "count": np.int64(1)},
    {"values": np.full(9, 10.0), "count": np.int64(9)},
]


def mean_of(grid: dict[str, int], size: int, num_microbatches: int) -> float:
    config = hp.Trainer(
        Sums(),
        parallel=grid,
        train={"micro_batch_size": size},
        pipeline={"num_microbatches": num_microbatches},
    ).config
    engine, _ = start(config)
    samples = Blend([MappedDataset(config.model, SAMPLES, "valid")], seed=0)
    loader = BatchLoader(
        samples,
        micro_batch_size=size,
        num_microbatches=num_microbatches,
        dp_rank=engine.grid.replica,
        dp_size=engine.grid.num_replicas,
    )
    return engine.evaluate(loader, 2 // loader.batch_size)["loss"]


@pytest.mark.thorough(keep=3)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "size", "num_microbatches"),
    [
        ({"dp": 1}, 1, 1),
        ({"dp": 1}, 2, 1),
        ({"dp": 1}, 1, 2),
        ({"dp": 2}, 1, 1),
        ({"dp": 1, "pp": 2}, 1, 1),
        ({"dp": 1, "tp": 2}, 2, 1),
        ({"dp": 2, "pp": 2}, 1, 1),
        ({"dp": 1, "tp": 2, "pp": 2}, 1, 1),
        ({"dp": 1, "sites": 2}, 1, 1),
    ],
    ids=str,
)
def test_a_loss_of_2_over_1_label_and_90_over_9_is_9_2(
    grid: dict[str, int], size: int, num_microbatches: int
) -> None:
    ranks = math.prod(grid.values())
    for mean in run_ranks(mean_of, ranks, grid, size, num_microbatches):
        assert mean == pytest.approx(9.2, rel=1e-6)


EVALUATED: dict[str, Any] = {
    "num_steps": 6,
    "eval_interval": 2,
    "save_interval": 2,
    "eval_metrics": ["perplexity", "bits_per_byte", "accuracy"],
}


def test_a_run_reports_them_of_each_set(tmp_path: Path) -> None:
    (tmp_path / "near.txt").write_text(write_corpus(tmp_path / "corpus.txt").read_text()[:3000])
    sets = {"near": [str(tmp_path / "near.txt")]}
    config = tiny(tmp_path, train=EVALUATED, data={"valid_sets": sets}, parallel={"dp": 1})
    train(config, Launch.from_environment())
    data = open_data(config, quiet=True)
    assert data.tokenizer is not None
    count = config.train.eval_batches * config.global_batch_size
    labels = data.valid["near"].batch(np.arange(count))["labels"].reshape(-1)
    text = data.tokenizer.decode(labels).replace("<|endoftext|>", "")
    rows = [row for row in metrics(config.run.folder) if "val_loss/near" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        loss = row["val_loss/near"]
        assert row["val_perplexity/near"] == pytest.approx(math.exp(loss))
        bits = loss * len(labels) / math.log(2) / len(text.encode())
        assert row["val_bits_per_byte/near"] == pytest.approx(bits, rel=1e-9)
        assert 0 <= row["val_accuracy/near"] <= 1
    assert rows[-1]["val_accuracy/near"] > rows[0]["val_accuracy/near"]


def test_bytes_of_tokens() -> None:
    trained = train_tokenizer(["Zoë says hello, hello\n"] * 4, 300)
    lengths = trained.byte_lengths
    assert lengths is not None
    text = "Zoë says → hello\n"
    ids = [trained.end, *trained.encode(text), trained.end]
    assert lengths[ids].sum() == len(text.encode())
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    from hybridpar.data.tokenizer import Tokenizer

    words = {"<unk>": 0, "<0xC3>": 1, "<0xAB>": 2, "\u2581he": 3, "ll\u00f6": 4}
    inner: Any = Inner(models.WordLevel(words, "<unk>"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert Tokenizer(inner).byte_lengths.tolist() == [5, 1, 1, 3, 4]  # type: ignore[union-attr]
    inner.decoder = decoders.WordPiece()
    assert Tokenizer(inner).byte_lengths is None


def stopping(name: str, patience: int, *values: float) -> EarlyStopping:
    config = Config(train=TrainConfig(stop_by=name, stop_patience=patience))
    rows = {2 * i: {f"val_{name}": value} for i, value in enumerate(values)}
    return EarlyStopping(config, rows)


def test_a_run_ends_when_it_does_not_get_better() -> None:
    assert not stopping("loss", 2, 3.0, 2.0, 2.5).is_over
    assert stopping("loss", 2, 3.0, 2.0, 2.5, 2.0).is_over
    assert stopping("accuracy", 2, 0.5, 0.4, math.nan).is_over
    assert not stopping("accuracy", 2, 0.5, 0.4, 0.6).is_over
    assert not stopping("loss", 0, 1.0, 2.0, 3.0, 4.0).is_over
    back = stopping("loss", 2, 3.0, 2.0, 2.5, 2.0)
    back.forget_after(4)
    assert not back.is_over
    back.add(6, {"val_loss": 2.1})
    assert back.is_over
    assert back.best_step == 2
    assert str(back) == (
        "val_loss is not better than at step 2 in 2 evaluations: the run ends; to continue, raise "
        "train.stop_patience"
    )


def test_an_early_end_is_saved_and_stays(tmp_path: Path) -> None:
    """Nothing gets better with a learning rate of 0. The run is interrupted in between."""
    write_corpus(tmp_path / "corpus.txt")
    settings = EVALUATED | {"stop_by": "accuracy", "stop_patience": 3, "num_steps": 20}
    config = tiny(tmp_path, train=settings, optim={"lr": 0.0})
    stop = hp.STOP
    from hybridpar.train.callbacks import Callbacks

    ended = Callbacks(on_evaluation=lambda step, numbers: stop if step == 2 else None)
    assert train(config, Launch.from_environment(), callbacks=ended).step == 2
    outcome = train(config, Launch.from_environment())
    assert (outcome.step, outcome.asked_to_stop, outcome.exit_code) == (6, True, 0)
    outcome = train(config, Launch.from_environment())
    assert (outcome.step, outcome.resumed_from) == (6, 6)


def test_impossible_evaluations_are_named(tmp_path: Path) -> None:
    def found(**sections: Any) -> list[str]:
        config = from_mapping({"parallel": {"dp": 1}, **sections})
        return [p.field for p in problems(config, 1)]

    accuracy = {"eval_metrics": ["accuracy"]}
    assert found(model={"kind": "bert"}, train=accuracy) == ["train.eval_metrics"]
    assert found(train={"stop_patience": 2}) == ["train.stop_patience"]
    wrong = {"stop_patience": 2, "eval_interval": 1, "stop_by": "accuracy"}
    assert found(train=wrong) == ["train.stop_by"]
    assert found(train=wrong | accuracy) == []
    sets = {"valid_sets": {"a": ["a.txt"]}}
    assert found(train=wrong | accuracy, data=sets) == ["train.stop_by"]
    assert found(optim={"restarts": 1, "decay": "linear"}) == ["optim.restarts"]
    write_corpus(tmp_path / "corpus.txt")
    config = tiny(tmp_path, train={"stop_patience": 1, "eval_interval": 2, "stop_by": "loss/x"})
    with pytest.raises(ConfigError, match="must name a validation set of this run"):
        train(config, Launch.from_environment())
