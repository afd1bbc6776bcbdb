"""Piper's knapsack: layers of a stage change to ways that need less memory, the cheapest first,
until the stage fits."""

from __future__ import annotations

import numpy as np

from hybridpar.placement.workload import Floats, Ints

ENOUGH = 1e-9  # bytes


def leaner(cost: Floats, memory: Floats, fastest: Ints, excess: Floats) -> Ints:
    """Change ways, ordered by time lost per memory saved, until `excess` bytes are saved.

    Shapes: cost [layers, ways], memory [y, layers, ways], fastest [layers], excess [y]. Returns
    ways [y, layers].
    """
    return (_of_many if cost.shape[1] > 2 else _of_two)(cost, memory, fastest, excess)


def _of_two(cost: Floats, memory: Floats, fastest: Ints, excess: Floats) -> Ints:
    if cost.shape[1] == 1:
        return np.repeat(fastest[None], len(memory), 0)
    rows = np.arange(len(fastest))
    other = 1 - fastest
    saved = memory[:, rows, fastest] - memory[:, rows, other]
    lost = cost[rows, other] - cost[rows, fastest]
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.where(saved > ENOUGH, lost / saved, np.inf).argsort(1, kind="stable")
    left = excess[:, None] - np.take_along_axis(saved, order, 1).cumsum(1)
    before = np.concatenate([excess[:, None], left[:, :-1]], 1)
    changed = np.zeros(saved.shape, np.bool_)
    np.put_along_axis(changed, order, before >= ENOUGH, 1)
    return np.where(changed, other, fastest)


def _of_many(cost: Floats, memory: Floats, fastest: Ints, excess: Floats) -> Ints:
    """Solve the case of more than two ways, in which a layer may change several times."""
    rows = np.arange(len(fastest))
    found = np.repeat(fastest[None], len(memory), 0)
    for way, used, left in zip(found, memory, excess.tolist(), strict=True):
        while left > ENOUGH:
            saved = used[rows, way][:, None] - used
            with np.errstate(divide="ignore", invalid="ignore"):
                price = np.where(saved > ENOUGH, (cost - cost[rows, way][:, None]) / saved, np.inf)
            v, to = divmod(int(price.argmin()), price.shape[1])
            left -= float(saved[v, to])
            way[v] = to
    return found
