"""An MLP-mixer (arXiv 2105.01601) of ordinary torch modules: pipelines, replicas and 2BW need nothing else.

    hybridpar train examples/mixer.toml
    hybridpar verify examples/mixer.toml --grid pp=2,dp=2
"""

from dataclasses import dataclass

from einops import rearrange
from torch import nn
from vit import ViT


@dataclass(frozen=True)
class Mixer(ViT):
    depth: int = 4
    width: int = 64
    max_tp = 1

    def block(self, number, build):
        if number == 0:
            return Patches(self)
        return Layer(self) if number <= self.depth else Head(self)


class Patches(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.patch, self.project = model.patch, nn.Linear(model.patch**2, model.width)

    def forward(self, x, batch, key):
        image = batch["image"].to(self.project.weight.dtype)
        return self.project(rearrange(image, "b (r p) (c q) -> b (r c) (p q)", p=self.patch, q=self.patch))


class Layer(nn.Module):
    def __init__(self, model):
        super().__init__()
        tokens, width = model.activation_shape(0)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x, batch, key):
        x = x + self.across(self.norms[0](x).mT).mT
        return x + self.within(self.norms[1](x))


class Head(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm, self.classify = nn.LayerNorm(model.width), nn.Linear(model.width, model.classes)

    def forward(self, x, batch, key):
        scores = self.classify(self.norm(x).mean(1))
        loss = nn.functional.cross_entropy(scores, batch["label"], reduction="sum")
        return {"loss": loss / batch["num_samples"]}
