"""A custom model that provides what GPT and BERT have."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
            ep=build.ep,
            expert_load=build.expert_load,
        )
        blocks = build_blocks(
            self.text_format, build.axis, [number], options=options, **build.factory
        )
        return blocks[number]


@dataclass(frozen=True)
class CustomExperts(CustomGPT):
    """A CustomGPT with experts in all layers but the first, which it describes."""

    depth: int = 3
    layers_field = ""

    @property
    def text_format(self) -> hp.ModelConfig:
        return replace(
            super().text_format,
            activation="swiglu",
            bias=False,
            num_experts=4,
            expert_ffn_hidden_size=14,
            router_balance_loss=0.1,
            router_bias_rate=0.01,
            moe_layers="011",
        )

    @property
    def routed_experts(self) -> hp.RoutedExperts | None:
        return hp.RoutedExperts(4, bias_rate=0.01, has_losses=True, blocks=(2, 3))


@dataclass(frozen=True)
class ExpertsOfOwnSamples(CustomExperts):
    """A CustomExperts that does not say that its samples are a GPT's."""

    text_format = None
    tokens_per_sample = 37

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return CustomExperts().text_format.sample(number, seed)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return CustomExperts().num_targets(sample)

    def block(self, number: int, build: hp.Build) -> nn.Module:
        return CustomExperts().block(number, build)
