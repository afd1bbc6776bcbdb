"""One pipeline stage: consecutive blocks of the model, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.models.build import Recomputation
from hybridpar.random import RandomKey

KEEP_ALL = Recomputation()
Input = Tensor | Callable[[], Tensor] | None


class Stage(nn.Module):
    """The blocks that this rank holds, under their global numbers (`blocks.3.attention.qkv.weight`).

    A recomputed block keeps nothing between forward and backward but its input; a stage that is recomputed as a whole
    nothing but the stage's. Of a layer that is recomputed selectively, outputs of norms and activations are made again.
    Shapes: x [b, s, h] (None for the stage that holds the embedding; or a function that makes it, each time that the
    stage runs) -> [b, s, h], or partial losses (0-d each) for the stage that holds the head.
    Source: arXiv 2006.09503, section 4.1 (whole stages).
    """

    def __init__(self, blocks: Mapping[int, nn.Module], recompute: Recomputation = KEEP_ALL):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        self.recompute = recompute
        for number in recompute.selective.intersection(blocks):
            blocks[number].remake()  # type: ignore[operator]  # recomputed_blocks has seen to it

    def forward(self, x: Input, batch: MicroBatch, key: RandomKey | None) -> Tensor | Losses:
        if self.recompute.whole:
            return _checkpointed(self._run, x, batch, key)
        return self._run(x, batch, key)

    def _run(self, x: Input, batch: MicroBatch, key: RandomKey | None) -> Tensor | Losses:
        out: Tensor | Losses | None = x if x is None or isinstance(x, Tensor) else x()
        for number, block in self.blocks.items():
            if int(number) in self.recompute.blocks and not self.recompute.whole:
                out = _checkpointed(block, out, batch, key)
            else:
                out = block(out, batch, key)
        assert out is not None
        return out


def _checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which autograd keeps the arguments only, where it is recording."""
    if not torch.is_grad_enabled():
        return function(*args)
    # masks are counter-based and the weights are bound again before the backward: no state to save
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
