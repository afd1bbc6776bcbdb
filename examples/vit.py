"""A vision transformer on images made on the spot: which way do the stripes run?

    torchrun --nproc-per-node 4 -m hybridpar train examples/vit.toml --parallel.tp 2 --parallel.pp 2
    hybridpar verify examples/vit.toml --grid tp=2,pp=2
"""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import nn

import hybridpar as hp


@dataclass(frozen=True)
class ViT(hp.ModelSpec):
    depth: int = 6
    width: int = 96
    heads: int = 6
    image: int = 32
    patch: int = 4
    classes: int = 8

    num_blocks = property(lambda self: self.depth + 2)
    max_tp = property(lambda self: self.heads)

    def activation_shape(self, number):
        return (self.image // self.patch) ** 2, self.width

    def block(self, number, build):
        if number == 0:
            return Patches(self)
        return Layer(self, build) if number <= self.depth else Head(self)

    def sample(self, number, seed):
        random = np.random.default_rng([seed, number])
        label = random.integers(self.classes)
        y, x = np.mgrid[: self.image, : self.image]
        angle = np.pi * label / self.classes
        wave = np.sin(random.uniform(0.4, 0.9) * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
        return {"image": (wave + random.normal(0, 0.5, wave.shape)).astype(np.float32), "label": label}

    def dataset(self, part):
        size, seed = {"train": (4000, 1), "valid": (400, 2)}[part]
        return [self.sample(i, seed) for i in range(size)]


class Patches(nn.Linear):  # an ordinary module: every tp rank has all of it
    def __init__(self, model):
        super().__init__(model.patch**2, model.width)
        self.patch, self.positions = model.patch, nn.Parameter(0.02 * torch.randn(model.activation_shape(0)))

    def forward(self, x, batch, key):
        return self.positions + super().forward(
            rearrange(batch["image"], "b (r p) (c q) -> b (r c) (p q)", p=self.patch, q=self.patch))


class Layer(nn.Module):  # of hybridpar's layers: divided over tp
    def __init__(self, model, build):
        super().__init__()
        axis, factory = build.axis, build.factory
        self.norms = nn.ModuleList(hp.LayerNorm(model.width, axis, **factory) for _ in range(2))
        self.attention = hp.ParallelAttention(model.width, model.heads, axis, causal=False, **factory)
        self.mlp = hp.ParallelMLP(model.width, 4 * model.width, axis, **factory)

    def forward(self, x, batch, key):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Head(nn.Sequential):
    def __init__(self, model):
        super().__init__(nn.LayerNorm(model.width), nn.Linear(model.width, model.classes))

    def forward(self, x, batch, key):
        loss = nn.functional.cross_entropy(super().forward(x).mean(1), batch["label"], reduction="sum")
        return {"loss": loss / batch["num_samples"]}
