"""The passes of an optimizer over lists of tensors: element by element, and sums of squares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridpar.ops.backends.libraries import Shapes, nothing
from hybridpar.ops.backends.registry import resolve

Tensors = Sequence[Tensor]
K = TypeVar("K")


def optimizer(x: Tensor, backend: str = "auto") -> Any:
    """Return the passes for weights like `x` (float32 or float64): see Passes, the torch reference.

    Raises: ConfigError if the backend cannot run.
    """
    return resolve("optimizer", backend, x)()


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that an update reads and writes.

    They are lists of contiguous tensors, one for each parameter or part of one.

    Attributes:
        old, new: Before and after; the same list if the update is in place.
        working: A copy of the new ones in the type that micro-batches compute in, if there is one.
        predicted: Whether `working` holds new + (new - old).
    """

    old: Tensors
    new: Tensors
    working: Tensors = ()
    predicted: bool = False

    @staticmethod
    def in_place(tensors: Tensors) -> Weights:
        """Make weights that are written over."""
        return Weights(tensors, tensors)

    def only(self, indices: Sequence[int]) -> Weights:
        """Return the weights of some parameters, in ascending order."""
        if len(indices) == len(self.old):
            return self
        old = [self.old[i] for i in indices]
        new = old if self.new is self.old else [self.new[i] for i in indices]
        return Weights(
            old, new, [self.working[i] for i in indices] if self.working else (), self.predicted
        )

    @contextmanager
    def updating(self) -> Iterator[list[Tensor]]:
        """Yield the new weights, equal to the old ones, for kernels that work in place; then
        write the working copy."""
        before = self.old
        if self.new is not self.old:
            torch._foreach_copy_(list(self.new), list(self.old))
        elif self.predicted:
            before = [x.clone() for x in self.old]
        yield list(self.new)
        if self.working:
            for working, old, new in zip(self.working, before, self.new, strict=True):
                working.copy_((new * 2).sub_(old) if self.predicted else new)


@dataclass(frozen=True, slots=True)
class AdamStep:
    """A step of Adam: with g the gradient times `scale` and t = `count`,

        m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g^2
        direction = (a m + b g) / (sqrt(v / (1 - beta2^t)) + eps)

    where (a, b) is `nesterov`, or (1 / (1 - beta1^t), 0) without.
    """

    scale: float | Tensor
    beta1: float
    beta2: float
    eps: float
    count: int
    nesterov: tuple[float, float] | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """a and b."""
        return self.nesterov or (1 / (1 - self.beta1**self.count), 0.0)


class Passes:
    """The torch reference.

    Its kernels may round the last few elements of a tensor in another way than the others: numbers
    that must be equal wherever they lie in a parameter must be a tensor of their own.
    """

    @staticmethod
    def adam(
        weights: Weights,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        decays: Sequence[float],
        lr: float,
        step: AdamStep,
    ) -> None:
        """Compute new = (1 - lr decay) old - lr direction, with a decay for each tensor;
        gradients are used up."""
        with weights.updating() as values:
            for decay, columns in grouped(decays, values, gradients, *moments):
                (_adam if step.nesterov is None else _nesterov)(columns, decay, lr, step)

    @staticmethod
    def adam_directions(
        values: Tensors,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        decays: Sequence[float],
        step: AdamStep,
    ) -> None:
        """Write -(direction + decay value) over the gradients."""
        assert step.nesterov is None
        count = _count(values, step)
        divisor = divisor_of(gradients, step.scale)
        for decay, group in grouped(decays, values, gradients, *moments):
            for values_, grads, means, squares in blocks(group):
                scratch = [torch.zeros_like(g) for g in grads]
                torch._fused_adam_(
                    scratch,
                    grads,
                    means,
                    squares,
                    [],
                    [count] * len(grads),
                    lr=1.0,
                    beta1=step.beta1,
                    beta2=step.beta2,
                    weight_decay=0.0,
                    eps=step.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=None,
                )
                if decay:
                    torch._foreach_add_(scratch, values_, alpha=-decay)
                torch._foreach_copy_(grads, scratch)

    @staticmethod
    def move(
        weights: Weights, directions: Tensors, keeps: Sequence[float], factors: Sequence[float]
    ) -> None:
        """Compute new = keep old + factor direction, with a keep and a factor for each tensor."""
        with weights.updating() as values:
            if any(keep != 1 for keep in keeps):
                torch._foreach_mul_(values, list(keeps))
            for factor in dict.fromkeys(factors):
                chosen = [i for i, f in enumerate(factors) if f == factor]
                torch._foreach_add_(
                    [values[i] for i in chosen], [directions[i] for i in chosen], alpha=factor
                )

    @staticmethod
    def extrapolate(weights: Weights, previous: Tensors) -> None:
        """Compute new += u - previous and previous = u, where u = new - old; nothing is
        predicted."""
        for values, olds, before in blocks([list(weights.new), list(weights.old), list(previous)]):
            updates = torch._foreach_sub(values, olds)
            torch._foreach_add_(values, updates)
            torch._foreach_sub_(values, before)
            torch._foreach_copy_(before, updates)
        if weights.working:
            torch._foreach_copy_(list(weights.working), list(weights.new))

    @staticmethod
    def sum_squares(tensors: Tensors) -> Tensor:
        """Return the sum of squares of each tensor; float64 [number of tensors]. Inf and NaN
        propagate.

        float32 sums are taken over rows of 1024 elements and squared and added in float64. Measured
        on 33M normal numbers (one thread): a float32 norm of the full tensor is off by 2e-3 and
        takes 4 ms, this is off by 6e-10 and takes the same 4 ms, torch's norm with dtype=float64
        takes 120 ms (it makes a float64 copy). An element beyond 1.8e19, whose square overflows in
        float32, comes out infinite.
        """
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack([torch.cat(_row_norms(x)).double().square().sum() for x in tensors])


class Compiled:
    """The passes of a library, such as torch.ops.hybridpar.

    Gradients do not change, except in `adam_directions`, and elements do not depend on their
    position.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def adam(
        self,
        weights: Weights,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        decays: Sequence[float],
        lr: float,
        step: AdamStep,
    ) -> None:
        self._adam(weights, gradients, moments, [1 - lr * decay for decay in decays], lr, step)

    def adam_directions(
        self,
        values: Tensors,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        decays: Sequence[float],
        step: AdamStep,
    ) -> None:
        self._adam(
            Weights(values, gradients), gradients, moments, [-decay for decay in decays], 1.0, step
        )

    def _adam(
        self,
        weights: Weights,
        gradients: Tensors,
        moments: tuple[Tensors, Tensors],
        keeps: list[float],
        rate: float,
        step: AdamStep,
    ) -> None:
        of_mean, of_gradient = step.factors
        root = sqrt(1 - step.beta2**step.count)
        numbers = [
            float(step.scale),
            1 - step.beta1,
            step.beta2,
            of_mean * rate,
            of_gradient * rate,
            1 / root,
            step.eps,
        ]
        self._library.adam_(
            weights.old,
            gradients,
            *moments,
            weights.new,
            weights.working,
            keeps,
            numbers,
            weights.predicted,
        )
        _changed(*moments, weights.new, weights.working)

    def move(
        self,
        weights: Weights,
        directions: Tensors,
        keeps: Sequence[float],
        factors: Sequence[float],
    ) -> None:
        self._library.move_(
            weights.old, directions, weights.new, weights.working, keeps, factors, weights.predicted
        )
        _changed(weights.new, weights.working)

    def extrapolate(self, weights: Weights, previous: Tensors) -> None:
        self._library.extrapolate_(weights.old, weights.new, previous, weights.working)
        _changed(weights.new, previous, weights.working)

    def sum_squares(self, tensors: Tensors) -> Tensor:
        return (
            self._library.sum_squares(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
        )


PASSES: Shapes = {
    "adam_": nothing,
    "move_": nothing,
    "extrapolate_": nothing,
    "sum_squares": lambda tensors: torch.empty(
        len(tensors), dtype=torch.float64, device=tensors[0].device if tensors else None
    ),
}

BLOCK = {
    "cpu": 1 << 16,
    "cuda": 1 << 26,
}  # elements of scratch space; on a CPU it is to stay in the cache


def blocks(columns: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Cut the columns into flat pieces of BLOCK elements; small tensors share a block."""
    size = BLOCK.get(columns[0][0].device.type, BLOCK["cuda"])
    block: list[list[Tensor]] = [[] for _ in columns]
    room = size
    for tensors in zip(*columns, strict=True):
        for pieces in zip(*(t.view(-1).split(size) for t in tensors), strict=True):
            if block[0] and pieces[0].numel() > room:
                yield block
                block = [[] for _ in columns]
                room = size
            room -= pieces[0].numel()
            for column, piece in zip(block, pieces, strict=True):
                column.append(piece)
    yield block


def _adam(columns: list[list[Tensor]], decay: float, lr: float, step: AdamStep) -> None:
    values, grads, means, squares = columns
    torch._fused_adamw_(
        values,
        grads,
        means,
        squares,
        [],
        [_count(values, step)] * len(values),
        lr=lr,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor_of(grads, step.scale),
        found_inf=None,
    )


def _nesterov(columns: list[list[Tensor]], decay: float, lr: float, step: AdamStep) -> None:
    """a (new mean) + b g = total * (beta * (old mean) + (1 - beta) * g): Adam with another
    beta1."""
    of_mean, of_gradient = step.factors
    total = of_mean + of_gradient
    beta = of_mean * step.beta1 / total
    count = _count(columns[0], step)
    for values, grads, means, squares in blocks(columns):
        if isinstance(step.scale, Tensor) or step.scale != 1.0:
            torch._foreach_mul_(grads, step.scale)
        if decay:
            torch._foreach_mul_(values, 1 - lr * decay)
        torch._fused_adam_(
            values,
            grads,
            [m.clone() for m in means],
            squares,
            [],
            [count] * len(values),
            lr=lr * total * (1 - beta**step.count),
            beta1=beta,
            beta2=step.beta2,
            weight_decay=0.0,
            eps=step.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )
        torch._foreach_lerp_(means, grads, 1 - step.beta1)


def grouped(keys: Sequence[K], *columns: Tensors) -> Iterator[tuple[K, list[list[Tensor]]]]:
    """Yield each key, such as a weight decay, with the tensors of each column that have it, in
    their order."""
    for key in dict.fromkeys(keys):
        yield (
            key,
            [[x for x, of in zip(column, keys, strict=True) if of == key] for column in columns],
        )


def _count(tensors: Tensors, step: AdamStep) -> Tensor:
    return torch.full((), float(step.count), device=tensors[0].device)


def divisor_of(gradients: Tensors, scale: float | Tensor) -> Tensor | None:
    """Return the number that a fused kernel is to divide the gradients by (its `grad_scale`), or
    None.

    The kernels know a float32 divisor only, too coarse for float64 gradients: those are scaled
    here, in place.
    """
    if not isinstance(scale, Tensor) and scale == 1.0:
        return None
    if gradients[0].dtype == torch.float64:
        torch._foreach_mul_(list(gradients), scale)
        return None
    scale = torch.as_tensor(scale, dtype=torch.float64, device=gradients[0].device)
    return scale.reciprocal().float()


ROW = 1024


def _row_norms(x: Tensor) -> list[Tensor]:
    """Return norms of pieces of `x` small enough for its own precision, as vectors of its dtype."""
    flat = x.reshape(-1)
    if flat.dtype == torch.float64 or flat.numel() <= ROW:
        return [torch.linalg.vector_norm(flat).view(1)]
    split = flat.numel() // ROW * ROW
    norms = [torch.linalg.vector_norm(flat[:split].view(-1, ROW), dim=1)]
    if split < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[split:]).view(1))
    return norms


def _changed(*columns: Iterable[Tensor]) -> None:
    """Tell autograd that a pass has written these tensors."""
    for column in columns:
        torch.autograd.graph.increment_version(column)
