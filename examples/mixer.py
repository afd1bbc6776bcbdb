"""An MLP-mixer (arXiv 2105.01601) of ordinary torch modules: pipelines, replicas and 2BW need nothing else.

    hybridpar train examples/mixer.toml
    hybridpar verify examples/mixer.toml --grid pp=2,dp=2
"""

from dataclasses import dataclass

from einops import rearrange, reduce
from torch import nn
from vit import ViT

import hybridpar as hp


@dataclass(frozen=True)
class Mixer(hp.SequentialSpec, ViT):  # the vision transformer's images
    depth: int = 4
    width: int = 64

    inputs = "image"
    max_tp = 1

    def layers(self):
        yield Patches(self)
        for _ in range(self.depth):
            yield Layer((self.image // self.patch) ** 2, self.width)
        yield nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.classes))

    def loss(self, scores, batch):
        return nn.functional.cross_entropy(reduce(scores, "b patch c -> b c", "mean"), batch["label"])


class Patches(nn.Linear):
    def __init__(self, model):
        super().__init__(model.patch**2, model.width)
        self.patch = model.patch

    def forward(self, image):
        return super().forward(rearrange(image, "b (r p) (c q) -> b (r c) (p q)", p=self.patch, q=self.patch))


class Layer(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        x = x + self.across(self.norms[0](x).mT).mT
        return x + self.within(self.norms[1](x))
