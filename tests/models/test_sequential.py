"""Rows of ordinary modules: what is computed is what torch's Sequential computes, and what cannot
be right is said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import SequentialSpec, Trainer
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.nn.placement import named_placements
from hybridpar.state.parameters import move_buffers
from hybridpar.train.forecasts.preview import stage_costs


@dataclass(frozen=True)
class Net(SequentialSpec):
    what: str = "generator"
    inputs = "numbers"

    def layers(self) -> Iterable[nn.Module]:
        if self.what == "list":
            return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
        rows: dict[str, Any] = {
            "nothing": list,
            "function": lambda: [torch.tanh],
            "misfit": lambda: [nn.Linear(8, 5)],
            "a pair": lambda: [nn.LSTM(3, 8), nn.Tanh()],
            "a norm": lambda: [nn.BatchNorm1d(3)],
            "twice": lambda: [both := nn.Tanh(), nn.Linear(3, 5), both],
        }
        return rows.get(self.what, self._one_by_one)()

    def _one_by_one(self) -> Iterable[nn.Module]:
        first = nn.Linear(3, 8)
        yield first
        yield nn.Tanh()
        yield nn.Linear(8, 5)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(out, batch["label"])
        return {"no loss": loss.item(), "detached": loss.detach()}.get(self.what, loss)  # type: ignore[return-value]

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        if self.what == "no sample":
            return 5  # type: ignore[return-value]
        random = np.random.default_rng([seed, number])
        name = "x" if self.what == "other input" else "numbers"
        return {name: random.normal(size=3).astype(np.float32), "label": random.integers(5)}


@pytest.mark.parametrize("what", ["generator", "list"])
def test_micro_batches_add_up_to_the_batch_of_a_sequential(what: str) -> None:
    model = Net(what)
    wide = torch.float64
    assert model.num_blocks == 3
    assert [model.activation_shape(number) for number in range(2)] == [(8,), (8,)]
    blocks = build_blocks(model, Axis("tp"), range(3), device="cpu", dtype=wide)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).to(wide)
    plain.load_state_dict(
        {
            name.replace(".layer", ""): value
            for name, value in nn.Sequential(*blocks.values()).state_dict().items()
        }
    )
    x = torch.randn(6, 3)
    label = torch.tensor([0, 1, 2, 3, 4, 0])
    whole = nn.functional.cross_entropy(plain(x.to(wide)), label)
    whole.backward()
    total = 0.0
    for part in (slice(0, 4), slice(4, 6)):
        batch = {
            "numbers": x[part],
            "label": label[part],
            "num_samples": torch.tensor(6.0, dtype=wide),
        }
        h = None
        for block in blocks.values():
            h = block(h, batch, None)
        h["loss"].backward()
        total += h["loss"].item()
    assert total == pytest.approx(whole.item(), rel=1e-12)
    ours = [parameter.grad for block in blocks.values() for parameter in block.parameters()]
    assert all(
        torch.allclose(a, p.grad, rtol=1e-12) for a, p in zip(ours, plain.parameters(), strict=True)
    )


def test_the_last_module_may_be_another_one_too() -> None:
    assert [Net("twice").activation_shape(number) for number in range(2)] == [(3,), (5,)]


def test_a_generator_makes_only_its_own_module_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    construct = nn.Linear.__init__

    def noted(self: nn.Linear, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        made.append(self.weight.device.type)

    assert Net().num_blocks == 3  # found once
    monkeypatch.setattr(nn.Linear, "__init__", noted)
    build_blocks(Net(), Axis("tp"), [2], device="cpu")
    assert made[:2] == ["meta", "cpu"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", r"at least one module"),
        (
            "other input",
            r"its input 'numbers' is missing in the samples, which have x, label; try inputs = "
            r"'x'",
        ),
        ("no sample", r"samples must be dicts of arrays by name; they are of type int"),
        ("function", r"must yield torch.nn.Modules; number 0 is <.*tanh.*>"),
        ("misfit", r"module 0 \(Linear\) fails on \(1, 3\): "),
        ("a pair", r"module 0 \(LSTM\) fails"),
        ("a norm", r"has a BatchNorm1d \(itself\) in block 0"),
    ],
)
def test_rows_that_cannot_be_right(what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.spec = .*{text}"):
        _ = Net(what).num_blocks


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no loss", r"loss\(\) must return a number"),
        ("detached", "the losses must have a gradient"),
    ],
)
def test_losses_that_cannot_be_right(what: str, text: str) -> None:
    batch = {
        "numbers": torch.ones(2, 3),
        "label": torch.ones(2).long(),
        "num_samples": torch.tensor(2.0),
    }
    h = None
    *others, last = build_blocks(Net(what), Axis("tp"), range(3), device="cpu").values()
    for block in others:
        h = block(h, batch, None)
    with pytest.raises(ConfigError, match=rf"model\.spec = .*{text}"):
        last(h, batch, None)


@dataclass(frozen=True)
class Scales(Net):
    """Nothing but operators whose operations are not counted; its loss is 0."""

    unknown: int | None = 0

    def layers(self) -> Iterable[nn.Module]:
        return [nn.PReLU(3) for _ in range(4)]

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return 0 * out.sum()


def test_a_model_without_products_is_simulated_and_verified() -> None:
    trainer = Trainer(
        Scales(),
        parallel={"pp": 2},
        train={"micro_batch_size": 1},
        pipeline={"num_microbatches": 2},
    )
    assert stage_costs(JobPlan(trainer.config)).forward == [1.0, 1.0]
    assert trainer.verify(num_batches=1).ok


def test_settings_that_no_file_can_hold() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.unknown = None: must be a string, a number, .* the types " r"that TOML has",
    ):
        Trainer(Scales(unknown=None)).memory()


@dataclass(frozen=True)
class MadeFirst(Net):
    """Makes all modules before it yields the first one."""

    def _one_by_one(self) -> Iterable[nn.Module]:
        row = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        yield from row


def test_a_generator_may_make_several_modules_before_it_yields_one() -> None:
    wide = torch.float64
    apart = [
        build_blocks(MadeFirst(), Axis("tp"), [number], device="cpu", dtype=wide)[number]
        for number in range(3)
    ]
    listed = {
        (number, name): value
        for number, block in enumerate(apart)
        for name, value in block.named_parameters()
    }
    assert len(listed) == 6
    assert not any(value.is_meta for value in listed.values())
    for number, block in build_blocks(MadeFirst(), Axis("tp"), range(3)).items():
        for name, _, place in named_placements(block):
            drawn = place.init.draw(7)
            assert drawn.shape == listed[number, name].shape
            assert not drawn.is_meta


class Scaled(nn.Module):
    """Scales its input by a tensor that is a buffer, or only an attribute."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        if registers:
            self.register_buffer("scale", torch.arange(8.0))
            self.register_buffer("cache", torch.ones(8), persistent=False)
        else:
            self.scale = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@dataclass(frozen=True)
class WithScale(Net):
    def _one_by_one(self) -> Iterable[nn.Module]:
        return [nn.Linear(3, 8), Scaled(self.what == "buffer"), nn.Linear(8, 5)]


def test_a_tensor_that_is_no_buffer_is_refused() -> None:
    rule = "keeps the tensor 'scale' as a plain attribute.* try self.register_buffer"
    with pytest.raises(ConfigError, match=rule):
        build_blocks(WithScale("attribute"), Axis("tp"), range(3))


def test_buffers_have_their_values_on_the_device_of_the_stage() -> None:
    block = build_blocks(WithScale("buffer"), Axis("tp"), [1])[1]
    assert dict(block.named_buffers())["layer.scale"].tolist() == list(range(8))
    move_buffers(block, torch.device("meta"))  # a device that this machine has beside the CPU
    assert all(buffer.is_meta for buffer in block.buffers())
