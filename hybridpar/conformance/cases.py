"""The cases: for each a module in one process, its inputs, and what a difference has meant in frameworks before.

Issue numbers are those of NVIDIA/Megatron-LM unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, FFN, VOCAB, ROWS = 8, 21, 53, 10
"""Sizes: none but the first divides by 2, 3 or 4, the number of rows by 2 alone."""


class Layout(NamedTuple):
    """What part of a parameter a rank holds: along `dim`, the rows `rows`; None: in rank order, and all of it."""

    dim: int | None = None
    rows: Tensor | None = None


@dataclass
class Built:
    """A parallel module on one rank, and what its framework does besides.

    finish: what is done to gradients after the last backward of a batch. norm: the norm of all gradients, each element
    once, as the framework has it; None: not compared. layout: the part that this rank holds of a parameter, by name;
    None: as DTensor, hybridpar and Megatron-LM (`partition_dim`) mark parameters, else a copy.
    """

    module: nn.Module
    finish: Callable[[], None] = lambda: None
    norm: Callable[[], float | Tensor] | None = None
    layout: Callable[[str, nn.Parameter], Layout] | None = None


Factory = Callable[[nn.Module, dist.ProcessGroup], nn.Module | Built]
"""Builds the parallel form of a case's module on the ranks of a group, with its weights and the names of its
parameters."""


@dataclass(frozen=True)
class Case:
    """A module in one process, which its parallel form must be equal to.

    plain: builds it. inputs: of one step. dealt: ranks have the same inputs ("copies"), or each its share of the first
    dimension ("rows"; shares differ by one). returned: the same of what the module returns; a scalar is a loss of all
    rows, and every rank has it. steps: backward passes before the update. dropout: the probability, of a module that
    drops; then masks are compared, not numbers. bug: what was wrong elsewhere. source: where.
    """

    plain: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    bug: str
    source: str = ""
    dealt: Literal["copies", "rows"] = "copies"
    returned: Literal["copies", "rows"] = "copies"
    steps: int = 1
    dropout: float = 0.0


class Mlp(nn.Module):
    """Two linear layers, the first of which is split by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """A norm, which all ranks hold, and a split MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Loss(nn.Module):
    """The mean cross-entropy over labels that count, of a linear head over an odd vocabulary."""

    def __init__(self, smoothing: float = 0.0, vocab: int = VOCAB):
        super().__init__()
        self.head, self.smoothing = nn.Linear(HIDDEN, vocab), smoothing

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), labels, label_smoothing=self.smoothing)


class Tied(nn.Module):
    """A table that is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)), labels)


def _rows() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, HIDDEN, dtype=torch.float64),)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(VOCAB, (ROWS,)),)


def _labelled() -> tuple[Tensor, ...]:
    """Rows with labels of which the first few do not count, so that shares have unequal numbers of those that do."""
    labels = torch.randint(VOCAB, (ROWS,))
    labels[: ROWS // 3] = -100
    return (*_rows(), labels)


def _ones() -> tuple[Tensor, ...]:
    return (torch.ones(64, 32, dtype=torch.float64),)


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, _rows, "a sum over ranks left out or made twice, a bias added by every rank, uneven shares"),
    "accumulated": Case(Mlp, _rows, "gradients of several micro-batches summed over ranks more than once",
                        steps=2),
    "block": Case(Block, _rows, "a parameter left out of the clipping norm, or counted once a rank",
                  "7452 (8); ROCm/TransformerEngine#715"),
    "embedding": Case(lambda: nn.Embedding(VOCAB, HIDDEN), lambda: (torch.randperm(VOCAB),),
                      "ids at the edge of a share"),
    "loss": Case(Loss, _labelled, "padding of an odd vocabulary takes part; a loss off by log(ranks)",
                 "1736; 1754; 7452 (2)"),
    "smoothed_loss": Case(lambda: Loss(0.1), _labelled, "label smoothing over a share of the vocabulary", "7452 (1)"),
    "sequence_norm": Case(lambda: nn.LayerNorm(HIDDEN), _rows, "gradients of norms that are of a rank's rows only",
                          "1446", dealt="rows", returned="rows"),
    "mean_loss": Case(Loss, _labelled, "a mean of means over unequal numbers of labels; a loss divided twice",
                      "7452 (3); torchtitan#3280", dealt="rows"),
    "tied": Case(Tied, lambda: (*_ids(), *_ids()), "copies of a tied table that drift apart, or count twice",
                 "torchtitan#1409; pytorch#180952"),
    "dropout_copies": Case(lambda: nn.Dropout(0.5), _ones, "masks that differ where all ranks have the same", "1256",
                           dropout=0.5),
    "dropout_rows": Case(lambda: nn.Dropout(0.5), _ones, "masks that repeat from rank to rank", "1256", dealt="rows",
                         returned="rows", dropout=0.5),
}
"""All cases, by the name under which a factory is given."""


@dataclass
class Ran:
    """What one rank has after a batch: outputs and gradients of inputs by step, parameters by name, and the norm."""

    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    norm: float | None = None
