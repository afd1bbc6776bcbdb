"""The cases: for each a module in one process, its inputs, and what a difference has meant in
frameworks before.

Issue numbers belong to NVIDIA/Megatron-LM unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 8
FFN = 21
VOCAB = 53
ROWS = 10
"""PipelineShape: only the first is divisible by 3 or 4, and the number of rows only by 2."""
HEADS = 4
GROUPS = 2
EXPERTS = 12
"""Query heads, key and value heads of grouped attention, and experts; every token has two
experts."""


class Layout(NamedTuple):
    """The shard of a parameter that a rank holds: along `dim`, the rows `rows`, some of which
    several ranks may hold. None: all rows, in rank order."""

    dim: int | None = None
    rows: Tensor | None = None


@dataclass
class Built:
    """A parallel module on one rank, and what its framework does outside of it.

    `finish`: what the framework does to gradients after the last backward of a batch. `norm`: its
    norm of all gradients, each element once; None: not compared. `layout`: this rank's shard of
    each parameter, by name; None: as DTensor, hybridpar and Megatron-LM (`partition_dim`) mark
    parameters, else a copy.
    """

    module: nn.Module
    finish: Callable[[], None] = lambda: None
    norm: Callable[[], float | Tensor] | None = None
    layout: Callable[[str, nn.Parameter], Layout] | None = None


Factory = Callable[[nn.Module, dist.ProcessGroup], nn.Module | Built]
"""Builds the parallel form of a case's module on the ranks of a group, with its weights and
parameter names."""


@dataclass(frozen=True)
class Case:
    """A module in one process, with which its parallel form must agree.

    `plain`: builds the module. `inputs`: inputs of one step. `dealt`: ranks have equal inputs
    ("copies"), or each a share of the first dimension ("rows"; shares differ by at most one).
    `returned`: how outputs are dealt; a scalar is a loss over all rows, and every rank has it.
    `steps`: backward passes before the update. `dropout`: its probability, if the module drops;
    then masks are compared, not numbers. `bug`: what was wrong elsewhere. `source`: where.
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
    """Two linear layers: the first split by columns, the second by rows."""

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
    """The mean cross-entropy over labels that count, after a linear head over an odd vocabulary."""

    def __init__(self, smoothing: float = 0.0, vocab: int = VOCAB):
        super().__init__()
        self.head = nn.Linear(HIDDEN, vocab)
        self.smoothing = smoothing

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), labels, label_smoothing=self.smoothing)


class Tied(nn.Module):
    """A table that is both embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCAB, HIDDEN),
            nn.Linear(HIDDEN, VOCAB, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)), labels)


class Attention(nn.Module):
    """Causal attention over one sequence, or over several `documents` in it, numbered by row.

    Rows of `qkv` are [group, queries of the group + key + value, head dim], as Megatron-LM and
    GPT-NeoX have them.
    """

    def __init__(self, groups: int = HEADS):
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(HIDDEN, HIDDEN // HEADS * (HEADS + 2 * groups))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = heads_of(self.qkv(x), self.groups)
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if documents is not None:
            seen &= documents[:, None] == documents
        y = functional.scaled_dot_product_attention(q, k, v, seen)
        return self.out(y.transpose(0, 1).flatten(1))


def heads_of(qkv: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, and the key and value for each. Shapes: [s, rows of qkv] -> [heads, s,
    head dim] each."""
    slots = qkv.unflatten(1, (groups, -1, HIDDEN // HEADS)).permute(1, 2, 0, 3)
    each = slots.shape[1] - 2
    key, value = (slots[:, i].repeat_interleave(each, 0) for i in (-2, -1))
    return slots[:, :-2].flatten(0, 1), key, value


class Experts(nn.Module):
    """A mixture of experts: a token goes to its two most probable experts, weighted by their
    probabilities.

    `balanced`: return the mean square of the output, and the load-balancing loss (arXiv 2101.03961,
    equations 4 to 6) of all rows together.
    """

    def __init__(self, balanced: bool = False):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.balanced = balanced
        self.up = nn.Parameter(0.5 * torch.randn(EXPERTS, HIDDEN, 3))
        self.down = nn.Parameter(0.5 * torch.randn(EXPERTS, 3, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = routed(self.router(x))
        out = torch.einsum("re,reh->rh", share * chosen, through(x, self.up, self.down))
        return out.square().mean() + 0.1 * balance(share, chosen) if self.balanced else out


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities of experts, and 1 for the experts that a token goes to, else 0.
    Shapes: [rows, experts] -> two of [rows, experts]."""
    share = logits.softmax(1)
    return share, torch.zeros_like(share).scatter_(1, share.topk(2).indices, 1.0)


def through(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return every row through every expert. Shapes: [rows, h] -> [rows, experts, h]."""
    return torch.einsum("ref,efh->reh", functional.gelu(torch.einsum("rh,ehf->ref", x, up)), down)


def balance(share: Tensor, chosen: Tensor) -> Tensor:
    """Return the loss that is smallest if all experts have equally many tokens. Shapes: [rows,
    experts] each -> a number."""
    return share.shape[1] * (share.mean(0) * chosen.mean(0) / 2).sum()


def _rows() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, HIDDEN, dtype=torch.float64),)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(VOCAB, (ROWS,)),)


def _labelled() -> tuple[Tensor, ...]:
    """Return rows with labels, of which the first few do not count, so that shares have unequal
    counts."""
    labels = torch.randint(VOCAB, (ROWS,))
    labels[: ROWS // 3] = -100
    return (*_rows(), labels)


def _documents() -> tuple[Tensor, ...]:
    return (*_rows(), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2]))


def _ones() -> tuple[Tensor, ...]:
    return (torch.ones(64, 32, dtype=torch.float64),)


CASES: dict[str, Case] = {
    "mlp": Case(
        Mlp,
        _rows,
        "a sum over ranks left out or made twice, a bias added by every rank, uneven shares",
    ),
    "accumulated": Case(
        Mlp, _rows, "gradients of several micro-batches summed over ranks more than once", steps=2
    ),
    "block": Case(
        Block,
        _rows,
        "a parameter left out of the clipping norm, or counted once a rank",
        "7452 (8); ROCm/TransformerEngine#715",
    ),
    "embedding": Case(
        lambda: nn.Embedding(VOCAB, HIDDEN),
        lambda: (torch.randperm(VOCAB),),
        "ids at the edge of a share",
    ),
    "loss": Case(
        Loss,
        _labelled,
        "padding of an odd vocabulary takes part; a loss off by log(ranks)",
        "1736; 1754; 7452 (2)",
    ),
    "smoothed_loss": Case(
        lambda: Loss(0.1), _labelled, "label smoothing over a share of the vocabulary", "7452 (1)"
    ),
    "sequence_norm": Case(
        lambda: nn.LayerNorm(HIDDEN),
        _rows,
        "gradients of norms that are of a rank's rows only",
        "1446",
        dealt="rows",
        returned="rows",
    ),
    "mean_loss": Case(
        Loss,
        _labelled,
        "a mean of means over unequal numbers of labels; a loss divided twice",
        "7452 (3); torchtitan#3280",
        dealt="rows",
    ),
    "tied": Case(
        Tied,
        lambda: (*_ids(), *_ids()),
        "copies of a tied table that drift apart, or count twice",
        "torchtitan#1409; pytorch#180952",
    ),
    "attention": Case(
        Attention, _rows, "heads in another order, a scale or mask of a rank's heads"
    ),
    "grouped_attention": Case(
        lambda: Attention(GROUPS),
        _rows,
        "a query with the key of another group; keys that "
        "several ranks have, each with a part of their gradient",
    ),
    "sequence_attention": Case(
        Attention,
        _rows,
        "masks that start over on each rank; gradients of keys that came from other ranks",
        "1464; diffusers#14265",
        dealt="rows",
        returned="rows",
    ),
    "packed_attention": Case(
        Attention,
        _documents,
        "documents of one sequence that see each other",
        "trl#6843",
        dealt="rows",
        returned="rows",
    ),
    "experts": Case(
        Experts,
        _rows,
        "tokens that are dropped, gradients of experts that count once a rank",
        "pytorch#160285; DeepSpeed#5259",
        dealt="rows",
        returned="rows",
    ),
    "expert_losses": Case(
        lambda: Experts(balanced=True),
        _rows,
        "a balancing loss of a rank's rows alone, one that "
        "counts once a rank, or whose gradient goes nowhere",
        "5047; Automodel#1408",
        dealt="rows",
    ),
    "dropout_copies": Case(
        lambda: nn.Dropout(0.5),
        _ones,
        "masks that differ where all ranks have the same",
        "1256",
        dropout=0.5,
    ),
    "dropout_rows": Case(
        lambda: nn.Dropout(0.5),
        _ones,
        "masks that repeat from rank to rank",
        "1256",
        dealt="rows",
        returned="rows",
        dropout=0.5,
    ),
}
"""All cases, by the name under which a factory is given."""


@dataclass
class Ran:
    """Results of one rank after a batch: outputs and gradients of inputs by step, parameters by
    name, and the norm."""

    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    norm: float | None = None
