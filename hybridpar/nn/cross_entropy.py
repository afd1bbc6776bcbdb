"""Cross-entropy over logits that are split over the tp axis by vocabulary, without ever gathering them.

Letters: v_local this rank's columns, V the vocabulary (real rows, all ranks), e label smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from hybridpar import ops
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
                                 ignore_index: int = -100, overwrite: bool = False, backend: str = "auto") -> Tensor:
    """The loss of every label: log of the sum of exponentials, less the logit of the label; zero where ignored.

    `vocab_start`: global id of this rank's first column. `valid_vocab`: how many ids are real; columns beyond take no
    part, and get no gradient. May be left out at tp 1, where all columns are real. With `label_smoothing` e, the
    target puts 1 - e on the label and e / V on every real id, as torch.nn.functional.cross_entropy does.

    Keeps the logits for the backward pass. `overwrite`: which may turn them into their gradient, for logits that were
    just computed and that nobody else holds (nor saved for backward); then it can run once.

    Shapes: logits [.., v_local], labels int64 [..], the same on every rank -> [..], fp32, or fp64 for fp64 logits.
    Collectives: forward three all-reduces of a number or (the last, with smoothing) two a label: maximum, sum of
    exponentials, label's logit; backward none. `backend`: of the local passes (ops.cross_entropy).
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
    return _CrossEntropy.apply(logits, labels, ignored, columns, overwrite, backend)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: Tensor, columns: _Columns, overwrite: bool,
                backend: str) -> Tensor:
        rows, axis, e = labels.numel(), columns.axis, columns.smoothing
        flat = logits.detach().reshape(rows, logits.shape[-1]).contiguous()
        column = labels.flatten() - columns.start
        passes = ops.cross_entropy(flat, backend)
        own_top, total, *target = passes.statistics(flat, column, columns.num_real, e > 0)
        top = all_reduce(own_top.clone(), axis, "max")
        total = all_reduce(total * (own_top - top).exp_(), axis)
        below = [torch.where((column >= 0) & (column < columns.num_real), target[0] - top, 0)]
        if e:  # all logits, less top
            below.append(target[1] + columns.num_real * (own_top - top).nan_to_num_(neginf=0.0))
        all_below = all_reduce(torch.stack(below), axis)
        loss = total.log() - (1 - e) * all_below[0]
        if e:
            loss -= e / columns.num_vocab * all_below[1]
        loss.masked_fill_(((labels < 0) | (labels >= columns.num_vocab)).flatten(), torch.nan)
        ctx.columns, ctx.overwrite, ctx.passes, ctx.shape = columns, overwrite, passes, logits.shape
        ctx.save_for_backward(flat, column, top, total, ignored)
        return loss.view(labels.shape).masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, column, top, total, ignored = ctx.saved_tensors
        e = ctx.columns.smoothing
        grad = grad.to(top.dtype).masked_fill(ignored, 0).flatten()
        numbers = torch.stack((top, grad / total, (1 - e) * grad, e / ctx.columns.num_vocab * grad))
        gradient = flat if ctx.overwrite else flat.clone()
        ctx.passes.gradient_(gradient, column, numbers, ctx.columns.num_real)
        return gradient.view(ctx.shape), None, None, None, None, None
