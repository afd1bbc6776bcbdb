"""RMSNorm of queries and keys over all features of a projection, which the tp ranks split by heads.

The ranks add up the squares of their features: one small all-reduce forward, and one backward of the
products of gradient and features. A key head that several ranks hold counts on the first alone.
Source: OLMo 2, arXiv 2501.00656, section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_reduce
from hybridpar.grid import Axis
from hybridpar.nn.placement import Init, ParallelModule, Placement, Shard


class HeadWeights(ParallelModule):
    """The weight of a norm over all features of a projection; a rank holds its heads' features.

    Args:
        num_heads: Heads of the projection on all ranks.
        shard: The features of each rank.
        zero_centered: Whether the norm multiplies by 1 + weight, and weights start from 0.
    """

    weight: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        axis: Axis,
        shard: Shard,
        *,
        zero_centered: bool = False,
        **factory: Any,
    ):
        super().__init__(axis)
        self.zero_centered = zero_centered
        self.head_dim = head_dim
        self.num_features = num_heads * head_dim
        size = self.num_features
        init = Init("zeros" if zero_centered else "ones")
        self.add_parameter("weight", Placement((size,), init, shard, weight_decay=False), **factory)
        owned = shard.owned(axis.rank, size)
        self.first_owned = int((~owned).sum()) // head_dim
        """Number of the first local head that counts here: a key head that the rank before holds,
        too, counts there."""
        assert owned[self.first_owned * head_dim :].all()

    def scale(self) -> Tensor:
        """Return the factor of each local feature. Shapes: [heads, d]."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return rearrange(weight, "(n d) -> n d", d=self.head_dim)


def full_qk_norm(
    q: Tensor, k: Tensor, q_norm: HeadWeights, k_norm: HeadWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean(x^2) + eps) * weight for the queries and for the keys; the mean is over
    the features of all heads at a position.

    Shapes: q [b, n, s, d], k [b, g, s, d] -> the same.
    Collectives: forward one all-reduce of two numbers a position, backward one.
    """
    spec = _Spec(
        q_norm.axis,
        (q_norm.num_features, k_norm.num_features),
        (q_norm.first_owned, k_norm.first_owned),
        eps,
    )
    normed: tuple[Tensor, Tensor] = _FullNorm.apply(q, k, q_norm.scale(), k_norm.scale(), spec)
    return normed


class _Spec(NamedTuple):
    """The norms of queries and of keys.

    Attributes:
        axis: The tp axis.
        num_features: Features of all heads.
        first_owned: Number of the first local head that counts here.
    """

    axis: Axis
    num_features: tuple[int, int]
    first_owned: tuple[int, int]
    eps: float


class _FullNorm(Function):
    """y = x r w with r = (mean(x^2) + eps)^(-1/2); dx = r w dy - x r^3 sum(dy w x) / features.

    Gradients of a head that several ranks hold are partial sums, like its projection's; so every
    rank adds its own dy w x, and the owner alone subtracts the second term.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, spec: _Spec
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        squares = [
            x[:, first:].to(wide).square().sum((1, 3))
            for x, first in zip((q, k), spec.first_owned, strict=True)
        ]
        total = all_reduce(torch.stack(squares), spec.axis)
        sizes = total.new_tensor(spec.num_features).view(2, 1, 1)
        inverse = (total / sizes + spec.eps).rsqrt()
        ctx.save_for_backward(q, k, q_scale, k_scale, inverse)
        ctx.spec = spec
        q_normed, k_normed = (
            (x.to(wide) * r[:, None, :, None] * _by_head(w, wide)).to(x.dtype)
            for x, w, r in zip((q, k), (q_scale, k_scale), inverse, strict=True)
        )
        return q_normed, k_normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_scale, k_scale, inverse = ctx.saved_tensors
        spec = ctx.spec
        wide = inverse.dtype
        gradients = []
        along = []
        for x, w, dy in ((q, q_scale, dq), (k, k_scale, dk)):
            gradients.append(dy.to(wide) * _by_head(w, wide))
            along.append((gradients[-1] * x.to(wide)).sum((1, 3)))
        total = all_reduce(torch.stack(along), spec.axis)
        found: list[Tensor] = []
        weights: list[Tensor] = []
        for number, (x, w, dy) in enumerate(((q, q_scale, dq), (k, k_scale, dk))):
            r = inverse[number][:, None, :, None]
            mean = total[number][:, None, :, None] / spec.num_features[number]
            first = spec.first_owned[number]
            wide_x = x.to(wide)
            dx = gradients[number] * r
            dx[:, first:] -= wide_x[:, first:] * (r**3 * mean)
            found.append(dx.to(x.dtype))
            weights.append((dy.to(wide) * wide_x * r).sum((0, 2)).to(w.dtype))
        return (*found, *weights, None)


def _by_head(scale: Tensor, wide: torch.dtype) -> Tensor:
    return scale.to(wide)[None, :, None, :]
