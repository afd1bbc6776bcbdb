"""Losses of compressed links, in one process: the layer y = C(x) after each stage's last block.

Forward and backward, everything that went over a link on the grid goes through its codec here. A
codec's bytes depend on a token's features only, so slices over tp, replicas and larger
micro-batches make no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from hybridpar.job import JobPlan
from hybridpar.runtime.codecs import Codecs, through
from hybridpar.state.compression.codec import Codec


def add_boundaries(blocks: Mapping[int, nn.Module], job: JobPlan) -> None:
    """Add the links of `job` after a full model's blocks, by number. Without gradients, as in an
    evaluation, they are exact."""
    codecs = Codecs.of(job)
    for before, after in pairwise(job.split):
        forward, backward = (codecs.on(flow, after.start) for flow in (1, -1))
        if forward is None and backward is None:
            continue

        def cross(
            module: nn.Module,
            inputs: Any,
            out: Tensor,
            forward: Codec | None = forward,
            backward: Codec | None = backward,
        ) -> Tensor:
            return _Crossing.apply(out, forward, backward) if torch.is_grad_enabled() else out

        blocks[before.stop - 1].register_forward_hook(cross)


class _Crossing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Codec | None, backward: Codec | None) -> Tensor:
        if forward is not None and backward is not None and backward.follows:
            rows = x.reshape(-1, x.shape[-1])
            backward = backward.at(forward.places(forward.encode(rows), rows.shape[1]))
        ctx.codec = backward
        return x.view_as(x) if forward is None else through(forward, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return through(ctx.codec, dy), None, None
