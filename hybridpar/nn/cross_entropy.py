"""Cross-entropy over logits that are split over the tp axis by vocabulary, without ever gathering them.

Letters: v_local this rank's columns, V the vocabulary (real rows, all ranks), e label smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hybridpar.comm import all_reduce
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.nn.embedding import check_range


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a rank's columns are: global ids start to start + num_real; further local ones are padding."""

    axis: Axis
    start: int
    num_real: int
    num_vocab: int
    smoothing: float


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, *, vocab_start: int = 0,
                                 valid_vocab: int | None = None, label_smoothing: float = 0.0,
                                 ignore_index: int = -100, overwrite: bool = False) -> Tensor:
    """The loss of every label: log of the sum of exponentials, less the logit of the label; zero where ignored.

    `vocab_start`: global id of this rank's first column. `valid_vocab`: how many ids are real; columns beyond take no
    part, and get no gradient. May be left out at tp 1, where all columns are real. With `label_smoothing` e, the
    target puts 1 - e on the label and e / V on every real id, as torch.nn.functional.cross_entropy does.

    Holds one buffer the size of the logits in fp32 (fp64) for the backward pass, which turns it into the gradient:
    it can run once. `overwrite`: the buffer may be the logits' own memory, for logits that were just computed and that
    nobody else holds (nor saved for backward).

    Shapes: logits [.., v_local], labels int64 [..], the same on every rank -> [..], fp32, or fp64 for fp64 logits.
    Collectives: forward three all-reduces of a number or (the last, with smoothing) two a label: maximum, sum of
    exponentials, label's logit; backward none.
    Raises: DataError for a label outside the vocabulary; on other devices than the CPU, where looking for them would
    wait, their loss is NaN instead.
    Source: Megatron-LM (arXiv 1909.08053), section 3; smoothing: arXiv 1512.00567.
    """
    v_local = logits.shape[-1]
    if valid_vocab is None:
        if axis.size > 1:
            raise config_error("valid_vocab", None, "must be given where the vocabulary is split over ranks",
                               "the model's vocabulary size")
        valid_vocab = v_local
    if not 0.0 <= label_smoothing < 1.0:
        raise config_error("label_smoothing", label_smoothing, "must be at least 0 and below 1", "0.1")
    assert labels.shape == logits.shape[:-1], f"labels {tuple(labels.shape)} for logits {tuple(logits.shape)}"
    ignored = labels == ignore_index
    labels = labels.masked_fill(ignored, 0)
    if labels.device.type == "cpu":
        check_range(labels, valid_vocab, "label")
    num_real = min(max(valid_vocab - vocab_start, 0), v_local)
    columns = _Columns(axis, vocab_start, num_real, valid_vocab, label_smoothing)
    return _CrossEntropy.apply(logits, labels, ignored, columns, overwrite)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: Tensor, columns: _Columns,
                overwrite: bool) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        buffer = logits.detach().reshape(labels.numel(), logits.shape[-1]).to(dtype, copy=not overwrite)
        real = buffer[:, : columns.num_real]
        top = real.amax(1) if columns.num_real else buffer.new_full((len(buffer),), -torch.inf)
        all_reduce(top, columns.axis, "max")
        real -= top.unsqueeze(1)

        column, elsewhere = _own_column(labels, columns)
        target = buffer.new_zeros(2 if columns.smoothing else 1, len(buffer))  # label's logit [, sum of all logits]
        if columns.num_real:
            target[0] = real.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
        if columns.smoothing:
            torch.sum(real, 1, out=target[1])

        real.exp_()
        total = all_reduce(real.sum(1), columns.axis)
        all_reduce(target, columns.axis)
        loss = total.log() - (1 - columns.smoothing) * target[0]
        if columns.smoothing:
            loss -= columns.smoothing / columns.num_vocab * target[1]
        loss.masked_fill_(((labels < 0) | (labels >= columns.num_vocab)).flatten(), torch.nan)
        ctx.columns, ctx.dtype, ctx.shape = columns, logits.dtype, logits.shape
        ctx.save_for_backward(buffer, total, labels, ignored)
        return loss.view(labels.shape).masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        buffer, total, labels, ignored = ctx.saved_tensors
        columns: _Columns = ctx.columns
        grad = grad.to(buffer.dtype).masked_fill(ignored, 0).flatten()
        real = buffer[:, : columns.num_real]
        real *= (grad / total).unsqueeze(1)
        if columns.smoothing:
            real -= (columns.smoothing / columns.num_vocab * grad).unsqueeze(1)
        if columns.num_real:
            column, elsewhere = _own_column(labels, columns)
            row = torch.arange(len(buffer), device=buffer.device)
            real[row, column] -= ((1 - columns.smoothing) * grad).masked_fill_(elsewhere, 0)
        buffer[:, columns.num_real :] = 0
        return buffer.to(ctx.dtype).view(ctx.shape), None, None, None, None


def _own_column(labels: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    """The local column of each label, and where that column is not on this rank (any column stands in there)."""
    column = labels.flatten() - columns.start
    elsewhere = (column < 0) | (column >= columns.num_real)
    return column.masked_fill_(elsewhere, 0), elsewhere
