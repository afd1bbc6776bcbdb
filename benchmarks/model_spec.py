"""Claim: a GPT that is a model of one's own (`ModelSpec`) trains as fast as the built-in one,
within 1 %.

    python -m benchmarks.model_spec

Both sides are the same blocks in the engine that users run: one as model.kind = "gpt", one built by
a class of the benchmark's, whose outputs are compared with what it says of them. In one process, by
turns. That no operator is added is a test: tests/planner/test_own_models.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.common import (
    OURS,
    SHAPES,
    OurStep,
    arguments,
    case,
    engine_config,
    parse,
    race,
    report,
)
from hybridpar import ModelConfig, ModelSpec, ProcessGrid
from hybridpar.models.build import build_blocks
from hybridpar.models.custom_blocks import Build


@dataclass(frozen=True)
class OwnGPT(ModelSpec):
    """The blocks of `gpt`, as a user's model has them."""

    gpt: ModelConfig = SHAPES["gpt_tiny"].model  # frozen
    losses = ("lm",)

    @property
    def num_blocks(self) -> int:
        return self.gpt.num_blocks

    @property
    def tokens_per_sample(self) -> int:  # type: ignore[override]
        return self.gpt.seq_length

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return self.gpt.activation_shape(number)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return self.gpt.num_targets(sample)

    def block(self, number: int, build: Build) -> nn.Module:
        return build_blocks(self.gpt, build.axis, [number], **build.factory)[number]


def measure(name: str, rounds: int) -> dict[str, Any]:
    shape = SHAPES[name]
    config = engine_config(shape, num_microbatches=4)
    own = replace(config, model=OwnGPT(shape.model))
    found = race(
        {
            OURS: OurStep(config, shape, ProcessGrid()),
            "of one's own": OurStep(own, shape, ProcessGrid()),
        },
        rounds,
        tolerance=1e-6,
    )
    return case(name, found, 4 * shape.microbatch_tokens, shape=name)


def main() -> None:
    args = parse(arguments(__doc__, rounds=40, shapes=["gpt_tiny", "small"]))
    torch.set_num_threads(1)
    report("model_spec", (measure(name, args.rounds) for name in args.shapes), args)


if __name__ == "__main__":
    main()
