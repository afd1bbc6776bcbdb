"""The search: every grid, micro-batch size and schedule that the devices allow, best first, as far as it can matter.

    1  every candidate gets the split that balances its stages' measured times          candidates, split
    2  bounds: what a candidate takes at least; the candidate with the least is next    cost
    3  where its memory is too much, a new split, with recomputation where needed       room
    4  its step time, simulated; done when no candidate that is left can be among the
       best; the memory of these is predicted exactly, and mended where it is too much  memory

So what is left out is slower, as far as the bound is one. Axes that the user has chosen stay.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpar.config import Config
from hybridpar.errors import ConfigError, config_error
from hybridpar.memory import Footprints, predict
from hybridpar.models.build import recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.planner.candidates import STALE_GAIN, Candidate, Request, balanced, batch_size, candidates, grids
from hybridpar.planner.machine import Machine
from hybridpar.planner.room import (
    TIGHT,
    Room,
    device_of,
    host_shortage,
    least,
    memory_limit,
    surely_fits,
    with_recomputation,
)
from hybridpar.validate import problems

_WORTH_SHARING = 0.01
"""ZeRO-1 is tried where the optimizer takes such a share of the step, or memory is short."""
_DOUBT = 0.02
"""Where a configuration without it fits, it must be faster by this share: less is within the error of predictions."""
ERROR = 0.035
"""Half of the step times that were predicted and measured differ by more (25 of two machines and a slow link:
benchmarks/results/planner*.json). A configuration whose memory is nearly full must be faster by this share."""


@dataclass(frozen=True)
class Result:
    """Candidates that can run, best first; those that cannot, likeliest first; how many were looked at."""

    ranked: list[Candidate]
    failed: list[Candidate]
    considered: int
    limit: float


def search(config: Config, machine: Machine, request: Request) -> Result:
    """Raises: ConfigError if nothing can be tried: no grid has that many devices, or divides the batch."""
    limit = memory_limit(machine)
    found = list(candidates(config, machine, request))
    if not found:
        raise _nothing(config, machine, request)
    hopes = _Hopes(found, limit, request)
    ranked: list[Candidate] = []
    failed: list[Candidate] = []
    while (candidate := hopes.next()) is not None:
        if len(ranked) >= request.top and candidate.model.bound >= (1 + ERROR) * _rank(ranked[request.top - 1]):
            break
        if hopes.fits(candidate):
            if wrong := problems(candidate.config, machine.num_devices):
                candidate.reason = str(wrong[0])
                failed.append(candidate)
            else:
                ranked.append(candidate)
                ranked.sort(key=_rank)
        elif not hopes.add_recomputed(candidate):
            failed.append(candidate)
    ranked = hopes.verified(ranked, failed)
    for candidate in failed:
        candidate.reason = candidate.reason or _why(candidate, ranked, limit)
    return Result(ranked[: request.top], failed, hopes.considered, limit)


class _Hopes:
    """Candidates that may still be among the best, that with the lowest bound first; and what is known of memory."""

    def __init__(self, candidates: Sequence[Candidate], limit: float, request: Request):
        self.limit, self.request = limit, request
        self.footprints = Footprints()
        self._queue: list[tuple[float, int, Candidate]] = []
        self._number = self.considered = 0
        self._too_large: dict[object, int] = {}
        for candidate in candidates:
            self.considered += 1
            self._push(candidate)

    def _push(self, candidate: Candidate) -> None:
        self._number += 1
        heapq.heappush(self._queue, (candidate.model.bound, self._number, candidate))

    def next(self) -> Candidate | None:
        """Takes the one with the lowest bound."""
        return heapq.heappop(self._queue)[2] if self._queue else None

    def fits(self, candidate: Candidate) -> bool:
        """Whether its memory does. Beside one that may gain by it, ZeRO-1 is tried too."""
        if surely_fits(candidate.model, self.limit):
            self._add_sharded(candidate, only_if_worth=True)
            return True
        fits = least(candidate.model) <= self.limit and self._rough_peak(candidate) <= self.limit
        self._add_sharded(candidate, only_if_worth=fits)
        return fits

    def verified(self, ranked: Sequence[Candidate], failed: list[Candidate]) -> list[Candidate]:
        """The best of them, whose memory was predicted exactly (quick: until one has room, no others)."""
        left, sure = list(ranked), list[Candidate]()
        while left and (len(sure) < self.request.top or self._may_be_better(left[0], sure)):
            candidate = left.pop(0)
            if candidate.memory is None and not (self.request.quick and any(map(self._has_room, sure))):
                candidate.memory = predict(candidate.config, device=device_of(candidate.model), trace=self.footprints)
            if reason := host_shortage(candidate):
                candidate.reason = reason
                failed.append(candidate)
            elif candidate.memory is None or candidate.peak <= self.limit:
                sure.append(candidate)
            elif (again := with_recomputation(candidate, self.limit, self.footprints)) is not None:
                left = sorted([*left, again], key=_rank)
            else:
                failed.append(candidate)
        return sorted(sure, key=self._rank_with_room)

    def _has_room(self, candidate: Candidate) -> bool:
        return candidate.memory is None or candidate.peak <= TIGHT * self.limit

    def _rank_with_room(self, candidate: Candidate) -> float:
        return _rank(candidate) * (1 if self._has_room(candidate) else 1 + ERROR)

    def _may_be_better(self, candidate: Candidate, sure: Sequence[Candidate]) -> bool:
        return _rank(candidate) < min(map(self._rank_with_room, sure))

    def _rough_peak(self, candidate: Candidate) -> float:
        config = candidate.config
        sizes = candidate.model.sizes
        split = stage_split(config.model, sizes.num_ranks, config.pipeline.split, sizes.chunks)
        again = recomputed_blocks(config.pipeline.recompute, config.model, split)
        room = Room(candidate.model, self.footprints, whole=False)
        peaks = [room.peak(i, *pair) for i, pair in enumerate(zip(split, again, strict=True))]
        return max(sum(peaks[stage] for stage in sizes.stages_of(rank)) for rank in range(sizes.num_ranks))

    def _add_sharded(self, candidate: Candidate, *, only_if_worth: bool) -> None:
        parallel, model = candidate.config.parallel, candidate.model
        if parallel.zero or parallel.dp == 1 or candidate.tried_recomputation:
            return
        if only_if_worth and max(rank.update for rank in model.ranks) < _WORTH_SHARING * model.bound:
            return
        self.considered += 1
        self._push(balanced(replace(candidate.config, parallel=replace(parallel, zero=1)), model.machine))

    def add_recomputed(self, candidate: Candidate) -> bool:
        """Puts the candidate back with recomputation where it is needed; False: it does not fit so either."""
        config = candidate.config
        pipeline = config.pipeline
        kind = (candidate.grid, config.parallel.zero, pipeline.schedule, pipeline.warmup, pipeline.num_chunks)
        b = config.train.micro_batch_size
        if candidate.tried_recomputation or b >= self._too_large.get(kind, b + 1):
            return False
        again = None
        if least(candidate.model, recomputed=True) <= self.limit:
            again = with_recomputation(candidate, self.limit, self.footprints, exact=False)
        if again is None:
            self._too_large[kind] = b
            return False
        self._push(again)
        return True


def _rank(candidate: Candidate) -> float:
    return (candidate.model.step_time * (1 + _DOUBT * candidate.config.parallel.zero)
            * (1 + STALE_GAIN * candidate.is_stale))


def _why(candidate: Candidate, ranked: Sequence[Candidate], limit: float) -> str:
    """Which stage needs how much, and what near it would fit."""
    if candidate.memory is None:
        text = f"does not fit into {limit / 1e9:.1f} GB, and recomputation is not enough"
    else:
        totals = [stage.total for stage in candidate.memory]
        text = (f"{candidate.model.sizes.rank_name} {totals.index(max(totals))} needs {max(totals) / 1e9:.1f} of "
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
    number, batch = machine.num_devices, batch_size(config, request)
    kept = " ".join(f"{axis}={size}" for axis, size in request.keep.items()) or "any grid"
    blocks = config.model.num_blocks
    if request.keep.get("pp", 1) > blocks:
        return config_error("parallel.pp", request.keep["pp"], f"the model has only {blocks} blocks", str(blocks))
    if request.keep.get("tp", 1) > (heads := config.model.num_heads):
        return config_error("parallel.tp", request.keep["tp"], f"must be at most model.num_heads = {heads}", str(heads))
    if grids(config, machine, request.keep):
        return config_error(
            "batch_size", batch, f"no grid of {number} devices with {kept} divides it into micro-batches of the "
            f"profiled sizes {machine.profile.micro_batches(machine.profile.tp_degrees[0])} that the schedule can run",
            str(max(batch, number) * 2))
    fixed = math.prod(request.keep.values())
    return config_error("devices", number, f"no grid with {kept} has so many (tp degrees: "
                        f"{machine.profile.tp_degrees})", str(max(number // fixed, 1) * fixed))
