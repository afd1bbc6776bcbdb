"""The local passes of the cross-entropy, over a rank's own columns of the logits.

Ranks exchange maxima and sums in between: see nn.vocab_parallel_cross_entropy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridpar.ops.backends.libraries import Shapes, nothing, wide_type
from hybridpar.ops.backends.registry import resolve


def cross_entropy(logits: Tensor, backend: str = "auto") -> Any:
    """Return the two passes for logits like these, outside of autograd: `statistics` and
    `gradient_`.

        statistics(logits [rows, v], column, num_real, with_sum) -> [3 or 4, rows]: the largest of
            the
        first num_real logits of a row, the sum of the exponentials of (logit - largest), the logit
            at
        `column` [rows] (0 if this rank has no such column), and with_sum the sum of (logit -
            largest).
        gradient_(gradient, logits, column, numbers, num_real) writes the gradient of the logits,
            which
        may be the logits' memory: exp(logit - top) * factor - level, less `target` at column; zero
        beyond num_real; numbers [4, rows] = top, factor, target, level.

    Both compute in float32, or float64 for float64 logits.
    Raises: ConfigError if the backend cannot run.
    """
    return resolve("cross_entropy", backend, logits)()


class Passes:
    """The torch reference."""

    @staticmethod
    def statistics(logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
        real = logits[:, :num_real].to(torch.promote_types(logits.dtype, torch.float32))
        out = real.new_zeros(4 if with_sum else 3, logits.shape[0])
        if num_real == 0:
            out[0] = -torch.inf
            return out
        torch.amax(real, 1, out=out[0])
        out[1] = (real - out[0].nan_to_num(neginf=0.0).unsqueeze(1)).exp().sum(1)
        here = (column >= 0) & (column < num_real)
        out[2] = real.gather(1, column.where(here, 0).unsqueeze(1)).squeeze(1).where(here, 0)
        if with_sum:
            torch.sum(real - out[0].unsqueeze(1), 1, out=out[3])
        return out

    @staticmethod
    def gradient_(
        gradient: Tensor, logits: Tensor, column: Tensor, numbers: Tensor, num_real: int
    ) -> None:
        top, factor, target, level = numbers.unsqueeze(-1)
        wide = (logits[:, :num_real].to(numbers.dtype) - top).exp_().mul_(factor).sub_(level)
        row = ((column >= 0) & (column < num_real)).nonzero().squeeze(1)
        wide[row, column[row]] -= target.squeeze(1)[row]
        gradient[:, :num_real] = wide
        gradient[:, num_real:] = 0


class Compiled:
    """The passes of a library, such as torch.ops.hybridpar."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def statistics(self, logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
        return self._library.cross_entropy(logits, column, num_real, with_sum)

    def gradient_(
        self, gradient: Tensor, logits: Tensor, column: Tensor, numbers: Tensor, num_real: int
    ) -> None:
        self._library.cross_entropy_backward_(gradient, logits, column, numbers, num_real)
        torch.autograd.graph.increment_version(gradient)


PASSES: Shapes = {
    "cross_entropy": lambda logits, column, num_real, with_sum: logits.new_empty(
        (4 if with_sum else 3, logits.shape[0]), dtype=wide_type(logits)
    ),
    "cross_entropy_backward_": nothing,
}
