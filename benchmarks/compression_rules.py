"""Rules of DCT and Deep Gradient Compression that hybridpar does not have.

`benchmarks.compressed_training` trains with them through the engine, to measure what they would
change. They are written to be short, not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from hybridpar.comm import Works
from hybridpar.state.compression.method import Entry
from hybridpar.state.compression.methods.dct import Thresholds
from hybridpar.state.compression.wire import Reader
from hybridpar.state.layout import Bucket
from hybridpar.train.engine import Engine

LARGEST_NORM = 1.0
"""Limit of the norm of a batch's gradient."""
MOMENTUM = 0.9
"""Momentum that a replica accumulates."""
RENEWED_EVERY = 100
"""Batches from one threshold of a message to the next."""
_EMBEDDING = "tokens.weight"


class WholeEmbedding(Thresholds):
    """Send the gradient of the embedding whole: no other tensor here has 1,024 rows."""

    @staticmethod
    def packs(shape: Sequence[int], placement: Any) -> bool:
        return shape[0] < 1024


class RowsOfEmbedding(Thresholds):
    """Send whole rows of the gradient of the embedding, those with the largest norms."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._others: dict[str, Tensor] = {}

    def _room(self, entry: Entry) -> int:
        return super()._room(entry) + entry.shape[-1]

    def _threshold(self, entry: Entry, batch: int) -> tuple[Tensor, int]:
        threshold, count = super()._threshold(entry, batch)
        if not entry.name.endswith(_EMBEDDING):
            return threshold, count
        x = self.feedback.next_kept[entry.name]
        rows = x.norm(dim=1).topk(ceil(count / x.shape[1])).indices
        sent = torch.zeros_like(x)
        sent[rows] = x[rows]
        self._others[entry.name] = x - sent
        x.copy_(sent)
        smallest = torch.full_like(threshold, torch.finfo(x.dtype).tiny)
        return smallest, int((sent.abs() >= smallest).sum())

    def _pack(self, thresholds: Sequence[tuple[Tensor, int]], message: Reader) -> None:
        super()._pack(thresholds, message)
        for name, rest in self._others.items():
            self.feedback.next_kept[name].add_(rest)


class OneThreshold(Thresholds):
    """Give all tensors one threshold: as many elements as before, from wherever they are large."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._of_groups: tuple[int, Mapping[str, Tensor]] = (-1, {})

    @staticmethod
    def group(name: str) -> str:
        """Return the group of tensors that a parameter shares its threshold with."""
        return "all"

    def _most(self, entry: Entry) -> int:
        return entry.numel

    def _threshold(self, entry: Entry, batch: int) -> tuple[Tensor, int]:
        if self._of_groups[0] != batch:
            self._of_groups = batch, dict(self._find(batch))
        threshold = self._of_groups[1][self.group(entry.name)]
        self.feedback.next_learned[f"{entry.name}.threshold"].copy_(threshold)
        x = self.feedback.next_kept[entry.name]
        return threshold, int((x.abs() >= threshold).sum())

    def _find(self, batch: int) -> Iterator[tuple[str, Tensor]]:
        for group in {self.group(entry.name) for entry in self.packed}:
            sizes = torch.cat(
                [
                    self.feedback.next_kept[entry.name].abs().flatten()
                    for entry in self.packed
                    if self.group(entry.name) == group
                ]
            )
            wanted = ceil(self._share(batch) * len(sizes))
            yield group, sizes.kthvalue(len(sizes) - wanted + 1).values.view(1)


class ThresholdOfKind(OneThreshold):
    """Give a weight one threshold in all layers."""

    @staticmethod
    def group(name: str) -> str:
        return name.split(".", 2)[2]


class NoLimit(Thresholds):
    """Keep a threshold until its period ends, however many elements pass it: the paper's rule."""

    def _most(self, entry: Entry) -> int:
        return entry.numel


class Clipped(Thresholds):
    """Clip the gradient of each replica before it is added to what waits.

    The limit is LARGEST_NORM / sqrt(replicas) (Deep Gradient Compression, arXiv 1712.01887, section
    3.2).
    """

    def steps(self, buffer: Any, bucket: Bucket, batch: int) -> Iterator[Works]:
        gradients = [entry.view(buffer) for entry in self.packed]
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = LARGEST_NORM / sqrt(self.axis.size) / (norm + 1e-6)
        torch._foreach_mul_(gradients, factor.clamp(max=1.0))
        yield from super().steps(buffer, bucket, batch)


class OwnMomentum(Clipped):
    """Clip, then put each replica's own momentum in place of its gradient; elements that are sent
    leave that momentum, too (Deep Gradient Compression, algorithm 2). The optimizer has none.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._momenta = [torch.zeros(entry.shape) for entry in self.packed]

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        for entry, gradient, momentum in zip(self.packed, gradients, self._momenta, strict=True):
            decayed = momentum * MOMENTUM
            self.feedback.next_kept[entry.name].add_(decayed)
            torch.add(decayed, gradient, out=momentum)
        yield from super().exchange(gradients, batch, message)

    def _pack(self, thresholds: Sequence[tuple[Tensor, int]], message: Reader) -> None:
        super()._pack(thresholds, message)
        for entry, momentum in zip(self.packed, self._momenta, strict=True):
            momentum.mul_(self.feedback.next_kept[entry.name] != 0)


class MaskedMomentum(Thresholds):
    """Clear the optimizer's momentum where an element was sent (momentum factor masking)."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        _MASKED.append(self)
        self.waiting: dict[str, Tensor] = {}
        """Elements that no replica has sent in the last batch, by parameter."""

    def _put(self, entry: Entry, total: Tensor) -> None:
        super()._put(entry, total)
        self.waiting[entry.name] = total == 0


_MASKED: list[MaskedMomentum] = []

RULES: dict[str, type[Thresholds]] = {
    "": Thresholds,
    "whole embedding": WholeEmbedding,
    "rows of the embedding": RowsOfEmbedding,
    "one threshold": OneThreshold,
    "threshold of a kind": ThresholdOfKind,
    "no limit": NoLimit,
    "clipped": Clipped,
    "own momentum": OwnMomentum,
    "masked momentum": MaskedMomentum,
}
"""Subclasses of the method "dct" by name."""


def after_step(engine: Engine) -> Callable[[Any], None]:
    """Return what the rules do after each update."""

    def clear(step: Any) -> None:
        state = engine.state.optimizer.state_tensors()
        for rule in _MASKED:
            for name, waiting in rule.waiting.items():
                for key in (f"{name}.momentum", f"{name}.exp_avg"):
                    if key in state:
                        state[key].mul_(waiting)

    return clear


class MessageThreshold:
    """The paper's rule for messages: features above a threshold of the whole tensor are sent, and
    backward the gradients of these. The threshold is renewed every RENEWED_EVERY batches (arXiv
    2010.08899, algorithm 2).

    Args:
        share: Share of the features that a new threshold lets pass.
        microbatches: Tensors of a batch.
    """

    def __init__(self, share: float, microbatches: int):
        self.share = share
        self.period = RENEWED_EVERY * microbatches
        self.threshold = torch.zeros(1)
        self.num_tensors = 0
        self.sent = 0
        self.whole = 0

    def __call__(self, module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        """Return a block's output as the next stage gets it: a forward hook."""
        if not torch.is_grad_enabled():
            return out
        sizes = out.detach().abs()
        if self.num_tensors % self.period == 0:
            rank = max(1, round((1 - self.share) * sizes.numel()))
            self.threshold = sizes.flatten().kthvalue(rank).values
        self.num_tensors += 1
        passes = sizes > self.threshold
        self.sent += int(passes.sum())
        self.whole += passes.numel()
        received: Tensor = _Masked.apply(out, passes)
        return received


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passes: Tensor) -> Tensor:
        ctx.save_for_backward(passes)
        return x * passes

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (passes,) = ctx.saved_tensors
        return dy * passes, None
