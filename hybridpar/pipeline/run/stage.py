"""One pipeline stage: consecutive blocks of the model, run one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.random import RandomKey


class Stage(nn.Module):
    """The blocks that this rank holds, under their global numbers (`blocks.3.attention.qkv.weight`).

    Shapes: x [b, s, h] (None for the stage that holds the embedding) -> [b, s, h], or partial losses (0-d each) for
    the stage that holds the head.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], recompute: Collection[int] = ()):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        self.recompute = frozenset(str(number) for number in recompute)

    def forward(self, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> Tensor | Losses:
        out: Tensor | Losses | None = x
        for number, block in self.blocks.items():
            if number in self.recompute and torch.is_grad_enabled():
                # masks are counter-based and the weights are bound again before the backward: no state to save
                out = checkpoint(block, out, batch, key, use_reentrant=False, preserve_rng_state=False)
            else:
                out = block(out, batch, key)
        assert out is not None
        return out
