"""Validation losses are means over targets, however the samples are cut; a batch without targets
trains nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Sections, start
from engines import gpt as gpt_of
from ranks import run_ranks
from torch import Tensor, nn

import hybridpar
from hybridpar.config import Config
from hybridpar.data.blend import Blend
from hybridpar.data.loader import BatchLoader
from hybridpar.data.mapped import MappedDataset
from hybridpar.data.stream import StreamedSamples
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.train.engine import StepResult

SIZES = (3, 12, 2, 8, 37)
NUM_SAMPLES = 24
BERT = {"model": {"kind": "bert", "sentence_head": "sop"}}
# micro-batch size, micro-batches, batches; axes
CUTS: list[tuple[int, int, int, dict[str, int]]] = [
    (1, 2, 12, {}),
    (4, 3, 2, {}),
    (24, 1, 1, {}),
    (2, 2, 3, {"dp": 2}),
    (3, 2, 4, {"pp": 2}),
    (1, 4, 6, {"tp": 2}),
    (1, 3, 4, {"sites": 2}),
]


def gpt(*sections: Sections) -> Config:
    return gpt_of(SIZES, {"parallel": {"dp": 1}}, *sections)


def make(cut: tuple[int, int, int, dict[str, int]], *sections: Sections) -> Config:
    size, num_microbatches, _, parallel = cut
    return gpt(
        {
            "train": {"micro_batch_size": size, "dtype": "fp64"},
            "parallel": parallel,
            "pipeline": {"num_microbatches": num_microbatches},
        },
        *sections,
    )


def evaluate(config: Config, num_batches: int) -> dict[str, float]:
    engine, loader = start(config)
    return engine.evaluate(loader, num_batches)


def means_of_samples(config: Config) -> dict[str, float]:
    """The losses of the starting weights, added up sample by sample in one process, over the
    numbers of targets."""
    model = config.model
    blocks = build_blocks(
        model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=torch.float64
    )
    for number, block in blocks.items():
        initialize(
            [
                (f"blocks.{number}.{name}", parameter.detach(), placement)
                for name, parameter, placement in named_placements(block)
            ],
            config.train.seed,
        )
    loader = SyntheticLoader(model, 1, NUM_SAMPLES)
    sums: dict[str, float] = {}
    num_labels = 0
    for index in range(NUM_SAMPLES):
        batch = loader.microbatch(0, index)
        num_labels += int((batch["labels"] != -100).sum())
        one = torch.ones((), dtype=torch.float64)
        x: Any = None
        for number in sorted(blocks):
            x = blocks[number](x, batch | {"num_targets": one, "num_samples": one}, None)
        for name, loss in x.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
    return {
        name: total / (NUM_SAMPLES if name == "sop" else num_labels) for name, total in sums.items()
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_validation_loss_is_the_mean_over_targets_on_every_grid_and_cut(kind: str) -> None:
    sections = [BERT] if kind == "bert" else []
    expected = means_of_samples(make(CUTS[0], *sections))
    assert set(expected) == ({"lm"} if kind == "gpt" else {"mlm", "sop"})
    for cut in CUTS:
        config = make(cut, *sections)
        num_ranks = math.prod(cut[3].values())
        for found in (
            run_ranks(evaluate, num_ranks, config, cut[2])
            if num_ranks > 1
            else [evaluate(config, cut[2])]
        ):
            assert found == pytest.approx(expected, rel=1e-9), cut


@dataclass(frozen=True)
class Tagger(hybridpar.SequentialSpec):
    """Labels of five kinds for each of four positions; some have none."""

    def layers(self) -> Any:
        yield nn.Linear(3, 8)
        yield nn.Linear(8, 5)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(
            out.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )

    def num_targets(self, sample: dict[str, Any]) -> int:
        return int((np.asarray(sample["labels"]) != -100).sum())

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        draw = np.random.default_rng([seed, number])
        labels = draw.integers(0, 5, 4)
        labels[draw.integers(0, 5) :] = -100
        return {"x": draw.normal(size=(4, 3)), "labels": labels}


def custom(size: int, num_microbatches: int, **sections: Any) -> Config:
    return Config(
        model=Tagger(),
        **{  # type: ignore[arg-type]
            name: value
            for name, value in vars(
                gpt(
                    {
                        "train": {"micro_batch_size": size, "dtype": "fp64"},
                        "pipeline": {"num_microbatches": num_microbatches},
                        **sections,
                    }
                )
            ).items()
            if name != "model"
        },
    )


def plain_loss(weights: dict[str, Tensor], samples: list[dict[str, Any]]) -> float:
    """The mean over labels, by torch's own operators."""
    x = torch.stack([torch.from_numpy(sample["x"]) for sample in samples])
    labels = torch.stack([torch.from_numpy(sample["labels"]) for sample in samples])
    first, second = (
        [weights[f"blocks.{n}.layer.{name}"] for name in ("weight", "bias")] for n in (0, 1)
    )
    out = nn.functional.linear(nn.functional.linear(x, *first), *second)
    return float(nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("cut", [(1, 2, 6), (3, 2, 2), (12, 1, 1)])
def test_a_row_of_modules_may_count_its_labels(cut: tuple[int, int, int]) -> None:
    size, num_microbatches, num_batches = cut
    engine, loader = start(custom(size, num_microbatches))
    samples = [Tagger().sample(n, 0) for n in range(12)]
    assert 0 in map(Tagger().num_targets, samples), "a micro-batch without labels is among them"
    expected = plain_loss(dict(engine.state.weights.full_weights()), samples)
    assert engine.evaluate(loader, num_batches)["loss"] == pytest.approx(expected, rel=1e-9)
    steps: list[StepResult] = []
    engine.train(loader, num_batches, steps.append)
    assert all(math.isfinite(step.loss + step.grad_norm) and not step.skipped for step in steps)


class WithoutLabels(SyntheticLoader):
    """Random samples; `empty` says of which positions no label counts."""

    def __init__(
        self, config: Config, replica: int, num_replicas: int, empty: Callable[[int], bool]
    ):
        super().__init__(
            config.model,
            config.train.micro_batch_size,
            config.pipeline.num_microbatches,
            replica,
            num_replicas,
        )
        self._inner, self._empty, self.samples = self.samples, empty, self  # type: ignore[assignment]

    def batch(self, counter: Any) -> dict[str, Any]:
        arrays = self._inner.batch(counter)
        arrays["labels"][[self._empty(n) for n in counter.tolist()]] = -100
        return arrays

    def num_targets(self, batch: Any) -> int:
        """Labels of a batch; as a source of samples, those at some positions."""
        if isinstance(batch, int):
            return super().num_targets(batch)
        return int((self.batch(batch)["labels"] != -100).sum())


def train_without(
    config: Config, empty: Callable[[int], bool], num_batches: int
) -> tuple[list[StepResult], dict[str, Tensor], dict[str, Tensor], list[int]]:
    """The steps, the gradients of batch 1, the weights, and the batches without labels."""
    engine, _ = start(config)
    loader = WithoutLabels(config, engine.grid.replica, engine.grid.num_replicas, empty)
    steps: list[StepResult] = []
    seen: dict[str, Tensor] = {}

    def keep(batch: int, gradients: Any) -> None:
        if batch == 1:
            seen.update({name: gradient.clone() for name, gradient in gradients.items()})

    engine.train(loader, num_batches, steps.append, keep)
    weights = {name: weight.clone() for name, weight in engine.state.weights.full_weights().items()}
    return steps, seen, weights, [step.step - 1 for step in steps if not step.num_targets]


SETTINGS: dict[str, Sections] = {
    "gpt": {},
    "logits_chunk": {"model": {"logits_chunk": 5}},
    "fp16": {"train": {"dtype": "fp16"}},
    "bf16": {"train": {"dtype": "bf16"}},
    "gpipe": {"pipeline": {"schedule": "gpipe"}},
    "2bw": {"pipeline": {"schedule": "2bw"}},
    "lamb": {"optim": {"name": "lamb"}},
    "muon": {"optim": {"name": "muon"}},
    "sgd": {"optim": {"name": "sgd"}},
    "spikes": {"anomalies": {"loss_spike": 100.0, "norm_spike": 100.0, "window": 4}},
    "host": {"memory": {"host_optimizer": True}},
}


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", [*SETTINGS, "bert"])
def test_a_batch_without_labels_has_loss_zero_and_no_gradient(name: str) -> None:
    """Batches 1 and 3 to 7 have none; training continues behind them."""
    sections = {"model": {"kind": "bert"}} if name == "bert" else SETTINGS[name]
    config = gpt(sections)
    size = config.global_batch_size

    def empty(position: int) -> bool:
        return position // size in (1, 3, 4, 5, 6, 7)

    steps, gradients, weights, unlabelled = train_without(config, empty, 10)
    losses = [step.losses["mlm" if name == "bert" else "lm"] for step in steps]
    assert [loss == 0 for loss in losses] == [
        False,
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert not any(step.anomaly or (step.skipped and step.loss_scale == 1) for step in steps)
    assert all(math.isfinite(step.grad_norm) for step in steps if not step.skipped)
    assert unlabelled == [1, 3, 4, 5, 6, 7]
    assert all(weight.isfinite().all() for weight in weights.values())
    if name != "bert":  # whose sentence labels count
        assert steps[1].grad_norm == 0
        assert gradients
        assert not any(gradient.count_nonzero() for gradient in gradients.values())


COMPRESSED: list[dict[str, Any]] = [
    {},
    *(
        {"compression": {"gradients": name, "gradients_start": 0}}
        for name in ("int8", "powersgd", "dct", "sbpca")
    ),
]


def trained_shares(config: Config, num_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights where every second micro-batch of a batch, all of one of two replicas, has
    no labels."""
    steps, _, weights, _ = train_without(config, partial(_second_half, 2), num_batches)
    assert not any(step.anomaly for step in steps)
    return [step.loss for step in steps], weights


def _second_half(size: int, position: int) -> bool:
    return position // size % 2 == 1


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_replica_without_labels_is_as_if_one_process_had_them(kind: str) -> None:
    sections: Sections = {"model": {"kind": kind}, "train": {"dtype": "fp64"}}
    alone = trained_shares(gpt(sections, {"pipeline": {"num_microbatches": 4}}), 4)
    for parallel in ({"dp": 2}, {"sites": 2}):
        outer = {"outer": {"every": 1, "lr": 1.0, "momentum": 0.0}} if "sites" in parallel else {}
        config = gpt(sections, {"pipeline": {"num_microbatches": 2}, "parallel": parallel, **outer})
        for losses, weights in run_ranks(trained_shares, 2, config, 4):
            if "sites" in parallel:  # whose losses and updates are their own
                assert all(weight.isfinite().all() for weight in weights.values())
                continue
            assert losses == pytest.approx(alone[0], rel=1e-9)
            for name, weight in alone[1].items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections", COMPRESSED, ids=lambda one: str(one and one["compression"]["gradients"])
)
def test_nothing_to_send_is_no_anomaly(sections: dict[str, Any]) -> None:
    """A batch without labels over two replicas, with gradients compressed from the first one on."""
    config = gpt(sections, {"parallel": {"dp": 2}})
    for steps, _, weights, unlabelled in run_ranks(
        train_without, 2, config, partial(_first, 24), 4
    ):
        assert unlabelled == [0, 1]
        assert [step.loss == 0 for step in steps] == [True, True, False, False]
        assert not any(step.anomaly or step.skipped for step in steps)
        assert all(weight.isfinite().all() for weight in weights.values())


def _first(number: int, position: int) -> bool:
    return position < number


MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16, "vocab_size": 32}


def sample(seed: int, num_labels: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 32, 16)
    labels[num_labels:] = -100
    return {"tokens": draw.integers(0, 32, 16), "labels": labels}


def test_a_run_without_labels_says_so_once_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [sample(n, 0) for n in range(4)]
    seen: list[Any] = []
    done = hybridpar.Trainer(
        datasets={"train": data, "valid": data},
        model=MODEL,
        pipeline={"num_microbatches": 1},
        train={
            "num_steps": 12,
            "eval_interval": 4,
            "eval_batches": 1,
            "micro_batch_size": 4,
            "device": "cpu",
        },
        run={"dir": str(tmp_path), "name": "ignored"},
    ).fit(on_evaluation=lambda step, loss: seen.append(loss))
    text = capsys.readouterr().err
    assert (done.step, done.loss, done.val_loss, seen) == (12, 0.0, None, [])
    assert text.count("no label of this batch counts") == 1
    assert "12 of 12 batches had no label that counts" in text
    assert text.count("no label of the validation set counts") == 1
    assert "nan" not in text.lower()


@pytest.mark.thorough
def test_a_run_says_once_that_validation_samples_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(name: str, num_valid: int) -> str:
        hybridpar.Trainer(
            datasets={"train": [sample(1, 9)], "valid": [sample(n, 5) for n in range(num_valid)]},
            model=MODEL,
            pipeline={"num_microbatches": 1},
            run={"dir": str(tmp_path), "name": name},
            train={
                "num_steps": 2,
                "eval_interval": 1,
                "eval_batches": 3,
                "micro_batch_size": 4,
                "device": "cpu",
            },
        ).fit()
        return capsys.readouterr().err

    assert "repeat" not in trained("enough", 12)
    text = trained("fewer", 9)
    assert text.count("asks for 12 samples, and 3 of them repeat") == 1
    assert "train.eval_batches = 2 takes each at most once" in text


def test_repeats_are_counted_where_a_data_set_is_smaller_than_what_is_asked() -> None:
    model = Tagger()
    few, many = (
        MappedDataset(model, [model.sample(i, 1) for i in range(n)], "valid") for n in (3, 9)
    )
    blend = Blend([few, many], [1.0, 1.0], seed=0)
    for count in range(30):
        members, _, samples = blend.locate(np.arange(count))
        assert blend.num_repeats(count) == count - len(
            set(zip(members.tolist(), samples.tolist(), strict=True))
        )
    batches = BatchLoader(blend, micro_batch_size=4, num_microbatches=1)
    assert blend.num_repeats(12) == 3
    assert batches.num_batches_without_repeats(3) == 1, (
        "the third sample of the small data set is the last new one"
    )
    stream = StreamedSamples(model, [model.sample(i, 1) for i in range(5)], "valid", 16)
    loader = BatchLoader(stream, micro_batch_size=4, num_microbatches=2)
    assert stream.num_repeats(8) == 0, "its end is not known"
    assert loader.num_targets(0) == sum(model.num_targets(model.sample(i % 5, 1)) for i in range(8))
    assert (stream.num_repeats(4), stream.num_repeats(8)) == (0, 3)
