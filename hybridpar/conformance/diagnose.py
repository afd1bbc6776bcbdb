"""Describe a wrong tensor or norm: common mistakes leave a recognizable trace, and are named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Closeness:
    """Comparison of two tensors: equal up to the order of summation, or to `tolerance` of the
    largest element. In float64, sums in another order differ by about 1e-14."""

    tolerance: float = 1e-9

    def __call__(self, got: Tensor, want: Tensor) -> bool:
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-30)
        return got.shape == want.shape and bool(
            ((got - want).abs() <= self.tolerance * scale).all()
        )


def about_tensor(
    got: Sequence[Tensor], want: Tensor, parameters: Mapping[str, Tensor], close: Closeness
) -> str:
    """Describe the ranks' tensors compared with the right one. `parameters`: tensors that may
    have been added too often."""
    num_ranks = len(got)
    first = got[0]
    if num_ranks > 1 and close(sum(got[1:], first), want):
        return "every rank has a partial sum: an all-reduce over the ranks is missing"
    if num_ranks > 1 and close(sum(got[1:], first) / num_ranks, want):
        return "every rank has its own mean: averaging over the ranks is missing"
    if num_ranks > 1 and any(not close(one, first) for one in got):
        right = [rank for rank, one in enumerate(got) if close(one, want)]
        return (
            f"ranks differ; right on {', '.join(map(str, right)) or 'none'}, off by "
            f"{_error(got, want):.1e}"
        )
    if not first.isfinite().all():
        return "not finite, or a part of it is on no rank"
    factor = float((first * want).sum() / want.square().sum().clamp_min(1e-300))
    if close(first, factor * want) and (
        want.numel() > 1 or _is_whole(factor) or _is_whole(1 / (factor or math.inf))
    ):
        return f"{factor:.6g} times what it should be"
    off = first - want
    for name, parameter in parameters.items():
        if (
            parameter.dim() == 1
            and off.shape[-1:] == parameter.shape
            and (times := _times(off, parameter, close))
        ):
            return f"{name} is included {times + 1:.6g} times"
    if close(off, off.mean().expand_as(off)):
        mean = float(off.mean())
        whole = math.exp(min(mean, 10.0))
        return f"off by {mean:.6g}" + (f", log({round(whole)})" if _is_whole(whole) else "")
    return f"off by {_error(got, want):.1e} of its largest element"


def about_norm(
    got: float, want: float, squares: Mapping[str, float], split: Mapping[str, bool], num_ranks: int
) -> str:
    """Describe what a wrong norm leaves out or counts too often. `squares`: squared norm of each
    parameter; `split`: whether the parameter is sharded."""
    off = got**2 - want**2
    groups = dict(squares) | {
        "what is split": sum(squares[name] for name in split if split[name]),
        "what all ranks hold": sum(squares[name] for name in split if not split[name]),
    }
    for name, square in groups.items():
        for times in (-1, num_ranks - 1):
            if times and square and math.isclose(off, times * square, rel_tol=1e-6):
                return (
                    f"{name} is left out" if times < 0 else f"{name} is counted {num_ranks} times"
                )
    return f"{got:.6g}, not {want:.6g}"


def _is_whole(number: float) -> bool:
    return 0.5 < abs(number) < 1e6 and math.isclose(number, round(number), rel_tol=1e-9)


def _times(off: Tensor, parameter: Tensor, close: Closeness) -> float:
    """Return how often the parameter is in every row of a difference; 0 if the difference is
    something else."""
    factor = float(
        (off * parameter).sum() / (parameter.square().sum() * (off.numel() // parameter.numel()))
    )
    return factor if close(off, (factor * parameter).expand_as(off)) else 0.0


def _error(got: Sequence[Tensor], want: Tensor) -> float:
    scale = float(want.abs().max().clamp_min(1e-30))
    return max(float((one - want).abs().max()) for one in got) / scale
