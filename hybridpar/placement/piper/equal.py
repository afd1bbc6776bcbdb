"""The baseline of PipeDream-2BW's planner: equal stages, one degree of each parallelism, and either
full recomputation or none.

Source: Narayanan et al., PipeDream-2BW, ICML 2021, section 5; Piper (NeurIPS 2021), section 5
("equi").
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridpar.placement.piper.instance import PLAIN, RECOMPUTED, Instance
from hybridpar.placement.piper.stage_scoring import (
    LayerGroup,
    PlannerResult,
    StagePlan,
    make_plan,
    score_stages,
)
from hybridpar.placement.workload import order_of


@dataclass(frozen=True, slots=True)
class Allowed:
    """Features that a plan may use; without one of them it is the paper's ablation noDP, noTP or
    noAR."""

    data: bool = True
    tensor: bool = True
    recompute: bool = True

    @property
    def name(self) -> str:
        without = [
            x for x, y in (("DP", self.data), ("TP", self.tensor), ("AR", self.recompute)) if not y
        ]
        return "piper" + "".join(f" no{x}" for x in without)


def plan_equal_stages(instance: Instance, allowed: Allowed | None = None) -> StagePlan:
    """Return the best plan of equal stages.

    If at least half of the layers have one name (transformer layers), these are divided evenly, and
    the layers before and after them join the first and last stage, or form separate stages.
    Otherwise all layers are divided in order.
    """
    start = time.monotonic()
    best: tuple[float, Sequence[LayerGroup]] = (float("inf"), ())
    tried = 0
    for groups in _splits(instance):
        for stages in _uniform(instance, groups, allowed or Allowed()):
            tried += 1
            score = score_stages(instance, stages)
            if not score.problems and score.time < best[0]:
                best = score.time, stages
    found = PlannerResult(best[1], {"tried": tried})
    return make_plan(instance, "equi", found, time.monotonic() - start)


def _splits(instance: Instance) -> Iterator[list[list[int]]]:
    order = order_of(instance.num_layers, [(u, v) for u, v, _ in instance.edges])
    name, count = Counter(instance.names).most_common(1)[0]
    if not name or 2 * count < instance.num_layers:
        for p in range(1, min(instance.num_devices, len(order)) + 1):
            yield _deal(order, p)
        return
    layers = [v for v in order if instance.names[v] == name]
    first, last = _ends(instance, set(layers), order)
    for own in (0, 1):
        for p in range(1, min(instance.num_devices - 2 * own, len(layers)) + 1):
            groups = _deal(layers, p)
            if own:
                yield [group for group in ([*first], *groups, [*last]) if group]
            else:
                groups[0] = [*first, *groups[0]]
                groups[-1] = [*groups[-1], *last]
                yield groups


def _deal(items: Sequence[int], p: int) -> list[list[int]]:
    """Return p consecutive parts; the last ones are one longer if the items do not divide
    evenly."""
    size, longer = divmod(len(items), p)
    ends = [size * (i + 1) + max(0, i + 1 - (p - longer)) for i in range(p)]
    return [list(items[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _ends(
    instance: Instance, layers: set[int], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the layers that are not in `layers`: the layers before them, and the layers after any
    of them."""
    after = set(layers)
    for u in order:
        if u in after:
            after |= {v for a, v, _ in instance.edges if a == u}
    return [v for v in order if v not in after], [
        v for v in order if v in after and v not in layers
    ]


def _uniform(
    instance: Instance, groups: list[list[int]], allowed: Allowed
) -> Iterator[list[LayerGroup]]:
    p = len(groups)
    devices = instance.num_devices
    for d in range(1, min(devices, instance.num_microbatches) // p + 1):
        if instance.num_microbatches % d or (d > 1 and not allowed.data):
            continue
        for t in instance.degrees:
            if (
                p * d * t > devices
                or (t > 1 and not allowed.tensor)
                or not all(t in ways for ways in instance.ways)
            ):
                continue
            for wanted in (PLAIN, RECOMPUTED)[: 1 + allowed.recompute]:
                yield [
                    LayerGroup({v: _named(instance, v, t, wanted) for v in group}, d, t)
                    for group in groups
                ]


def _named(instance: Instance, v: int, t: int, wanted: str) -> str:
    names = [way.name for way in instance.ways[v][t]]
    return wanted if wanted in names else names[0]
