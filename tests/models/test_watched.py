"""Custom blocks in training and evaluation; draws from torch's generator and changing buffers are
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar import ModelSpec, SequentialSpec
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.random import RandomKey

KEY = RandomKey.of(0, 0, 0)


class Layer(nn.Module):
    """A module whose forward is one of CHANGES or DRAWS."""

    def __init__(self, what: str):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.what = what
        for name in ("mean", "count"):
            self.register_buffer(name, torch.zeros(4 if name == "mean" else ()))
        self.register_buffer("late", None)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.rrelu = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return (
            x
            if self.what == "nothing"
            else {**CHANGES, **CACHES, **DRAWS, **QUIET}[self.what](self, x)
        )


def changed(change: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(layer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            change(layer, x)
        return x

    return forward


CHANGES = {
    "running mean": changed(lambda layer, x: layer.mean.mul_(0.9).add_(x.mean(0))),
    "counter in place": changed(lambda layer, x: layer.count.add_(1)),
    "counter anew": changed(lambda layer, x: setattr(layer, "count", layer.count + 1)),
    "through data": changed(lambda layer, x: layer._buffers.update(mean=x.mean(0))),
    "data": changed(lambda layer, x: layer.mean.data.add_(1.0)),
    "gone": changed(lambda layer, x: setattr(layer, "mean", None)),
}
CACHES = {
    "filled": changed(lambda layer, x: setattr(layer, "late", torch.arange(4.0))),
    "grown": changed(
        lambda layer, x: setattr(layer, "table", torch.arange(len(layer.table) + 1.0))
    ),
    "made again": changed(lambda layer, x: setattr(layer, "table", torch.arange(4.0))),
    "not persistent": changed(lambda layer, x: layer.cache.copy_(x[0])),
}
DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bernoulli_": lambda layer, x: x * torch.empty_like(x).bernoulli_(0.5),
    "alpha_dropout": lambda layer, x: functional.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda layer, x: x * torch.rand_like(x),
    "randn": lambda layer, x: x + torch.randn(4, device=x.device),
    "rrelu": lambda layer, x: layer.rrelu(x),
    "gumbel": lambda layer, x: functional.gumbel_softmax(x),
    "attention": lambda layer, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "multinomial": lambda layer, x: x * torch.multinomial(x.softmax(1), 4),
}
QUIET: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attention without dropout": lambda layer, x: functional.scaled_dot_product_attention(x, x, x),
    "dropout of none": lambda layer, x: functional.dropout(x, 0.0, training=True),
    "own generator": lambda layer, x: x * torch.rand(4, generator=torch.Generator().manual_seed(3)),
}


@dataclass(frozen=True)
class Row(SequentialSpec):
    what: str = "nothing"

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(3, 4)
        yield Layer(self.what)
        yield nn.Linear(4, 1)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.square().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.ones(3, np.float32)}


class Block(nn.Module):
    def __init__(self, what: str):
        super().__init__()
        self.layer = Layer(what)
        self.frozen = nn.Identity().eval()

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> Tensor:
        return self.layer(x)


@dataclass(frozen=True)
class Blocks(ModelSpec):
    what: str = "nothing"

    @property
    def num_blocks(self) -> int:
        return 3

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (4,)

    def block(self, number: int, build: Any) -> nn.Module:
        return Block(self.what)


def block_of(what: str) -> nn.Module:
    block = build_blocks(Blocks(what), Axis("tp"), [1], device="cpu")[1]
    for parameter in block.parameters():
        nn.init.ones_(parameter)
    return block


def test_a_draw_that_only_a_later_forward_makes_is_refused() -> None:
    block = block_of("nothing")
    for _ in range(2):
        block(torch.ones(2, 4), {}, KEY)
    block.layer.what = "bernoulli_"
    with pytest.raises(ConfigError, match=r"block 1.* draws from torch's global generator"):
        block(torch.ones(2, 4), {}, KEY)


def test_the_key_decides_between_training_and_evaluation() -> None:
    block = block_of("nothing")
    for key in (KEY, None, KEY, None):
        block(torch.ones(2, 4), {}, key)
        assert (
            block.training
            == block.layer.training
            == block.layer.rrelu.training
            == (key is not None)
        )
        assert not block.frozen.training


@pytest.mark.parametrize("what", DRAWS)
def test_draws_from_the_global_generator_are_refused_in_the_first_forward(what: str) -> None:
    with pytest.raises(
        ConfigError, match=r"block 1 \(Block\) .*draws from torch's global generator \(\w"
    ):
        block_of(what)(torch.ones(2, 4), {}, KEY)
    assert torch.rand(2).shape == (2,)  # the mode is gone


@pytest.mark.parametrize("what", ["bernoulli_", "attention"])
def test_draws_of_a_row_are_refused_before_any_block_is_built(what: str) -> None:
    with pytest.raises(
        ConfigError, match=r"module 1 \(Layer\) .*draws from torch's global generator"
    ):
        Row(what).num_blocks  # noqa: B018


def test_draws_of_training_are_allowed_in_evaluation_and_found_in_training() -> None:
    block = block_of("rrelu")
    block(torch.ones(2, 4), {}, None)
    with pytest.raises(ConfigError, match="rrelu"):
        block(torch.ones(2, 4), {}, KEY)


@pytest.mark.parametrize("what", [*QUIET, *CACHES])
@pytest.mark.parametrize("key", [KEY, None])
def test_caches_and_blocks_without_draws_are_allowed(what: str, key: Any) -> None:
    block = block_of(what)
    for _ in range(3):
        block(torch.ones(2, 4), {}, key)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("key", [KEY, None])
def test_a_buffer_that_changes_is_refused_at_once(what: str, key: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"block 1 \(Block\) .*changes its buffer 'layer\.(mean|count)'"
    ):
        block_of(what)(torch.ones(2, 4), {}, key)


def test_the_block_of_a_row_has_the_name_of_its_module() -> None:
    blocks = build_blocks(Row("running mean"), Axis("tp"), [1], device="cpu")
    with pytest.raises(ConfigError, match=r"block 1 \(Layer\) .*changes its buffer 'layer.mean'"):
        blocks[1](torch.ones(2, 4), {}, KEY)
