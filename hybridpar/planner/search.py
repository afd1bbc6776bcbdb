"""The search: every grid, micro-batch size and schedule that the devices allow, best first, as far as it can matter.

    1  every candidate gets the split that balances its stages' measured times          candidates, split
    2  bounds: the least time that a candidate takes; the one with the least is next    bound
    3  where its memory is too much, a new split, with recomputation where needed       memory
    4  its step time, simulated; done when no candidate that is left can be among the
       best; the memory of these is predicted exactly, and mended where it is too much  cost, memory

So what is left out is slower, as far as the bound is one. Axes that the user has chosen stay.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpar.config import Config
from hybridpar.errors import ConfigError, config_error
from hybridpar.planner.candidates import Candidate, Request, balanced, batch_size, candidates, grids
from hybridpar.planner.cost import StepCost
from hybridpar.planner.machine import Machine
from hybridpar.planner.memory import TIGHT, MemoryCheck, host_shortage
from hybridpar.validate import problems

STALE_GAIN = 0.05
"""Share by which a schedule on older weights must be faster than all others. Old gradients cost loss at equal tokens,
and of step times that differ by little the planner cannot say which is the shorter (ERROR)."""
ERROR = 0.035
"""Half of the step times that were predicted and measured differ by more (25 of two machines and a slow link:
benchmarks/results/planner*.json). A configuration whose memory is nearly full must be faster by this share."""
_WORTH_SHARING = 0.01
"""Share of the step that the optimizer takes from which ZeRO-1 is tried, besides where memory is short."""
_DOUBT = 0.02
"""Share by which ZeRO-1 must be faster where a configuration without it fits: less is within predictions' error."""


@dataclass(frozen=True)
class Result:
    """Candidates that can run, best first; those that cannot, likeliest first; the number that was looked at."""

    ranked: list[Candidate]
    failed: list[Candidate]
    considered: int
    limit: float


def search(config: Config, machine: Machine, request: Request) -> Result:
    """Raises: ConfigError if nothing can be tried: no grid has that many devices, or divides the batch."""
    found = list(candidates(config, machine, request))
    if not found:
        raise _nothing(config, machine, request)
    search = _Search(found, machine.memory_limit, request)
    while (candidate := search.next()) is not None:
        search.consider(candidate)
    ranked = search.verified()
    for candidate in search.failed:
        candidate.reason = candidate.reason or _why(candidate, ranked, search.memory.limit)
    return Result(ranked[: request.top], search.failed, search.considered, search.memory.limit)


class _Search:
    """A queue of candidates, the one with the lowest bound first; those that can run, and those that cannot."""

    def __init__(self, candidates: Sequence[Candidate], limit: float, request: Request):
        self.request, self.memory = request, MemoryCheck(limit)
        self.ranked: list[Candidate] = []
        self.failed: list[Candidate] = []
        self.considered = 0
        self._queue: list[tuple[float, int, Candidate]] = []
        self._pushed = 0
        self._too_large: dict[object, int] = {}
        for candidate in candidates:
            self._consider_later(candidate)

    def _push(self, candidate: Candidate) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (candidate.least_time, self._pushed, candidate))

    def _consider_later(self, candidate: Candidate) -> None:
        self.considered += 1
        self._push(candidate)

    def next(self) -> Candidate | None:
        """Takes the candidate with the lowest bound; None: no other can be among the best."""
        candidate = heapq.heappop(self._queue)[2] if self._queue else None
        top = self.request.top
        if candidate and len(self.ranked) >= top and (
                candidate.least_time >= (1 + ERROR) * _rank(self.ranked[top - 1])):
            return None
        return candidate

    def consider(self, candidate: Candidate) -> None:
        """Ranks it where it fits, as far as estimates say; else puts it back with recomputation, or gives it up."""
        fits = self.memory.fits(candidate.cost)
        self._add_sharded(candidate, only_if_worth=fits)
        if not fits:
            if not self._add_recomputed(candidate):
                self.failed.append(candidate)
        elif wrong := problems(candidate.config, candidate.cost.machine.num_devices):
            candidate.reason = str(wrong[0])
            self.failed.append(candidate)
        else:
            self.ranked.append(candidate)
            self.ranked.sort(key=_rank)

    def _add_sharded(self, candidate: Candidate, *, only_if_worth: bool) -> None:
        """Also tries ZeRO-1 beside one that may gain by it."""
        parallel, cost = candidate.config.parallel, candidate.cost
        if parallel.zero or parallel.dp == 1 or candidate.tried_recomputation:
            return
        if not only_if_worth or max(rank.update for rank in cost.ranks) >= _WORTH_SHARING * candidate.least_time:
            self._consider_later(balanced(replace(candidate.config, parallel=replace(parallel, zero=1)), cost.machine))

    def _add_recomputed(self, candidate: Candidate) -> bool:
        """Puts the candidate back with recomputation: what is cheap of all layers, if that is enough, and layers where
        it is needed, of which there may be few. False: it does not fit so either."""
        pipeline, b = candidate.config.pipeline, candidate.config.train.micro_batch_size
        kind = (candidate.grid, candidate.config.parallel.zero, pipeline.schedule, pipeline.warmup, pipeline.num_chunks)
        if candidate.tried_recomputation or b >= self._too_large.get(kind, b + 1):
            return False
        again = None
        if self.memory.least(candidate.cost) <= self.memory.limit:
            again = self.memory.recomputed(candidate, exact=False)
        if again is None:
            self._too_large[kind] = b
            return False
        selective = replace(candidate.config, pipeline=replace(pipeline, recompute="selective"))
        cheap = Candidate(selective, StepCost(selective, candidate.cost.machine), tried_recomputation=True)
        for one in [again, cheap] if self.memory.fits(cheap.cost) else [again]:
            self._push(one)
        return True

    def verified(self) -> list[Candidate]:
        """The best of those ranked, whose memory was predicted exactly (quick: until one has room, no others)."""
        left, sure = list(self.ranked), list[Candidate]()
        while left and (len(sure) < self.request.top or _rank(left[0]) < min(map(self._rank_with_room, sure))):
            candidate = left.pop(0)
            if candidate.memory is None and not (self.request.quick and any(map(self._has_room, sure))):
                self.memory.measure(candidate)
            if reason := host_shortage(candidate):
                candidate.reason = reason
                self.failed.append(candidate)
            elif candidate.memory is None or candidate.peak <= self.memory.limit:
                sure.append(candidate)
            elif (again := self.memory.recomputed(candidate)) is not None:
                left = sorted([*left, again], key=_rank)
            else:
                self.failed.append(candidate)
        return sorted(sure, key=self._rank_with_room)

    def _has_room(self, candidate: Candidate) -> bool:
        return candidate.memory is None or candidate.peak <= TIGHT * self.memory.limit

    def _rank_with_room(self, candidate: Candidate) -> float:
        return _rank(candidate) * (1 if self._has_room(candidate) else 1 + ERROR)


def _rank(candidate: Candidate) -> float:
    return (candidate.cost.step_time * (1 + _DOUBT * candidate.config.parallel.zero)
            * (1 + STALE_GAIN * candidate.is_stale))


def _why(candidate: Candidate, ranked: Sequence[Candidate], limit: float) -> str:
    """Which stage needs how much, and what near it would fit."""
    if candidate.memory is None:
        text = f"does not fit into {limit / 1e9:.1f} GB, and recomputation is not enough"
    else:
        totals = [stage.total for stage in candidate.memory]
        text = (f"{candidate.cost.sizes.rank_name} {totals.index(max(totals))} needs {max(totals) / 1e9:.1f} of "
                f"{limit / 1e9:.1f} GB, and recomputation is not enough")
    tp, pp, _ = candidate.grid
    b = candidate.config.train.micro_batch_size
    near = []
    for other in ranked:
        t, p, _ = other.grid
        size = other.config.train.micro_batch_size
        if (t, size) == (tp, b) and p > pp:
            near.append(f"pp={p}")
        elif (p, size) == (pp, b) and t > tp:
            near.append(f"tp={t}")
        elif (t, p) == (tp, pp) and size < b:
            near.append(f"train.micro_batch_size={size}")
        elif other.grid == candidate.grid and other.config.parallel.zero > candidate.config.parallel.zero:
            near.append("parallel.zero=1")
    return f"{text}; {' or '.join(dict.fromkeys(near))} would fit" if near else text


def _nothing(config: Config, machine: Machine, request: Request) -> ConfigError:
    """Why there is no candidate."""
    number, keep, profile = machine.num_devices, request.keep, machine.profile
    kept = " ".join(f"{axis}={size}" for axis, size in keep.items()) or "any grid"
    if keep.get("pp", 1) > (blocks := config.model.num_blocks):
        return config_error("parallel.pp", keep["pp"], f"the model has only {blocks} blocks", str(blocks))
    if keep.get("tp", 1) > (heads := config.model.num_heads):
        return config_error("parallel.tp", keep["tp"], f"must be at most model.num_heads = {heads}", str(heads))
    if grids(config, machine, keep):
        batch = batch_size(config, request)
        return config_error(
            "batch_size", batch, f"no grid of {number} devices with {kept} divides it into micro-batches of the "
            f"profiled sizes {profile.micro_batches(profile.tp_degrees[0])} that the schedule can run",
            str(max(batch, number) * 2))
    fixed = math.prod(keep.values())
    return config_error("devices", number, f"no grid with {kept} has so many (tp degrees: {profile.tp_degrees})",
                        str(max(number // fixed, 1) * fixed))
