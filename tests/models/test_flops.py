"""Operations of custom models, against numbers by hand: convolutions, attention, and what needs no
gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hybridpar import SequentialSpec
from hybridpar.config import Config, ParallelConfig
from hybridpar.job.stage_split import stage_split
from hybridpar.models.cost import block_flops, training_flops_per_token
from hybridpar.models.flops import BlockFlops, count_flops


class Row(SequentialSpec):
    """Modules in a row whose samples are zeros of one shape."""

    shape: tuple[int, ...] = (8,)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.float().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.zeros(self.shape, np.float32)}


class Residual(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.GroupNorm(8, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.GroupNorm(8, out),
        )
        same = width == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.body(x) + self.shortcut(x)).relu()
        return out


@dataclass(frozen=True)
class ResNet(Row):
    shape = (3, 32, 32)

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU())
        yield Residual(32, 32, 1)
        yield Residual(32, 64, 2)
        yield nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_a_convolution_counts_its_weights_at_each_place_of_its_output() -> None:
    first = 2 * 27 * 32 * 32**2
    second = 2 * 2 * 9 * 32 * 32 * 32**2
    third = 2 * (9 * 32 * 64 + 9 * 64 * 64 + 32 * 64) * 16**2
    head = 2 * 64 * 10
    # an image needs no gradient
    assert training_flops_per_token(ResNet()) == 2 * first + 3 * (second + third + head)
    assert [block.forward for block in block_flops(ResNet())] == [first, second, third, head]
    config = Config(model=ResNet(), parallel=ParallelConfig(pp=2))
    assert [len(blocks) for blocks in stage_split(config)] == [2, 2]


class Products(nn.Module):
    """Operators that torch's own counter knows besides linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, x, torch.einsum("bij,bjk->bik", x, x))


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (nn.Conv1d(4, 8, 5), (4, 20), 2 * 16 * 8 * 4 * 5),
        (nn.Conv2d(8, 16, 3, groups=4), (8, 10, 12), 2 * 8 * 10 * 16 * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 10, 12), 2 * 120 * 8 * 9),
        (nn.Conv3d(2, 4, 2, stride=2), (2, 4, 6, 8), 2 * 24 * 4 * 2 * 8),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), (8, 5, 6), 2 * 30 * 8 * 4 * 4),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=4), (8, 5, 6), 2 * 30 * 8 * 4),
        (Products(), (6, 6), 2 * 2 * 6**3),
    ],
)
def test_layers_of_torch(layer: nn.Module, shape: tuple[int, ...], forward: int) -> None:
    @dataclass(frozen=True)
    class Model(Row):
        def layers(self) -> Iterable[nn.Module]:
            yield nn.Linear(shape[-1], shape[-1])
            yield layer

    Model.shape = shape
    found = count_flops(Model())
    assert found is not None
    assert found[1] == BlockFlops(forward, 2 * forward), "the gradients of both factors"


WIDTH = 32
HEADS = 4
LENGTH = 16
WORDS = 50


class Layer(nn.Module):
    """A transformer's layer of plain modules."""

    def __init__(self, causal: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(*qkv, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


@dataclass(frozen=True)
class GPT(Row):
    depth: int = 2
    causal: bool = True

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Embedding(WORDS, WIDTH)
        for _ in range(self.depth):
            yield Layer(self.causal)
        yield nn.Linear(WIDTH, WORDS)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(out.flatten(0, 1), batch["x"].flatten())

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.zeros(LENGTH, np.int64)}


@pytest.mark.parametrize("causal", [True, False])
def test_a_gpt_of_plain_modules_counts_as_the_built_in_one(causal: bool) -> None:
    weights = 12 * WIDTH**2
    attention = (6 if causal else 12) * WIDTH * LENGTH
    token = 2 * (6 * weights + attention) + 6 * WIDTH * WORDS
    assert training_flops_per_token(GPT(causal=causal)) == LENGTH * token


@dataclass(frozen=True)
class ViT(Row):
    shape = (3, 16, 16)

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(2), Transpose())
        yield Layer(causal=False)
        yield nn.Linear(WIDTH, 10)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def test_a_vision_transformer() -> None:
    places = 16
    patches = 2 * 48 * WIDTH * places
    layer = 2 * 12 * WIDTH**2 * places + 4 * places**2 * WIDTH
    assert training_flops_per_token(ViT()) == 2 * patches + 3 * (layer + 2 * WIDTH * 10 * places)


@dataclass(frozen=True)
class Frozen(Row):
    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(8, 8).requires_grad_(False)
        yield nn.Linear(8, 8)
        yield nn.Linear(8, 8).requires_grad_(False)


def test_frozen_layers_need_fewer_gradients() -> None:
    each = 2 * 8 * 8
    assert count_flops(Frozen()) == (
        BlockFlops(each, 0),
        BlockFlops(each, each),
        BlockFlops(each, each),
    )


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor | None, batch: dict[str, Tensor], key: Any) -> Any:
        x = self.layer(batch["x"] if x is None else x)
        return x if torch.isfinite(x).all() else x + 1


@dataclass(frozen=True)
class Reading(ResNet):
    """Its first block looks at values."""

    shape = (8,)

    def layers(self) -> Iterable[nn.Module]:
        yield from (nn.Linear(8, 8), nn.Linear(8, 8))

    def block(self, number: int, build: Any) -> nn.Module:
        return Reads() if number == 0 else super().block(number, build)


def test_blocks_that_need_values_count_their_weights() -> None:
    assert count_flops(Reading()) is None
    assert block_flops(Reading()) == (BlockFlops(128, 256), BlockFlops(128, 256))
