"""Cross-entropy over split logits equals torch's over whole ones: losses, gradients, padding,
smoothing, traffic."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import TOLERANCE, leaf, traffic, values
from torch import Tensor
from torch.nn import functional as F

from hybridpar.comm import gather_from
from hybridpar.errors import ConfigError, DataError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import (
    CrossEntropySpec,
    VocabProjection,
    split_ranges,
    split_sizes,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from hybridpar.nn.linear import column_linear


def labels_for(vocab: int, *batch: int, ignored: bool = True) -> Tensor:
    labels = torch.randint(vocab, batch, generator=torch.Generator().manual_seed(1))
    if ignored and labels.numel() > 1:
        labels.view(-1)[1] = -100
    return labels


def part(axis: Axis, columns: int) -> slice:
    return slice(*split_ranges(columns, axis.size)[axis.rank])


def check(axis: Axis, vocab: int, padding: int, smoothing: float, *batch: int) -> None:
    """Padded columns hold huge logits: were they in the softmax, nothing else would count."""
    whole = (values("logits", *batch, vocab) * 3).requires_grad_()
    padded = F.pad(whole.detach(), (0, padding), value=1e4)
    mine = part(axis, vocab + padding)
    local = padded[..., mine].clone().requires_grad_()
    labels = labels_for(vocab, *batch)
    with traffic(axis, all_reduce=3):
        loss = vocab_parallel_cross_entropy(
            local,
            labels,
            axis,
            vocab_start=mine.start,
            valid_vocab=vocab,
            label_smoothing=smoothing,
        )
    if axis.size > 1:  # maximum, sum, target [and sum of logits]: nothing as long as the vocabulary
        assert axis.traffic.num_bytes["all_reduce"] == labels.numel() * 8 * (4 if smoothing else 3)
    reference = F.cross_entropy(
        whole.reshape(labels.numel(), vocab),
        labels.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(loss, reference.view(batch), **TOLERANCE)
    grad = values("grad", *batch)
    before = local.detach().clone()
    with traffic(axis):
        loss.backward(grad)
    assert torch.equal(local, before)
    reference.view(batch).backward(grad)
    expected = F.pad(whole.grad, (0, padding))[..., mine]
    torch.testing.assert_close(local.grad, expected, **TOLERANCE)


def strided_low_precision_and_reused(axis: Axis) -> None:
    mine = part(axis, 11)
    whole = values("logits", 11, 4)
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-6)):
        logits = whole.to(dtype).double().T.requires_grad_()
        local = whole[mine].to(dtype).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            local.T,
            labels_for(11, 4),
            axis,
            vocab_start=mine.start,
            valid_vocab=11,
            label_smoothing=0.1,
        )
        reference = F.cross_entropy(
            logits, labels_for(11, 4), reduction="none", label_smoothing=0.1
        )
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-6)
        reference.sum().backward()
        loss.sum().backward()  # an expanded gradient
        torch.testing.assert_close(
            local.grad.double(), logits.grad.T[mine], rtol=tolerance, atol=tolerance
        )


def extreme_logits(axis: Axis) -> None:
    """Large logits neither overflow nor hide behind a rank's own maximum; ids that are masked with
    -inf are allowed."""
    mine = part(axis, 7)
    whole = torch.tensor(
        [[1e4, -1e4, 0.0, 5e3, 1e4, -torch.inf, 2.0], [-1e4] * 6 + [-9999.0]], dtype=torch.float64
    )
    labels = torch.tensor([4, 6])
    local = whole[:, mine].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels, axis, vocab_start=mine.start, valid_vocab=7)
    torch.testing.assert_close(loss, F.cross_entropy(whole, labels, reduction="none"), **TOLERANCE)
    loss.sum().backward()
    assert local.grad.isfinite().all()


def gathered_logits_give_the_same(axis: Axis) -> None:
    """The loss of gathered logits is not off by log(tp), and its gradient is not multiplied by
    tp."""
    mine, labels = part(axis, 7), labels_for(7, 5, ignored=False)
    a, b = (values("logits", 5, 7)[:, mine].clone().requires_grad_() for _ in range(2))
    split = vocab_parallel_cross_entropy(
        a, labels, axis, vocab_start=mine.start, valid_vocab=7
    ).mean()
    gathered = F.cross_entropy(gather_from(b, axis, -1, split_sizes(7, axis.size)), labels)
    torch.testing.assert_close(split, gathered, **TOLERANCE)
    split.backward()
    gathered.backward()
    torch.testing.assert_close(a.grad, b.grad, **TOLERANCE)


def in_chunks(axis: Axis) -> None:
    """The logits a few rows at a time: loss and gradients as all at once."""
    for vocab, smoothing, biased, chunk in product((7, 1), (0.0, 0.1), (True, False), (1, 4, 100)):
        mine = part(axis, vocab)
        labels = labels_for(vocab, 2, 5)
        options = {"vocab_start": mine.start, "valid_vocab": vocab, "label_smoothing": smoothing}
        sides = []
        for chunked in (False, True):
            x = leaf("x", 2, 5, 6)
            weight = values("weight", vocab, 6)[mine].clone().requires_grad_()
            bias = values("bias", vocab)[mine].clone().requires_grad_() if biased else None
            leaves = [t for t in (x, weight, bias) if t is not None]
            if chunked:
                with traffic(axis, all_reduce=3):
                    projection = VocabProjection(weight, bias)
                    spec = CrossEntropySpec(axis, **options)
                    loss = vocab_parallel_linear_cross_entropy(
                        x, projection, labels, spec, chunk=chunk
                    )
            else:
                loss = vocab_parallel_cross_entropy(
                    column_linear(x, weight, bias, axis), labels, axis, **options
                )
            grads = torch.autograd.grad(loss, leaves, values("grad", 2, 5))
            sides.append([loss, *grads])
        for whole, chunks in zip(*sides, strict=True):
            torch.testing.assert_close(chunks, whole, **TOLERANCE)


def labels_outside(axis: Axis) -> None:
    local = values("logits", 3, 8)[:, (mine := part(axis, 8))]
    for bad in (-1, 7, 8):
        with pytest.raises(DataError, match=rf"label {bad} at \[1\] is out of range: 0 to 6"):
            vocab_parallel_cross_entropy(
                local, torch.tensor([0, bad, -100]), axis, vocab_start=mine.start, valid_vocab=7
            )
    loss = vocab_parallel_cross_entropy(
        local,
        torch.tensor([0, 6, -1]),
        axis,
        vocab_start=mine.start,
        valid_vocab=7,
        ignore_index=-1,
    )
    assert loss[2] == 0
    assert loss[0] > 0


def run_cases(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for vocab, padding, smoothing, batch in product(
        (7, 2, 1, 16), (0, 1, 5), (0.0, 0.1), ((2, 3), (), (0, 3))
    ):
        try:
            check(axis, vocab, padding, smoothing, *batch)
        except Exception as error:
            raise AssertionError(
                f"{vocab=} {padding=} {smoothing=} {batch=} at tp {tp}: {error}"
            ) from error
    for case in (
        strided_low_precision_and_reused,
        extreme_logits,
        gathered_logits_give_the_same,
        in_chunks,
        labels_outside,
    ):
        case(axis)


def test_cross_entropy_on_one_process() -> None:
    run_cases(1)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [3, 4])
def test_cross_entropy_split(tp: int) -> None:
    run_ranks(run_cases, tp, tp)


def test_all_columns_are_real_on_one_rank() -> None:
    logits = leaf("logits", 4, 7)
    labels = labels_for(7, 4)
    loss = vocab_parallel_cross_entropy(logits, labels, Axis("tp"))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="none"), **TOLERANCE)


def test_smoothing_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing = 1\.0"):
        vocab_parallel_cross_entropy(
            leaf("logits", 4, 7), labels_for(7, 4), Axis("tp"), label_smoothing=1.0
        )


def test_overwrite_uses_the_logits_memory() -> None:
    weight = leaf("weight", 7, 5)
    labels = labels_for(7, 4)
    x = leaf("x", 4, 5)
    x_ref = leaf("x", 4, 5)
    logits = F.linear(x, weight)
    loss = vocab_parallel_cross_entropy(logits, labels, Axis("tp"), overwrite=True)
    reference = F.cross_entropy(F.linear(x_ref, weight), labels, reduction="none")
    torch.testing.assert_close(loss, reference, **TOLERANCE)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="modified by an inplace operation"
    ):  # the logits are their gradient now
        loss.sum().backward()
    torch.testing.assert_close(
        logits.detach().sum(1), torch.zeros(4, dtype=torch.float64)
    )  # gradients by now
    reference.sum().backward()
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
