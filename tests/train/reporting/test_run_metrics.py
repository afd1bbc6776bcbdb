"""Metrics of custom models: means over the batch on every grid, reported under their names, without
effect on training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Outcome, gpt, start, train
from ranks import run_ranks
from torch import Tensor, nn
from train.runs import metrics

from hybridpar import Build, ModelSpec, SequentialSpec, Trainer
from hybridpar.config import Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
from hybridpar.train.reporting.progress import Status, valid_numbers
from hybridpar.train.reporting.run_metrics import History
from hybridpar.validate import resolve
from hybridpar.verify.run import GridRun, compare, on_grid, run_grid, verify
from hybridpar.watch.board import Board

SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"micro_batch_size": 3, "dtype": "fp64"},
    "pipeline": {"num_microbatches": 4, "schedule": "2bw"},
}


@dataclass(frozen=True)
class Net(SequentialSpec):
    what: str = "accuracy"

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(3, 16)
        yield nn.Tanh()
        yield nn.Linear(16, 5)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out, batch["label"])

    def metrics(self, out: Tensor, batch: dict[str, Tensor]) -> Any:
        hits = out.argmax(-1) == batch["label"]
        return {
            "nothing": lambda: {},
            "accuracy": lambda: {
                "accuracy": hits.float().mean(),
                "positive": out[out > 0].sum() / len(out),
            },
            "a float": lambda: {"accuracy": hits.float().mean().item()},
            "a vector": lambda: {"accuracy": hits},
            "a number": lambda: hits.float().mean(),
            "a gradient": lambda: {"steepness": torch.autograd.grad(out.sum(), out)[0].mean()},
            "the loss": lambda: {"loss": hits.float().mean()},
            "a step": lambda: {"step_ms": hits.float().mean()},
            "a slash": lambda: {"top/1": hits.float().mean()},
            "another name": lambda: (
                {"accuracy": out.sum()} if len(out) == 1 else {"precision": out.sum()}
            ),
        }[self.what]()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        draw = np.random.default_rng([seed, number])
        return {"x": draw.normal(size=3).astype(np.float32), "label": draw.integers(5)}

    def dataset(self, part: str) -> Any:
        return [self.sample(number, len(part)) for number in range(96)]


class Counted(Net):
    """Samples have one label that counts, or none; so metrics are sums over labels."""

    def num_targets(self, sample: dict[str, Any]) -> int:
        return int(sample["label"] > 0)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out, batch["label"], ignore_index=0, reduction="sum")

    def metrics(self, out: Tensor, batch: dict[str, Tensor]) -> Any:
        return {"accuracy": ((out.argmax(-1) == batch["label"]) & (batch["label"] > 0)).sum()}


class Head(nn.Linear):
    def __init__(self, reports: bool):
        super().__init__(8, 5)
        self.reports = reports

    def forward(self, x: Tensor, batch: dict[str, Tensor] | None = None, key: object = None) -> Any:
        assert batch is not None
        out = super().forward(x)
        losses = {
            "loss": nn.functional.cross_entropy(out, batch["label"], reduction="sum")
            / batch["num_samples"]
        }
        return (
            (losses, {"square": out.square().sum() / batch["num_samples"]})
            if self.reports
            else losses
        )


class Body(nn.Linear):
    def forward(
        self, x: Tensor | None, batch: dict[str, Tensor] | None = None, key: object = None
    ) -> Tensor:
        assert batch is not None
        return super().forward(batch["x"] if x is None else x)


@dataclass(frozen=True)
class Blocks(ModelSpec):
    reports: bool = True
    num_blocks = 3

    @property
    def metric_names(self) -> Sequence[str]:  # type: ignore[override]
        return ("square",) if self.reports else ()

    def block(self, number: int, build: Build) -> nn.Module:
        return [lambda: Body(3, 8), lambda: Body(8, 8), lambda: Head(self.reports)][number]()

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (8,)

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return Net().sample(number, seed)


class Undeclared(Blocks):
    metric_names = ()


def make(model: ModelSpec, **sections: dict[str, Any]) -> Config:
    every = {
        name: {**SECTIONS.get(name, {}), **sections.get(name, {})}
        for name in {**SECTIONS, **sections}
    }
    return replace(
        from_mapping({"parallel": {"dp": 1}, "optim": {"lr": 1e-2}, **every}), model=model
    )


def trained(config: Config) -> Outcome:
    return train(start(config)[0], 5)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "parallel", "pipeline"),
    [
        (Net(), {"pp": 2}, {"recompute": "all"}),
        (Counted(), {"dp": 2, "zero": 1}, {"num_microbatches": 2}),
        (Blocks(), {"pp": 2}, {"schedule": "1f1b", "recompute": "stage", "split_backward": True}),
    ],
)
def test_metrics_are_those_of_one_process(
    model: ModelSpec, parallel: dict[str, Any], pipeline: dict[str, Any]
) -> None:
    """In training and in evaluation."""
    alone = trained(make(model, pipeline={"schedule": pipeline.get("schedule", "2bw")}))
    names = list(model.metric_names)
    assert [list(step.metrics) for step in alone.steps] == [names] * 5
    assert len({step.metrics[names[0]] for step in alone.steps}) > 1
    for found in run_ranks(
        trained, 2, make(model, parallel={"dp": 1, **parallel}, pipeline=pipeline)
    ):
        assert list(found.evaluated) == ["loss", *names]
        assert found.evaluated == pytest.approx(alone.evaluated, rel=1e-9)
        for step, expected in zip(found.steps, alone.steps, strict=True):
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-9)
            assert step.loss == pytest.approx(expected.loss, rel=1e-9)


def test_a_mean_is_that_of_all_samples_and_of_all_labels_that_count() -> None:
    for model in (Net(), Counted()):
        config = make(model)
        engine, loader = start(config)
        batch = {
            name: torch.cat([loader.microbatch(0, i)[name] for i in range(4)])
            for name in ("x", "label")
        }
        weights = engine.state.weights.full_weights()
        x = batch["x"].double()
        for block, after in ((0, torch.tanh), (2, lambda out: out)):
            layer = [weights[f"blocks.{block}.layer.{name}"] for name in ("weight", "bias")]
            x = after(nn.functional.linear(x, *layer))  # type: ignore[operator]
        hits = (x.argmax(-1) == batch["label"])[batch["label"] >= isinstance(model, Counted)]
        assert 0 < hits.double().mean() < 1
        assert engine.evaluate(loader, 1)["accuracy"] == pytest.approx(
            float(hits.double().mean()), rel=1e-6
        )


def test_metrics_train_nothing() -> None:
    """Also one that autograd could go through: weights are equal to the bit."""
    for reporting, silent in ((Blocks(), Blocks(reports=False)), (Net(), Net("nothing"))):
        found = trained(make(reporting))
        expected = trained(make(silent))
        assert found.steps[0].metrics
        assert not expected.steps[0].metrics
        assert not [
            name for name, x in found.tensors.items() if not torch.equal(x, expected.tensors[name])
        ]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "a float",
            r"metrics\(\) must return a number .*; try no \.item\(\)",
        ),
        (
            "a vector",
            r"metrics\(\) must return a number .* as metric 'accuracy', not a tensor of shape "
            r"\(1,\)",
        ),
        ("a number", r"metrics\(\) must return metrics as a dict of numbers by name, not a Tensor"),
        (
            "a gradient",
            r"metrics\(\) fails .* does not require grad .* It is called without "
            r"gradients",
        ),
        (
            "the loss",
            r"metric_names = 'loss': must not be the name of a number that metrics\.jsonl",
        ),
        (
            "a step",
            r"metric_names = 'step_ms': must not be the name of a number that metrics\.jsonl",
        ),
        ("a slash", r"metric_names = 'top/1': the name of a metric must begin with a letter"),
    ],
)
def test_metrics_that_cannot_be_reported_are_refused_before_a_run(what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(make(Net(what)), 1)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", [Net("another name"), Undeclared()])
def test_every_micro_batch_has_the_same_metrics(model: ModelSpec) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.metric_names = \[.*does not match the metrics that"
    ):
        trained(make(model))


def test_metrics_that_look_at_values_have_predicted_memory() -> None:
    """A ghost has no values, so what is selected by them has no shape."""
    assert predict(JobPlan(resolve(make(Net()), 1)))[0].total > 0


@pytest.mark.ranks
def test_verify_compares_metrics() -> None:
    config = make(Net())
    report = verify(config, {"pp": 2}, 2)
    assert report.ok
    assert report.worst["metric"].error < 1e-12
    run: GridRun = run_grid(on_grid(config, {"tp": 1}), 2)
    run.metrics[1]["accuracy"] += 1e-3
    found = compare(on_grid(config, {"tp": 1}), run, 2).first_divergence
    assert found is not None
    assert (found.batch, found.what, found.name) == (1, "metric", "accuracy")


@pytest.mark.thorough
def test_metrics_of_a_run_are_reported_of_each_validation_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In metrics.jsonl, the lines of progress, what functions are called with, and the
    dashboard."""
    sets = {"seen": Net().dataset("train")[:12], "new": Net().dataset("valid")}
    trainer = Trainer(
        Net(),
        run={"dir": str(tmp_path)},
        datasets={"train": Net().dataset("train"), "valid": sets},
        train={"num_steps": 4, "eval_interval": 2, "eval_batches": 1, "micro_batch_size": 3},
        pipeline={"num_microbatches": 4},
        checkpoint={"best_by": "new"},
    )
    told: list[Any] = []
    outcome = trainer.fit(
        on_step=told.append, on_evaluation=lambda step, numbers: told.append((step, numbers))
    )
    rows = metrics(tmp_path / "run")
    steps, evaluated = ([row for row in rows if name in row] for name in ("loss", "val_loss/new"))
    assert [row["accuracy"] for row in steps] == [
        one.metrics["accuracy"] for one in told if not isinstance(one, tuple)
    ]
    for row, (step, numbers) in zip(
        evaluated, [one for one in told if isinstance(one, tuple)], strict=True
    ):
        assert list(numbers) == ["seen", "new"]
        assert row == {"step": step} | {
            f"val_{name}/{valid_set}": value
            for valid_set, of_set in numbers.items()
            for name, value in of_set.items()
        }
        assert all(list(of_set) == ["loss", "accuracy", "positive"] for of_set in numbers.values())
    last = evaluated[-1]
    assert outcome.val_loss == last["val_loss/new"] != last["val_loss/seen"]
    said = capfd.readouterr().err
    assert (
        f"val seen {last['val_loss/seen']:.4f} new {last['val_loss/new']:.4f}  "
        f"val accuracy seen {last['val_accuracy/seen']:.4f} new {last['val_accuracy/new']:.4f}"
    ) in said
    assert f"accuracy {steps[-1]['accuracy']:.4f}" in said
    seen = Board(tmp_path / "run").look()
    assert [point[:2] for point in seen["curves"]["val_accuracy/new"]] == [
        (row["step"], row["val_accuracy/new"]) for row in evaluated
    ]
    assert seen["latest"]["accuracy"] == steps[-1]["accuracy"]


def test_metrics_stand_before_what_matters_less_on_a_line_of_progress() -> None:
    row = {
        "step": 3,
        "loss": 1.25,
        "accuracy": 0.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 10.0,
        "step_ms": 1.0,
        "mfu": 0.5,
        "memory_mib": 100.0,
        "val_accuracy": 0.25,
        "consumed_tokens": 30,
    }
    status = Status(10, evaluation={"val_loss": 2.0, "val_accuracy": 0.25})
    status.update(row)
    assert status.text().startswith(
        "loss 1.2500  accuracy 0.5000  val 2.0000  val accuracy 0.2500  grad norm"
    )
    assert status.text(65) == "loss 1.2500  accuracy 0.5000  val 2.0000  val accuracy 0.2500"
    assert status.text(45) == "loss 1.2500  val 2.0000  val accuracy 0.2500"
    assert (
        valid_numbers({"val_loss": 2.0, "val_accuracy": 0.25}) == "val 2.0000  val accuracy 0.2500"
    )


def test_gpts_have_no_metrics() -> None:
    assert gpt((2, 8, 2, 8, 32)).model.metric_names == ()


def test_numbers_that_are_not_finite_stay_in_the_history(tmp_path: Path) -> None:
    """A run that has diverged has a loss for each step all the same."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "val_loss": 2.5, "val_losses": {"mlm": 2.0, "nsp": 0.5}, "val_f1": null}\n'
        '{"step": 1, "loss": 2.0, "acc": null}\n{"step": 2, "loss": null}\n{"step": 2, "val_loss": '
        "null}\n"
    )
    history = History.read(path)
    assert history.losses[1] == 2.0
    assert math.isnan(history.losses[2])
    assert list(history.losses) == [1, 2]
    assert history.validation[0]["val_loss"] == 2.5
    assert list(history.validation[0]) == ["val_loss", "val_f1"]
    assert math.isnan(history.validation[2]["val_loss"])
