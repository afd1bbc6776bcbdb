"""Models as a user would write them, of the shapes that Li et al. (ISPASS 2021) trained: MLP,
AlexNet, ResNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import hybridpar as hp
from hybridpar.memory_behaviour.events import Span
from hybridpar.memory_behaviour.recording.recorder import Recorder
from hybridpar.prediction.ghost import Tracker, tensors_in

ITERATIONS = 5


def mlp() -> nn.Sequential:
    """The paper's: 32 to 64 to 10."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def alexnet(width: int = 64, size: int = 224, classes: int = 10) -> nn.Sequential:
    """AlexNet without dropout. width: channels of its first layer, 64 of the published one. size:
    of a square image."""
    channels = [width * n for n in (1, 3, 6, 4, 4)]
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 11, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(channels[0], channels[1], 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
    ]
    for before, after in pairwise(channels[1:]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6 if size > 200 else 2), nn.Flatten())
    with torch.no_grad():
        inputs = features(torch.zeros(1, 3, size, size)).shape[1]
    hidden = 64 * width
    return nn.Sequential(
        features,
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


Norm = Callable[[int], nn.Module]
"""A normalization of so many channels."""


class Residual(nn.Module):
    """Adds what `inner` makes to its input, which a 1x1 convolution brings to the same shape where
    it has another."""

    def __init__(self, inner: nn.Module, inputs: int, outputs: int, stride: int, norm: Norm):
        super().__init__()
        self.inner = inner
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.beside = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.beside(x))


def _basic(inputs: int, width: int, stride: int, norm: Norm) -> nn.Module:
    """Two 3x3 convolutions beside the input."""
    return Residual(
        nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            norm(width),
        ),
        inputs,
        width,
        stride,
        norm,
    )


def _bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> nn.Module:
    """1x1, 3x3 and 1x1 convolutions beside the input."""
    return Residual(
        nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            norm(4 * width),
        ),
        inputs,
        4 * width,
        stride,
        norm,
    )


def resnet(
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
    classes: int = 10,
    *,
    bottleneck: bool = True,
    norm: Norm = nn.BatchNorm2d,
) -> nn.Sequential:
    """ResNet; the published one with 50 layers by default. Without `bottleneck`, that with 34."""
    block, growth = (_bottleneck, 4) if bottleneck else (_basic, 1)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        norm(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for level, count in enumerate(blocks):
        for i in range(count):
            layers.append(block(inputs, width << level, 2 if level and not i else 1, norm))
            inputs = growth * width << level
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


# -- the same as models of hybridpar


def _groups(channels: int) -> nn.Module:
    """Instead of batch normalization, which other micro-batches would change."""
    return nn.GroupNorm(min(4, channels), channels)


_MADE: dict[str, Callable[..., nn.Sequential]] = {
    "alexnet": alexnet,
    "resnet18": partial(resnet, blocks=(2, 2, 2, 2), bottleneck=False, norm=_groups),
    "resnet50": partial(resnet, norm=_groups),
}


@lru_cache(maxsize=4)
def _shapes(model: Images) -> list[tuple[int, ...]]:
    """Shapes of one sample behind each block."""
    with torch.device("meta"):
        x = torch.zeros(1, 3, model.size, model.size)
        found = []
        for block in model.layers():
            x = block(x)
            found.append(tuple(x.shape[1:]))
    return found


@dataclass(frozen=True)
class Images(hp.ModelSpec):
    """A classifier of random images, a block for each of its layers. name: alexnet, resnet18 or
    resnet50."""

    name: str = "alexnet"
    width: int = 64
    size: int = 224
    classes: int = 10

    def layers(self) -> list[nn.Module]:
        """In order; AlexNet's first ones are a row of their own."""
        sized = {"size": self.size} if self.name == "alexnet" else {}
        made = _MADE[self.name](width=self.width, classes=self.classes, **sized)
        return [layer for one in made for layer in (one if type(one) is nn.Sequential else [one])]

    @property
    def num_blocks(self) -> int:
        return len(_shapes(self))

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return _shapes(self)[number]

    def block(self, number: int, build: Any) -> nn.Module:
        return _Block(self.layers()[number], number, self.num_blocks)

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng([seed, number])
        image = random.normal(size=(3, self.size, self.size)).astype(np.float32)
        return {"image": image, "label": random.integers(self.classes)}


class _Block(nn.Module):
    def __init__(self, inner: nn.Module, number: int, num_blocks: int):
        super().__init__()
        self.inner = inner
        self.is_first = number == 0
        self.is_last = number == num_blocks - 1

    def forward(self, x: Tensor | None, batch: dict[str, Any], key: Any) -> Any:
        y = self.inner(batch["image"] if self.is_first else x)
        if not self.is_last:
            return y
        return {"loss": cross_entropy(y, batch["label"], reduction="sum") / batch["num_samples"]}


# -- recorded


def trained(
    make: Callable[[], nn.Module], shape: Sequence[int], batch: int, *, ghosts: bool
) -> list[Span]:
    """The memory events of ITERATIONS steps of SGD with momentum; on ghosts, nothing is computed.

    shape: of a sample.
    """
    tracker = Tracker(torch.device("cpu"))
    tracker.make_ghosts_of_integers(True)
    torch.manual_seed(0)
    with tracker if ghosts else nullcontext():
        model = make()
        x = torch.randn(batch, *shape)
        y = torch.randint(10, (batch,))
        return recorded(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), x, y)


def recorded(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, *, to_none: bool = True
) -> list[Span]:
    """The memory events of ITERATIONS steps of training. Shapes: x [batch, ..], y [batch]. to_none:
    as in zero_grad."""
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    recorder.adopt("batch", [x, y])

    def name(*_: object) -> None:
        recorder.adopt("weights", (*model.parameters(), *model.buffers()))
        recorder.adopt("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        recorder.adopt(
            "optimizer", tensors_in([tuple(state.values()) for state in optimizer.state.values()])
        )

    name()
    optimizer.register_step_post_hook(name)
    with recorder:
        for iteration in range(ITERATIONS):
            recorder.step = iteration + 1
            optimizer.zero_grad(set_to_none=to_none)
            cross_entropy(model(x), y).backward()
            optimizer.step()
    recorder.close()
    return spans
