"""Choices of experts, which a grid and one process must make alike.

A choice is discontinuous: where the last expert that a token visits and the next one have nearly
equal scores, a sum in another order decides otherwise, and everything after it differs. So choices
are compared by themselves, before the numbers that follow from them, with the margin by which each
was made. A flip within rounding is named as one, and the process then visits the grid's experts, so
that the numbers that follow can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.nn.placement import Range, indices

NEAR_TIE = 1e-9
"""Margin of a score up to which rounding may decide: scores are at most 1, plus biases."""

Choices = dict[int, list[Tensor]]
"""Experts of the tokens of each micro-batch that trained, in order, by block. Shapes: [T, k]."""


@dataclass
class ChoiceRecorder:
    """Records the experts that blocks choose in training, and by which margins.

    Attributes:
        experts: The choices.
        margins: By how much the score of each token's last expert exceeds the next one, by block.
            Shapes: [T].
    """

    experts: Choices = field(default_factory=lambda: defaultdict(list))
    margins: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, blocks: Iterable[tuple[int, nn.Module]]) -> None:
        """Record what these blocks, by number, choose from now on."""
        for number, block in blocks:
            for module in block.modules():
                watch: Any = getattr(module, "watch_choices", None)
                if watch is not None:
                    watch(partial(self._add, number))

    def _add(self, block: int, experts: Tensor, margins: Tensor) -> None:
        self.experts[block].append(experts)
        self.margins[block].append(margins)


@dataclass(frozen=True)
class Flips:
    """A comparison of choices.

    Attributes:
        num_choices: Number of tokens and layers whose experts were compared.
        smallest_margin: The closest of these choices in one process.
        flips: Number of choices that differ, by block.
        largest_flipped: Margin, in one process, of the clearest choice that differs; 0: none does.
    """

    num_choices: int = 0
    smallest_margin: float = float("inf")
    flips: Mapping[int, int] = field(default_factory=dict)
    largest_flipped: float = 0.0

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains every choice that differs."""
        return bool(self.flips) and self.largest_flipped <= NEAR_TIE

    def __add__(self, other: Flips) -> Flips:
        flips = {
            block: self.flips.get(block, 0) + other.flips.get(block, 0)
            for block in sorted({*self.flips, *other.flips})
        }
        return Flips(
            self.num_choices + other.num_choices,
            min(self.smallest_margin, other.smallest_margin),
            flips,
            max(self.largest_flipped, other.largest_flipped),
        )

    def __str__(self) -> str:
        text = f"{self.num_choices:,} choices of experts, the closest by {self.smallest_margin:.1e}"
        if not self.flips:
            return f"{text}: all agree"
        where = ", ".join(f"{count} in block {block}" for block, count in self.flips.items())
        what = f"{text}: {where} differ, the clearest by {self.largest_flipped:.1e}"
        return f"{what}, which is a near tie that rounding decides" if self.is_near_tie else what


Tokens = Sequence[tuple[Range, ...]]
"""Tokens of each sample that a rank has, by micro-batch."""


def join_choices(of_ranks: Sequence[tuple[Tokens, Choices]]) -> Choices:
    """Return the choices for whole samples, from the choices of ranks that have some tokens each."""
    if len(of_ranks) == 1:
        return of_ranks[0][1]
    joined: Choices = {}
    for block, choices in of_ranks[0][1].items():
        joined[block] = []
        for number in range(len(choices)):
            places = [indices(tokens[number]) for tokens, _ in of_ranks]
            by_sample = [
                of_rank[block][number].unflatten(0, (-1, len(at)))
                for at, (_, of_rank) in zip(places, of_ranks, strict=True)
            ]
            order = torch.argsort(torch.cat(places))
            joined[block].append(torch.cat(by_sample, 1)[:, order].flatten(0, 1))
    return joined


def replay(blocks: Iterable[tuple[int, nn.Module]], found: Sequence[Choices]) -> None:
    """Have blocks of one process, by number, visit the experts that a grid's replicas chose:
    micro-batch by micro-batch, of each all replicas."""
    for number, block in blocks:
        for module in block.modules():
            replay_choices: Any = getattr(module, "replay_choices", None)
            if replay_choices is not None:
                replay_choices(partial(next, _in_turn([choices[number] for choices in found])))


def _in_turn(of_replicas: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    for of_microbatch in zip(*of_replicas, strict=True):
        yield from of_microbatch


def compare_choices(
    expected: ChoiceRecorder, found: Sequence[Choices], batch: int, num_microbatches: int
) -> Flips:
    """Compare a batch's choices of one process with the choices of a grid's replicas.

    Args:
        expected: Choices of the process: micro-batch by micro-batch, of each all replicas.
        found: Choices of each replica.
        batch: Number of the batch.
        num_microbatches: Number of micro-batches of a replica in a batch.
    """
    total = Flips()
    replicas = len(found)
    first = batch * num_microbatches
    for block, choices in expected.experts.items():
        for number in range(num_microbatches):
            for replica in range(replicas):
                index = (first + number) * replicas + replica
                margins = expected.margins[block][index]
                theirs = found[replica][block][first + number]
                differs = (choices[index].sort().values != theirs.sort().values).any(-1)
                flipped = float(margins[differs].max()) if differs.any() else 0.0
                flips = {block: int(differs.sum())} if differs.any() else {}
                total += Flips(len(margins), float(margins.min()), flips, flipped)
    return total
