"""The cases, built from hybridpar's layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.comm import all_reduce
from hybridpar.conformance.cases import FFN, GROUPS, HEADS, HIDDEN, ROWS, VOCAB, Built, Factory
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import (
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    named_placements,
    reduce_shared_gradients,
    split_ranges,
    vocab_parallel_cross_entropy,
)
from hybridpar.nn.placement import split_sizes
from hybridpar.optim.norm import counted, sums_of_squares
from hybridpar.optim.slots import ParameterSlot
from hybridpar.random import RandomKey

_F64: dict[str, Any] = {"dtype": torch.float64}


def built(module: nn.Module, plain: nn.Module, axis: Axis) -> Built:
    """Return the module with plain's weights, and what training does to its gradients."""
    weights = plain.state_dict()
    place = {"tp": axis.rank}
    placed = list(named_placements(module))
    for name, parameter, placement in placed:
        parameter.data = placement.take(weights[name], axis.rank).clone()

    def finish() -> None:
        reduce_shared_gradients(
            [(p.grad, placement) for _, p, placement in placed if p.grad is not None], axis
        )

    def norm() -> Tensor:
        slots = [ParameterSlot(name, placement, place) for name, _, placement in placed]
        mine = counted([p.grad for _, p, _ in placed if p.grad is not None], slots)
        return all_reduce(sums_of_squares(mine).sum(), axis).sqrt()

    return Built(module, finish, norm)


class Mlp(nn.Module):
    def __init__(self, axis: Axis):
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, FFN, axis, **_F64)
        self.down = RowParallelLinear(FFN, HIDDEN, axis, **_F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, axis: Axis):
        super().__init__()
        self.norm, self.mlp = LayerNorm(HIDDEN, axis, **_F64), Mlp(axis)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Loss(nn.Module):
    def __init__(self, axis: Axis, smoothing: float):
        super().__init__()
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, axis, **_F64)
        self.smoothing = smoothing

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return _mean_loss(self.head(x), labels, self.head.axis, self.smoothing)


class Tied(nn.Module):
    def __init__(self, axis: Axis):
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, axis, **_F64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        axis = self.embedding.axis
        return _mean_loss(
            column_linear(self.embedding(ids), self.embedding.weight, None, axis), labels, axis
        )


class Attention(ParallelAttention):
    """Attention over rows that all ranks have; with `sequence`, each rank has a share of them."""

    def __init__(self, axis: Axis, groups: int = HEADS, sequence: bool = False):
        super().__init__(HIDDEN, HEADS, axis, num_kv_heads=groups, sequence=sequence, **_F64)
        self.sizes = split_sizes(ROWS, axis.size) if sequence else None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None], sizes=self.sizes)[0]


class MeanLoss(nn.Module):
    """One replica's term of the mean over all replicas' labels: it divides by the count of the
    global batch."""

    def __init__(self, plain: nn.Module, axis: Axis):
        super().__init__()
        assert isinstance(plain.head, nn.Linear)
        self.head = plain.head
        self.axis = axis

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        num_targets = all_reduce((labels >= 0).sum(), self.axis)
        mine = functional.cross_entropy(self.head(x), labels, reduction="sum") / num_targets
        return mine + (all_reduce(mine.detach().clone(), self.axis) - mine.detach())

    def finish(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            all_reduce(parameter.grad, self.axis)


class Masks(nn.Module):
    """Dropout whose masks depend on step and row; this rank has some of the `rows`."""

    def __init__(self, axis: Axis, rows: bool):
        super().__init__()
        self.dropout = Dropout(0.5, "dropout")
        self.axis = axis
        self.rows = rows
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        first = split_ranges(64, self.axis.size)[self.axis.rank][0] if self.rows else 0
        return self.dropout(x, RandomKey.of(5, self.step, first, len(x)))


def _mean_loss(logits: Tensor, labels: Tensor, axis: Axis, smoothing: float = 0.0) -> Tensor:
    start, _ = split_ranges(VOCAB, axis.size)[axis.rank]
    losses = vocab_parallel_cross_entropy(
        logits, labels, axis, vocab_start=start, valid_vocab=VOCAB, label_smoothing=smoothing
    )
    return losses.sum() / (labels >= 0).sum()


def _axis(group: dist.ProcessGroup) -> Axis:
    return ProcessGrid(tp=group.size()).tp


def _norm_of_rows(plain: nn.Module, group: dist.ProcessGroup) -> Built:
    axis = _axis(group)
    return built(LayerNorm(HIDDEN, axis, sequence=True, **_F64), plain, axis)


def _replica(plain: nn.Module, group: dist.ProcessGroup) -> Built:
    module = MeanLoss(plain, _axis(group))
    return Built(module, module.finish)


def _of(kind: Any, *args: Any) -> Factory:
    def factory(plain: nn.Module, group: dist.ProcessGroup) -> Built:
        axis = _axis(group)
        return built(kind(axis, *args), plain, axis)

    return factory


FACTORIES: dict[str, Factory] = {
    "mlp": _of(Mlp),
    "accumulated": _of(Mlp),
    "block": _of(Block),
    "loss": _of(Loss, 0.0),
    "smoothed_loss": _of(Loss, 0.1),
    "tied": _of(Tied),
    "attention": _of(Attention),
    "grouped_attention": _of(Attention, GROUPS),
    "sequence_attention": _of(Attention, HEADS, True),
    "embedding": _of(lambda axis: VocabParallelEmbedding(VOCAB, HIDDEN, axis, **_F64)),
    "sequence_norm": _norm_of_rows,
    "mean_loss": _replica,
    "dropout_copies": lambda plain, group: Masks(_axis(group), False),
    "dropout_rows": lambda plain, group: Masks(_axis(group), True),
}
"""A factory for every case whose layers hybridpar has: no packing, and no experts."""
