"""Cross-entropy over logits that are split over the tp axis by vocabulary, without gathering them.

Letters: v_local this rank's columns, V the vocabulary (real rows, all ranks), e label smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar import ops
from hybridpar.autograd import once_differentiable
from hybridpar.comm import Works, all_reduce, all_reduce_async, gather_sequence
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.nn import matmul
from hybridpar.nn.binding import GradientConsumer
from hybridpar.nn.embedding import check_range, within


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Scale and soft-cap of logits, between the projection and the softmax.

    Attributes:
        scale: Factor of the logits.
        softcap: Then logits become softcap * tanh(logit / softcap). 0: they do not.
    """

    scale: float = 1.0
    softcap: float = 0.0

    @property
    def changes(self) -> bool:
        return self.scale != 1 or self.softcap > 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the transformed logits, in new memory if anything changes."""
        if not self.changes:
            return logits
        if not self.softcap:
            return logits * self.scale
        return (logits * (self.scale / self.softcap)).tanh_().mul_(self.softcap)

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Return the derivative of the transformed logits by the logits."""
        if not self.softcap:
            return self.scale
        return (transformed / self.softcap).square_().neg_().add_(1).mul_(self.scale)


AS_PROJECTED = LogitTransform()


@dataclass(frozen=True, slots=True)
class CrossEntropySpec:
    """The cross-entropy of logits that are split over an axis by vocabulary.

    Attributes:
        axis: The tp axis.
        vocab_start: Global id of this rank's first column.
        valid_vocab: Number of real ids. Columns beyond take no part and get no gradient. May be
            left out at tp 1, if all columns are real.
        label_smoothing: With e the target puts 1 - e on the label and e / V on every real id, as
            torch.nn.functional.cross_entropy does.
        ignore_index: Label whose loss is zero.
        backend: Backend of the local passes (ops.cross_entropy).
        transform: What the projection becomes before the softmax.
    """

    axis: Axis
    vocab_start: int = 0
    valid_vocab: int | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100
    backend: str = "auto"
    transform: LogitTransform = AS_PROJECTED


class VocabProjection(NamedTuple):
    """The layer that computes the logits, x W^T + b.

    Shapes: weight [v_local, h], bias [v_local].

    Attributes:
        consumer: Takes the gradient of the weight. None: autograd does.
    """

    weight: Tensor
    bias: Tensor | None = None
    consumer: GradientConsumer | None = None


@dataclass(frozen=True, slots=True)
class _Columns:
    """A rank's columns: global ids start to start + num_real; further local ones are padding."""

    axis: Axis
    start: int
    num_real: int
    num_vocab: int
    smoothing: float

    @classmethod
    def of(cls, spec: CrossEntropySpec, v_local: int) -> _Columns:
        """Return the columns of a rank that holds `v_local`. Raises: ConfigError."""
        num_vocab = spec.valid_vocab
        if num_vocab is None:
            if spec.axis.size > 1:
                raise config_error(
                    "valid_vocab",
                    None,
                    "must be given if the vocabulary is split over ranks",
                    "the model's vocabulary size",
                )
            num_vocab = v_local
        smoothing = spec.label_smoothing
        if not 0.0 <= smoothing < 1.0:
            raise config_error(
                "label_smoothing", smoothing, "must be at least 0 and below 1", "0.1"
            )
        num_real = min(max(num_vocab - spec.vocab_start, 0), v_local)
        return cls(spec.axis, spec.vocab_start, num_real, num_vocab, smoothing)

    def column(self, labels: Tensor) -> Tensor:
        """Return the column of each label; below 0 or from num_real on it is on another rank.
        Shapes: [..] -> [rows]."""
        return labels.flatten() - self.start if self.start else labels.flatten()


class _Targets(NamedTuple):
    """Labels, with 0 for ignored ones, and which are ignored; None if none is known to be."""

    labels: Tensor
    ignored: Tensor | None

    @classmethod
    def of(cls, labels: Tensor, ignore_index: int, num_vocab: int) -> _Targets:
        """Check the labels, on the CPU. Raises: DataError."""
        on_cpu = labels.device.type == "cpu"
        if on_cpu and within(labels, num_vocab) and not 0 <= ignore_index < num_vocab:
            return cls(labels, None)
        ignored = labels == ignore_index
        labels = labels.masked_fill(ignored, 0)
        if on_cpu:
            check_range(labels, num_vocab, "label")
        return cls(labels, ignored)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    overwrite: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return the loss of every label: log of the sum of exponentials, less the logit of the label.

    It is zero for ignored labels. The logits are kept for the backward pass.

    Args:
        vocab_start: Global id of this rank's first column.
        valid_vocab: Number of real ids. Columns beyond take no part and get no gradient. May be
            left out at tp 1, if all columns are real.
        label_smoothing: With e the target puts 1 - e on the label and e / V on every real id, as
            torch.nn.functional.cross_entropy does.
        overwrite: The backward pass may turn the logits into their gradient, and then runs only
            once. For logits that were just computed and that nothing else holds or saves for
            backward.
        backend: Backend of the local passes (ops.cross_entropy).

    Shapes: logits [.., v_local], labels int64 [..], the same on every rank -> [..], fp32, or fp64
    for fp64 logits.
    Collectives: forward three all-reduces of a number or (the last, with smoothing) two a label:
    maximum, sum of exponentials, label's logit; backward none.
    Raises: DataError for a label outside the vocabulary; on a GPU, which a check would wait for,
    its loss is NaN instead. ConfigError for label_smoothing outside [0, 1), or without valid_vocab
    at tp > 1.
    Source: Megatron-LM (arXiv 1909.08053), section 3; smoothing: arXiv 1512.00567.
    """
    spec = CrossEntropySpec(axis, vocab_start, valid_vocab, label_smoothing, ignore_index, backend)
    return split_cross_entropy(logits, labels, spec, overwrite=overwrite)


def split_cross_entropy(
    logits: Tensor, labels: Tensor, spec: CrossEntropySpec, *, overwrite: bool = False
) -> Tensor:
    """Return vocab_parallel_cross_entropy(logits, labels, ..), described by `spec`."""
    columns = _Columns.of(spec, logits.shape[-1])
    assert labels.shape == logits.shape[:-1], (
        f"labels {tuple(labels.shape)} for logits {tuple(logits.shape)}"
    )
    targets = _Targets.of(labels, spec.ignore_index, columns.num_vocab)
    options = _Options(overwrite, spec.backend, spec.transform)
    return _CrossEntropy.apply(logits, targets, columns, options)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    projection: VocabProjection,
    labels: Tensor,
    spec: CrossEntropySpec,
    *,
    chunk: int,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return the cross-entropy of x W^T + b, of which only `chunk` rows exist at a time.

    The logits are computed twice: four matrix products instead of three, and memory for `chunk`
    rows of logits instead of all.

    Shapes: x [.., h], replicated; labels int64 [..] -> [..]. With `sizes` x is [b, sizes[rank], h],
    this rank's part of the sequence.
    Collectives: forward three all-reduces (see vocab_parallel_cross_entropy); backward one of the
    gradient of x. With `sizes`: forward one all-gather more, backward one reduce_scatter instead.
    Raises: See vocab_parallel_cross_entropy.
    """
    columns = _Columns.of(spec, projection.weight.shape[0])
    assert chunk > 0, f"chunk must be positive, not {chunk}"
    x = x if sizes is None else gather_sequence(x, spec.axis, sizes)
    assert labels.shape == x.shape[:-1], f"labels {tuple(labels.shape)} for x {tuple(x.shape)}"
    targets = _Targets.of(labels, spec.ignore_index, columns.num_vocab)
    chunks = _Chunks(
        chunk, columns, sizes is None, spec.backend, projection.consumer, spec.transform
    )
    return _LinearCrossEntropy.apply(x, projection.weight, projection.bias, targets, chunks)


class _Rows(NamedTuple):
    """Numbers of each row that the backward pass needs besides the logits."""

    column: Tensor
    top: Tensor
    total: Tensor
    ignored: Tensor | None

    def numbers(self, grad: Tensor, columns: _Columns) -> Tensor:
        """Numbers of each row in the order in which ops.cross_entropy's gradient_ takes them."""
        grad = grad.to(self.top.dtype)
        if self.ignored is not None:
            grad = grad.masked_fill(self.ignored, 0)
        grad = grad.flatten()
        e = columns.smoothing
        target, level = (
            ((1 - e) * grad, e / columns.num_vocab * grad) if e else (grad, torch.zeros_like(grad))
        )
        return torch.stack((self.top, grad / self.total, target, level))


def _combine(
    statistics: Tensor, column: Tensor, targets: _Targets, columns: _Columns
) -> tuple[Tensor, _Rows]:
    """Combine what every rank knows of its own columns into the loss."""
    labels, ignored = targets
    axis = columns.axis
    e = columns.smoothing
    top, total, target, *below = statistics
    if axis.size > 1:
        own_top = top
        top = all_reduce(top.clone(), axis, "max")
        total = all_reduce(total * (own_top - top).exp_(), axis)
        if e:  # all logits, less top
            below[0] += columns.num_real * (own_top - top).nan_to_num_(neginf=0.0)
        all_reduce(statistics[2:], axis)  # a label's logit is 0 where it is not
    loss = total.log().sub_(target - top, alpha=1 - e)
    if e:
        loss.sub_(below[0], alpha=e / columns.num_vocab)
    if labels.device.type != "cpu":  # where they were refused
        loss.masked_fill_(((labels < 0) | (labels >= columns.num_vocab)).flatten(), torch.nan)
    loss = loss.view(labels.shape)
    return loss if ignored is None else loss.masked_fill_(ignored, 0), _Rows(
        column, top, total, ignored
    )


class _Options(NamedTuple):
    """How the loss is computed.

    Attributes:
        overwrite: Whether the backward pass may turn the logits into their gradient.
        backend: Backend of the local passes.
        transform: What the logits become first; their transform is kept in their place.
    """

    overwrite: bool
    backend: str
    transform: LogitTransform


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: _Targets, columns: _Columns, options: _Options
    ) -> Tensor:
        flat = logits.detach().reshape(targets.labels.numel(), logits.shape[-1]).contiguous()
        flat = options.transform(flat)
        passes = ops.cross_entropy(flat, options.backend)
        column = columns.column(targets.labels)
        statistics = passes.statistics(flat, column, columns.num_real, columns.smoothing > 0)
        loss, rows = _combine(statistics, column, targets, columns)
        ctx.columns = columns
        ctx.options = options
        ctx.passes = passes
        ctx.shape = logits.shape
        ctx.save_for_backward(flat, *rows)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, *saved = ctx.saved_tensors
        rows = _Rows(*saved)
        transform = ctx.options.transform
        slope = transform.slope(flat)
        gradient = flat if ctx.options.overwrite else torch.empty_like(flat)
        ctx.passes.gradient_(
            gradient, flat, rows.column, rows.numbers(grad, ctx.columns), ctx.columns.num_real
        )
        if transform.changes:
            gradient.mul_(slope)
        return gradient.view(ctx.shape), None, None, None


class _Chunks(NamedTuple):
    """How the logits are computed, `size` rows at a time.

    Attributes:
        size: Rows of a chunk.
        columns: This rank's columns.
        reduces_dx: Whether the gradient of x is all-reduced over the axis here.
        backend: Backend of the local passes.
        consumer: Takes the gradient of the weight. None: autograd does.
        transform: What the logits become first.
    """

    size: int
    columns: _Columns
    reduces_dx: bool
    backend: str
    consumer: GradientConsumer | None
    transform: LogitTransform


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: _Targets,
        chunks: _Chunks,
    ) -> Tensor:
        columns = chunks.columns
        flat = x.detach().reshape(targets.labels.numel(), x.shape[-1])
        column = columns.column(targets.labels)
        passes = ops.cross_entropy(flat, chunks.backend)
        statistics = [
            passes.statistics(
                chunks.transform(matmul.linear(part, weight, bias)),
                at,
                columns.num_real,
                columns.smoothing > 0,
            )
            for part, at in zip(flat.split(chunks.size), column.split(chunks.size), strict=True)
        ]
        loss, rows = _combine(torch.cat(statistics, 1), column, targets, columns)
        ctx.save_for_backward(flat, weight, bias, *rows)
        ctx.chunks = chunks
        ctx.passes = passes
        ctx.shape = x.shape
        # the leaf itself: recomputation would bring back a copy, without its .grad
        ctx.leaf = weight
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *saved = ctx.saved_tensors
        rows = _Rows(*saved)
        size, columns, reduces_dx, _, consumer, transform = ctx.chunks
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x) if wants_x else None
        dw = None
        db = None
        sums = []
        for start in range(0, len(x), size):
            piece = slice(start, start + size)
            part = x[piece]
            numbers = rows.numbers(grad, columns)[:, piece].contiguous()
            gradient = transform(matmul.linear(part, weight, bias))
            slope = transform.slope(gradient)
            ctx.passes.gradient_(gradient, gradient, rows.column[piece], numbers, columns.num_real)
            if transform.changes:
                gradient.mul_(slope)
            factor = matmul.factor(gradient)
            if dx is not None:
                dx[piece] = matmul.input_gradient(factor, weight)
                if reduces_dx:  # on its way while what follows is computed
                    sums.append(all_reduce_async(dx[piece], columns.axis))
            if wants_weight:
                now = columns.axis.size > 1 and reduces_dx
                product = matmul.weight_gradient(factor, part, ctx.leaf, consumer, now=now)
                dw = product if dw is None or product.is_sparse else dw.add_(product)
            if wants_bias:
                total = gradient.sum(0)
                db = total if db is None else db.add_(total)
        if dx is not None:
            Works(sums).wait()
            dx = dx.view(ctx.shape)
        return dx, dw, db, None, None
