"""An encoder-decoder like T5 that learns to sort: the encoder's output travels with the decoder's, stage by stage.

    torchrun --nproc-per-node 4 -m hybridpar train examples/t5.toml --parallel.tp 2 --parallel.pp 2
    hybridpar verify examples/t5.toml --grid tp=2,pp=2
"""

from dataclasses import dataclass

import numpy as np
from einops import rearrange
from torch import nn

import hybridpar as hp


@dataclass(frozen=True)
class T5(hp.ModelSpec):
    layers: int = 2  # of the encoder, and as many of the decoder
    width: int = 64
    heads: int = 4
    vocabulary: int = 32
    length: int = 12
    max_tp = 2  # heads are dealt out evenly here

    @property
    def num_blocks(self):  # encoder's embedding and layers, decoder's embedding and layers, head
        return 2 * self.layers + 3

    def activation_shape(self, number):
        shape = self.length, self.width
        return {"encoder": shape} if number <= self.layers else {"encoder": shape, "decoder": shape}

    def block(self, number, build):
        kinds = [Embedding, *[EncoderLayer] * self.layers, Embedding, *[DecoderLayer] * self.layers, Head]
        return kinds[number](self, build, "encoder" if number <= self.layers else "decoder")

    def sample(self, number, seed):
        numbers = np.random.default_rng([seed, number]).integers(1, self.vocabulary, self.length)
        ordered = np.sort(numbers)
        return {"encoder": numbers, "decoder": np.concatenate(([0], ordered[:-1])), "label": ordered}

    def dataset(self, part):
        return [self.sample(i, seed=ord(part[0])) for i in range({"train": 4000, "valid": 400}[part])]


class Embedding(nn.Module):
    def __init__(self, model, build, part):
        super().__init__()
        self.part = part
        self.words = hp.VocabParallelEmbedding(model.vocabulary, model.width, build.axis, **build.factory)
        self.positions = hp.LearnedPositionEmbedding(model.length, model.width, build.axis, **build.factory)

    def forward(self, x, batch, key):
        tokens = batch[self.part]
        return (x or {}) | {self.part: self.words(tokens) + self.positions(tokens.shape[1])}


class EncoderLayer(nn.Module):
    def __init__(self, model, build, part):
        super().__init__()
        width, axis, factory = model.width, build.axis, build.factory
        self.norms = nn.ModuleList(hp.LayerNorm(width, axis, **factory) for _ in range(2 + (part == "decoder")))
        self.attention = hp.ParallelAttention(width, model.heads, axis, causal=part == "decoder", **factory)
        self.mlp = hp.ParallelMLP(width, 4 * width, axis, **factory)

    def forward(self, x, batch, key):
        e = x["encoder"] + self.attention(self.norms[0](x["encoder"]))
        return {"encoder": e + self.mlp(self.norms[1](e))}


class DecoderLayer(EncoderLayer):
    def __init__(self, model, build, part):
        super().__init__(model, build, part)
        width, heads, axis, factory = model.width, model.heads, build.axis, build.factory
        self.heads = heads // axis.size  # tp ranks have equal numbers of heads
        self.queries = hp.ColumnParallelLinear(width, width, axis, **factory)
        self.memory = hp.ColumnParallelLinear(width, 2 * width, axis, **factory)
        self.out = hp.RowParallelLinear(width, width, axis, **factory)

    def forward(self, x, batch, key):
        d = x["decoder"] + self.attention(self.norms[0](x["decoder"]))
        q = rearrange(self.queries(self.norms[2](d)), "b t (n d) -> b n t d", n=self.heads)
        k, v = rearrange(self.memory(x["encoder"]), "b s (n two d) -> two b n s d", two=2, n=self.heads)
        read = nn.functional.scaled_dot_product_attention(q, k, v)
        d = d + self.out(rearrange(read, "b n t d -> b t (n d)"))
        return x | {"decoder": d + self.mlp(self.norms[1](d))}


class Head(nn.Module):
    def __init__(self, model, build, part):
        super().__init__()
        self.norm = hp.LayerNorm(model.width, build.axis, **build.factory)
        whole = {"gather_output": True, **build.factory}
        self.project = hp.ColumnParallelLinear(model.width, model.vocabulary, build.axis, **whole)

    def forward(self, x, batch, key):
        logits = self.project(self.norm(x["decoder"]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["label"].flatten(), reduction="sum")
        return {"loss": loss / batch["num_samples"] / logits.shape[1]}
