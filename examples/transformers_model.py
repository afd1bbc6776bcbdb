"""A decoder of the transformers library, unchanged: Qwen3, whose modules know nothing of pipelines.

    torchrun --nproc-per-node 4 -m hybridpar train examples/transformers_model.toml --parallel.pp 4
    hybridpar verify examples/transformers_model.toml --grid pp=2,dp=2
"""

from dataclasses import dataclass

import numpy as np
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

import hybridpar as hp


@dataclass(frozen=True)
class Qwen3(hp.SequentialSpec):
    depth: int = 6
    width: int = 128
    heads: int = 8
    groups: int = 2
    vocab: int = 256
    length: int = 64

    inputs = "tokens"
    counts = "tokens"

    @property
    def tokens_per_sample(self):
        return self.length

    def layers(self):
        config = Qwen3Config(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=3 * self.width, head_dim=32,
            num_hidden_layers=self.depth, num_attention_heads=self.heads, num_key_value_heads=self.groups,
            max_position_embeddings=self.length, attn_implementation="sdpa")
        yield nn.Embedding(self.vocab, self.width)
        for i in range(self.depth):
            yield Layer(config, i)
        yield nn.Sequential(Qwen3RMSNorm(self.width), nn.Linear(self.width, self.vocab, bias=False))

    def loss(self, scores, batch):
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())

    def sample(self, number, seed):
        random = np.random.default_rng([seed, number])
        # the next number is the one before plus a step, which the first two tell
        text = (random.integers(self.vocab) + random.integers(1, 9) * np.arange(self.length + 1)) % self.vocab
        return {"tokens": text[:-1], "labels": text[1:]}

    def dataset(self, part):
        size, seed = {"train": (4000, 1), "valid": (400, 2)}[part]
        return [self.sample(i, seed) for i in range(size)]


class Layer(nn.Module):
    """A layer of the library, with the positions that its model would hand to it."""

    def __init__(self, config, number):
        super().__init__()
        self.layer, self.positions = Qwen3DecoderLayer(config, number), Qwen3RotaryEmbedding(config)

    def forward(self, x):
        numbers = x.new_ones(1, x.shape[1]).cumsum(1) - 1
        out = self.layer(x, position_embeddings=self.positions(x, numbers))
        return out[0] if isinstance(out, tuple) else out
