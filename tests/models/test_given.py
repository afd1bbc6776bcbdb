"""Rows of modules that a program has made: copies start where they are, ties hold, and what cannot
be is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import ConfigError, SequentialSpec, Trainer
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks

SAMPLES = [{"x": np.full(4, i, np.float32), "y": np.float32(i)} for i in range(40)]
SECTIONS: dict[str, Any] = {
    "train": {"micro_batch_size": 2, "device": "cpu"},
    "pipeline": {"num_microbatches": 4},
}


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(out[:, 0], batch["y"])


def trainer_of(modules: Any, **options: Any) -> Trainer:
    return Trainer(modules, **({"loss": loss, "datasets": {"train": SAMPLES}} | SECTIONS | options))


class Shifted(nn.Linear):
    """A layer with a frozen parameter and buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Head(nn.Module):
    """Projects by a weight that another module has, too."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_blocks_start_as_the_modules_are_and_share_nothing_with_them() -> None:
    row = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Linear(4, 1))
    model = trainer_of(row).config.model
    with torch.no_grad():
        row[0].weight.fill_(0.5)  # training has not begun
    blocks = build_blocks(model, Axis("tp"), range(3), device="cpu", dtype=torch.float64)
    for block, module in zip(blocks.values(), row, strict=True):
        for (name, ours), (own, theirs) in zip(
            block.named_parameters(), module.named_parameters(), strict=True
        ):
            assert name == f"layer.{own}"
            assert torch.equal(ours, theirs.double())
            assert ours.requires_grad == theirs.requires_grad
            assert ours.data_ptr() != theirs.data_ptr()
    assert torch.equal(blocks[1].layer.shift, row[1].shift.double())


def test_state_dict_before_training_is_the_modules_own(tmp_path: Path) -> None:
    first = nn.Linear(4, 4, bias=False)
    tied = nn.Linear(4, 4)
    row = nn.Sequential(
        first, Shifted(), tied, tied, nn.Sequential(Head(first.weight), nn.Linear(4, 1))
    )
    trainer = trainer_of(row, run={"dir": str(tmp_path)})
    found = trainer.state_dict()
    assert list(found) == list(row.state_dict())
    assert all(torch.equal(found[name], value) for name, value in row.state_dict().items())
    row.load_state_dict(found)
    listed = trainer_of([nn.Linear(4, 4), nn.Linear(4, 1)], run={"dir": str(tmp_path)})
    assert list(listed.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_ties_are_told_by_the_first_holder() -> None:
    first = nn.Linear(4, 4, bias=False)
    tied = nn.Linear(4, 4)
    model = trainer_of([first, tied, tied, Head(first.weight)]).config.model
    assert model.tie_embeddings
    assert model.shared_parameters(3) == {"layer.weight": (0, "layer.weight")}
    assert model.shared_parameters(2) == {
        f"layer.{name}": (1, f"layer.{name}") for name in ("weight", "bias")
    }


@pytest.mark.ranks
def test_ends_are_tied_over_stages_and_others_within_one() -> None:
    """Also with a frozen parameter and buffers, and a parameter that one module has twice."""
    first = nn.Linear(4, 4, bias=False)
    inner = nn.Linear(4, 4)
    twice = nn.Sequential(inner, nn.Tanh(), Head(inner.weight))
    pipeline = {"schedule": "2bw", "num_microbatches": 4}
    ends = trainer_of([first, Shifted(), twice, Head(first.weight)], pipeline=pipeline)
    assert ends.verify({"pp": 2, "dp": 2}, num_batches=3).ok
    tied = nn.Linear(4, 4)
    middle = trainer_of(
        [nn.Linear(4, 4), tied, nn.Tanh(), tied, Head(first.weight), nn.Linear(4, 4)]
    )
    assert middle.verify({"dp": 2}, num_batches=2).ok
    with pytest.raises(
        ConfigError,
        match=r"parallel\.pp = 2: only the first and the last module may share",
    ):
        middle.verify({"pp": 2})


def test_a_class_of_a_row_may_tie_weights_and_needs_no_sample() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Tied(SequentialSpec):
        width: int = 4

        def layers(self) -> Any:
            first = nn.Linear(4, self.width, bias=False)
            return [first, nn.Tanh(), Head(first.weight)]

        def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return loss(out, batch)

    trainer = Trainer(Tied(), datasets={"train": SAMPLES}, **SECTIONS)
    blocks = build_blocks(trainer.config.model, Axis("tp"), range(3), device="cpu")
    assert blocks[0].layer.weight is blocks[2].layer.weight
    assert trainer.config.model.sample(3, 0) == SAMPLES[3]
    wide = [{"x": np.ones((7, 4), np.float32), "y": np.float32(0)}] * 8
    again = Trainer(Tied(), datasets={"train": iter(wide)}, **SECTIONS)
    assert again.config.model.activation_shape(0) == (7, 4)
    assert len(list(again.datasets["train"])) == 8  # also those that were looked at


def test_the_first_array_is_the_input_where_there_is_no_x() -> None:
    samples = [{"image": np.ones(4, np.float32), "y": np.float32(0)}]
    assert trainer_of([nn.Linear(4, 1)], datasets={"train": samples}).config.model.inputs == "image"


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: trainer_of(Own()),
            r"model = .*Own.*: must be .*a module with its own forward.*try nn\.Sequential\(",
        ),
        (lambda: trainer_of(Skipping(nn.Linear(4, 4))), "a module with its own forward"),
        (lambda: trainer_of([]), "modules = 'an empty list': must have at least one module"),
        (
            lambda: trainer_of([torch.tanh]),
            r"modules = .*must be a torch\.nn\.Module; try nn\.Tanh\(\)",
        ),
        (
            lambda: trainer_of([nn.Linear(4, 1)], loss=None),
            "loss = None: must be a function loss",
        ),
        (lambda: trainer_of([nn.Linear(4, 1)], metrics=5), "metrics = 5: must be a function"),
        (
            lambda: trainer_of([nn.Linear(4, 1)], datasets=None),
            'datasets = .*must have samples to train on, under "train"',
        ),
        (
            lambda: trainer_of([nn.Linear(4, 1)], datasets={"train": [(1, 2)]}).memory(),
            r"datasets = 'train': samples must be dicts of arrays by name; they are of type tuple",
        ),
        (
            lambda: trainer_of([nn.Linear(4, 1)], datasets={"train": []}).memory(),
            "must have at least one sample",
        ),
        (
            lambda: trainer_of([nn.BatchNorm1d(4), nn.Linear(4, 1)]).memory(),
            "modules = '2 modules': has a BatchNorm1d",
        ),
        (
            lambda: trainer_of([nn.Linear(5, 1)]).memory(),
            r"modules = '1 module': module 0 \(Linear\) fails on",
        ),
        (
            lambda: trainer_of([nn.Linear(4, 1)], parallel={"tp": 2}).memory(),
            "modules of an nn.Sequential are not split over ranks",
        ),
        (lambda: Trainer(loss=loss), r"loss = .*only with an nn\.Sequential"),
    ],
    ids=range(13),
)
def test_impossible_models_are_refused_in_the_words_of_python(
    make: Callable[[], object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make()
    assert "model.spec" not in str(caught.value)


def test_a_row_is_told_from_an_earlier_one_whose_address_it_has() -> None:
    """Metrics, shapes and ties are found once for each row; the same modules may come with other
    functions."""
    row = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for number in range(40):
        name = f"mean_{number}"
        trainer = trainer_of(row, metrics=lambda out, batch, name=name: {name: out.mean()})
        assert trainer.config.model.metric_names == (name,)


def test_a_row_may_be_one_module(tmp_path: Path) -> None:
    """All of a model in one module; its loss has a course that depends on values, so operations are
    not counted."""

    def positive(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return loss(out, batch) if float(out.detach().abs().sum()) >= 0 else out.mean()

    row = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    trainer = trainer_of(
        row,
        loss=positive,
        run={"dir": str(tmp_path)},
        train=SECTIONS["train"] | {"num_steps": 2, "eval_interval": 0},
    )
    assert trainer.verify({"dp": 2}, num_batches=1).ok
    assert trainer.memory()
    assert len(trainer.fit().history.losses) == 2
    row.load_state_dict(trainer.state_dict())
