"""One pipeline stage: consecutive blocks of the model, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hybridpar.autograd import recomputed
from hybridpar.config import ModelSpec
from hybridpar.grid import ProcessGrid
from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.models.build import BlockOptions, Recomputation, build_blocks
from hybridpar.nn.recomputable import Recomputable
from hybridpar.random import RandomKey
from hybridpar.runtime.packing import Packing
from hybridpar.state import StatePolicy
from hybridpar.state.residency.segments import Segments

KEEP_ALL = Recomputation()
Input = Tensor | Callable[[], Tensor] | None


class Stage(nn.Module):
    """The blocks that this rank holds, under their global numbers
    (`blocks.3.attention.qkv.weight`).

    Between forward and backward a recomputed block keeps only its input, and a stage that is
    recomputed as a whole keeps only the stage's input. A layer with selective recomputation
    recomputes the outputs of norms and activations.

    Args:
        blocks: The blocks, by number.
        recompute: Blocks that the backward recomputes.
        model: Given if stages exchange several tensors, packed as one.

    Shapes: x [b, s, h] (None with the embedding; or a function that returns it in each run) -> [b,
    s, h], or partial losses (0-d each) with the head.
    Source: arXiv 2006.09503, section 4.1 (whole stages).
    """

    def __init__(
        self,
        blocks: Mapping[int, nn.Module],
        recompute: Recomputation = KEEP_ALL,
        model: ModelSpec | None = None,
    ):
        super().__init__()
        self._into = self._out = None
        if model is not None:
            first = min(blocks)
            last = max(blocks)
            self._into = Packing.after(model, first - 1) if first else None
            self._out = Packing.after(model, last) if last < model.num_blocks - 1 else None
        self.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        self.recompute = recompute
        self.is_frozen = not any(parameter.requires_grad for parameter in self.parameters())
        """Nothing here is trained: without an input that needs a gradient, the output needs none
        either."""
        self.counters: dict[int, Any] = {
            number: module
            for number, block in blocks.items()
            for module in block.modules()
            if hasattr(module, "take_loads")
        }
        """Layers that count the loads of their experts, by block."""
        for number in recompute.selective.intersection(blocks):
            blocks[number].recompute()  # type: ignore[operator]  # recomputed_blocks has seen to it

    def forward(self, x: Input, batch: MicroBatch, key: RandomKey | None) -> Tensor | Losses:
        if self.recompute.whole:
            # Dropout masks are counter-based and the weights are bound again before the backward,
            # so there is no state to save.
            return recomputed(self._run, x, batch, key)
        return self._run(x, batch, key)

    def _run(self, x: Input, batch: MicroBatch, key: RandomKey | None) -> Tensor | Losses:
        out: Any = x if x is None or isinstance(x, Tensor) else x()
        if self._into is not None:
            out = self._into.unpack(out)
        for number, block in self.blocks.items():
            if int(number) in self.recompute.blocks and not self.recompute.whole:
                out = recomputed(block, out, batch, key)
            else:
                out = block(out, batch, key)
        if isinstance(out, Recomputable):
            out = out.value
        return out if self._out is None else self._out.pack(out)


def build_held_blocks(
    states: StatePolicy, grid: ProcessGrid, segments: Segments
) -> dict[int, nn.Module]:
    """Build the blocks of this rank's stages on the meta device, keyed by block number."""
    config = states.config
    numbers = [n for ranges in segments.of_stage.values() for blocks in ranges for n in blocks]
    options = BlockOptions.of(config, grid)
    return build_blocks(config.model, grid.tp, numbers, options=options, dtype=states.dtype)
