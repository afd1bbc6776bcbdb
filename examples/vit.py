"""A vision transformer on images made on the spot: which way do the stripes run?

    torchrun --nproc-per-node 4 -m hybridpar train examples/vit.toml --parallel.tp 2 --parallel.pp 2
    hybridpar verify examples/vit.toml --grid tp=2,pp=2
"""

from dataclasses import dataclass

import numpy as np
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

    @property
    def num_blocks(self):
        return self.depth + 2

    @property
    def max_tp(self):
        return self.heads

    def activation_shape(self, number):
        return (self.image // self.patch) ** 2, self.width

    def block(self, number, build):
        kind = Patches if number == 0 else Layer if number <= self.depth else Head
        return kind(self, build)

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


class Patches(nn.Module):
    def __init__(self, model, build):
        super().__init__()
        self.patch, tokens = model.patch, model.activation_shape(0)[0]
        whole = {"gather_output": True, **build.factory}
        self.project = hp.ColumnParallelLinear(model.patch**2, model.width, build.axis, **whole)
        self.positions = hp.LearnedPositionEmbedding(tokens, model.width, build.axis, **build.factory)

    def forward(self, x, batch, key):
        image = batch["image"].to(self.project.weight.dtype)
        patches = rearrange(image, "b (r p) (c q) -> b (r c) (p q)", p=self.patch, q=self.patch)
        return self.project(patches) + self.positions(patches.shape[1])


class Layer(nn.Module):
    def __init__(self, model, build):
        super().__init__()
        axis, factory = build.axis, build.factory
        self.norms = nn.ModuleList(hp.LayerNorm(model.width, axis, **factory) for _ in range(2))
        self.attention = hp.ParallelAttention(model.width, model.heads, axis, causal=False, **factory)
        self.mlp = hp.ParallelMLP(model.width, 4 * model.width, axis, **factory)

    def forward(self, x, batch, key):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Head(nn.Module):
    def __init__(self, model, build):
        super().__init__()
        self.norm = hp.LayerNorm(model.width, build.axis, **build.factory)
        whole = {"gather_output": True, **build.factory}
        self.classify = hp.ColumnParallelLinear(model.width, model.classes, build.axis, **whole)

    def forward(self, x, batch, key):
        scores = self.classify(self.norm(x).mean(1))
        loss = nn.functional.cross_entropy(scores, batch["label"], reduction="sum")
        return {"loss": loss / batch["num_samples"]}
