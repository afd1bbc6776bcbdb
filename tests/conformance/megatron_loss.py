"""Megatron Core's cross-entropy beside torch's: `python -m conformance.megatron_loss` prints what
each case found."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel  # here once, else in every rank
from torch import nn

from conformance import wrong
from hybridpar.conformance import CASES, Built, Case, conform
from hybridpar.conformance.cases import Layout, Loss
from hybridpar.nn import split_ranges

EVEN = 52
"""A vocabulary that two ranks share equally."""


def megatron_loss(plain: Any, group: dist.ProcessGroup) -> Built:
    """Megatron Core's own cross-entropy, over a vocabulary of equal shares."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    (start, stop), head = split_ranges(EVEN, group.size())[group.rank()], plain.head
    head.weight = nn.Parameter(head.weight[start:stop].detach().clone())
    head.bias = nn.Parameter(head.bias[start:stop].detach().clone())

    def forward(plain: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = head(wrong.Sum.apply(x, False, True))
        valid = labels >= 0
        with torch.compiler.set_stance("force_eager"):  # a fork may not compile
            losses = tensor_parallel.vocab_parallel_cross_entropy(
                logits, labels.clamp_min(0), plain.smoothing_given
            )
        return (losses * valid).sum() / valid.sum()

    return Built(wrong.Of(plain, forward), layout=lambda name, parameter: Layout(0))


def megatron_plain(smoothing: float) -> nn.Module:
    """Megatron's smoothing is shared by all other labels, torch's by all."""
    plain = Loss(smoothing * EVEN / (EVEN - 1), EVEN)
    plain.smoothing_given = smoothing
    return plain


def even_labels() -> tuple[torch.Tensor, ...]:
    x, labels = CASES["loss"].inputs()
    return x, labels.clamp_max(EVEN - 1)


if __name__ == "__main__":
    for smoothing in (0.0, 0.1):
        case = Case(partial(megatron_plain, smoothing), even_labels, "", "7452 (1)")
        for result in conform(
            {f"{smoothing}": megatron_loss}, [1, 2], cases={f"{smoothing}": case}, tolerance=1e-5
        ):
            print(result)
