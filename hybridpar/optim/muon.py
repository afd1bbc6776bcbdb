"""Muon: momentum whose matrices are orthogonalised, for hidden layers; AdamW for everything
else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.ops.update import Weights
from hybridpar.optim.adamw import AdamW
from hybridpar.optim.base import Optimizer
from hybridpar.optim.matrices import gather, hidden_matrices, plan_rounds, scatter
from hybridpar.optim.newton_schulz import newton_schulz
from hybridpar.optim.slots import ParameterSlot

BATCH = {"cpu": 1, "cuda": 64}
"""Matrices of one shape that are orthogonalised together. One alone keeps a CPU busy, and
several leave its cache (512 x 2048, one thread: 4 at once take 1.0 to 1.4 times as long)."""
PRECISION = {("cuda", torch.float32): torch.bfloat16}
"""Type in which matrices of a device and type are orthogonalised, if that is not their own."""


class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices; AdamW for embeddings, heads and vectors.

    Both have one lr and weight decay. The momentum is m <- mu m + (1 - mu) g; a matrix takes the
    step
    -lr * 0.2 sqrt(max(rows, cols)) * NS(m), where NS is newton_schulz and `nesterov` puts (1 - mu)
    g +
    mu m in place of m; weight decay is decoupled. The factor gives the step the root mean square
    that
    AdamW's usually has, so a learning rate tuned for AdamW serves.

    A matrix is a global one, whatever the grid, and one projection: all queries, all keys, all
    values, gate, up (Placement.matrices). A fused weight taken as one matrix does worse; taking
    each head as one does better or worse by model (arXiv 2605.08933), so the projections are the
    papers'.

    A step takes as much arithmetic as training on 3 h tokens (h the hidden size); tp ranks share
    it, and with ZeRO-1 dp ranks. It runs in the parameters' precision; on CUDA, float32 is
    orthogonalised in bfloat16, as published.
    Collectives: over tp, two all-to-alls a round of matrices (see matrices.py).
    Source: Jordan et al., github.com/KellerJordan/Muon; the factor: Moonlight, arXiv 2502.16982,
    section 2.2.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        super().__init__(slots, settings, tp, backend)
        kinds = (
            (OrthogonalMomentum, [i for i, s in enumerate(self.slots) if s.placement.matrices]),
            (AdamW, [i for i, s in enumerate(self.slots) if not s.placement.matrices]),
        )
        self._indices = [indices for _, indices in kinds]
        self.inner = tuple(
            kind([self.slots[i] for i in indices], settings, tp, backend) for kind, indices in kinds
        )

    @classmethod
    def divisible(cls, slot: ParameterSlot) -> bool:
        return not slot.placement.matrices

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        for indices, inner in zip(self._indices, self.inner, strict=True):
            inner.step(
                weights.only(indices), [gradients[i] for i in indices], lr=lr, gradient_scale=scale
            )


class OrthogonalMomentum(Optimizer):
    """The half of Muon that updates hidden matrices."""

    state_names = ("momentum",)

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        super().__init__(slots, settings, tp, backend)
        self._rounds = plan_rounds(hidden_matrices(self.slots, tp.size), tp.size)

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        momenta = self._state["momentum"]
        beta = self.settings.momentum
        grads = self._parts(gradients)
        means = self._parts(momenta)
        torch._foreach_lerp_(means, grads, 1 - beta)
        if self.settings.nesterov:
            torch._foreach_lerp_(grads, means, beta)
        self._orthogonalize(gradients if self.settings.nesterov else momenta, gradients)
        rates = [lr * rate for rate in self._rates]
        keeps = [1 - rate * decay for rate, decay in zip(rates, self._decays, strict=True)]
        self._passes.move(self._weight_parts(weights), grads, keeps, [-rate for rate in rates])

    def _orthogonalize(self, directions: list[Tensor], steps: list[Tensor]) -> None:
        """Write the scaled orthogonal matrices of `directions` into `steps`, which may be the
        same tensors."""
        device = directions[0].device.type
        dtype = directions[0].dtype
        dtype = PRECISION.get((device, dtype), dtype)
        for round_ in self._rounds:
            whole = gather(round_, directions, self.tp, dtype)
            for group in _of_one_shape(whole, BATCH.get(device, BATCH["cuda"])):
                result = newton_schulz(torch.stack([whole[i] for i in group]))
                result.mul_(0.2 * sqrt(max(result.shape[1:])))
                for i, matrix in zip(group, result, strict=True):
                    whole[i] = matrix
            scatter(round_, whole, steps, self.tp, dtype)


def _of_one_shape(matrices: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Return the indices of `matrices` in groups of at most `most` of one shape."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    for indices in by_shape.values():
        for start in range(0, len(indices), most):
            yield indices[start : start + most]
