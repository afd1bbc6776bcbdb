"""A custom model that provides what GPT and BERT have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import hybridpar as hp
from hybridpar.models.build import BlockOptions, build_blocks


@dataclass(frozen=True)
class CustomGPT(hp.ModelSpec):
    """The blocks of a GPT as a user's class has them, with all that a GPT has."""

    depth: int = 2
    sequence_parallel = True
    context_parallel = True
    cuda_graph_safe = True
    layers_field = "depth"
    max_tp = 6
    losses = ("lm",)

    @property
    def text_format(self) -> hp.ModelConfig:
        return hp.ModelConfig(
            num_layers=self.depth,
            hidden_size=24,
            num_heads=6,
            seq_length=37,
            vocab_size=61,
            tie_embeddings=False,
            dropout=0.1,
        )

    @property
    def num_blocks(self) -> int:
        return self.depth + 2

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (37, 24)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return self.text_format.num_targets(sample)

    def block(self, number: int, build: hp.Build) -> nn.Module:
        options = BlockOptions(
            build.kernels,
            build.sequence,
            cp=build.context.axis,
            cp_comm=build.context.comm,
        )
        blocks = build_blocks(
            self.text_format, build.axis, [number], options=options, **build.factory
        )
        return blocks[number]
