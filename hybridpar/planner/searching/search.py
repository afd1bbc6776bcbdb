"""Search all grids, micro-batch sizes and schedules that the devices allow, until no other can be
among the best.

1  every candidate gets the split that balances its stages' measured times          candidates, split
2  the candidate with the lowest bound on its time is next                          bound
3  if it needs too much memory: a new split, with recomputation where needed, and   memory,
   also with sequence parallelism; if nothing fits, also with context parallelism   sequence
4  its step time is simulated; when no remaining candidate can be among the best,   cost, memory
   the memory of the best is predicted exactly, and reduced if it is too much
5  the best are tried with the optimizer on the host, or activations in a file;     moves, offloaded,
   with codecs of activations and gradients, if asked for; and if nothing fits,     compressed,
   with a part of the state in a file                                               memory

So candidates that are left out are slower, if the bounds hold. Axes that the user has set stay.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hybridpar.config import Config
from hybridpar.models.build import has_selective_recompute
from hybridpar.planner.costs.candidate_memory import TIGHT, MemoryCheck, host_shortage
from hybridpar.planner.costs.compressed import loss_of_codecs, with_codecs
from hybridpar.planner.costs.offloaded import knows_files, with_activations_away
from hybridpar.planner.costs.sequence import may_split_rows, with_split_rows
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.costs.transfer_costs import HOSTED
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.searching.candidates import (
    Candidate,
    Request,
    balanced,
    candidates,
    on_v,
    sharing_experts,
    sharing_samples,
)
from hybridpar.planner.searching.explain import nothing_to_try, why_not
from hybridpar.prediction.garbage import without_collections
from hybridpar.validate import problems

STALE_GAIN = 0.05
"""Share by which a schedule with stale weights must be faster than all others: stale gradients cost
loss at equal tokens, and the planner cannot order step times that differ by little (ERROR)."""
ERROR = 0.035
"""Median error of predicted step times (25, on two machines and a slow link:
benchmarks/results/planner*.json). A configuration whose memory is nearly full must be faster by
this share."""
CODEC_GAIN = 0.05
"""Share by which a codec must be faster than a more exact one."""
_WORTH_SHARING = 0.01
"""ZeRO-1 is tried if the optimizer takes at least this share of the step, or memory is short."""
_DOUBT = 0.02
"""Share by which each ZeRO stage or a host optimizer must be faster than none: less is within the
error."""
_MOST_IN_FILES = 12
"""Largest number of grids and schedules that are tried with a memory budget."""


@dataclass(frozen=True)
class Result:
    """The candidates that can run, best first; the candidates that cannot, most likely first; and
    the number considered."""

    ranked: list[Candidate]
    failed: list[Candidate]
    considered: int
    limit: float


@without_collections()
def search(config: Config, machine: Machine, request: Request) -> Result:
    """Return the best candidates.

    Raises:
        ConfigError: No grid has that many devices and divides the batch.
    """
    found = list(candidates(config, machine, request))
    found += sharing_experts(config, machine, request)
    shared = [] if found else list(sharing_samples(config, machine, request))
    if not found and not shared:
        raise nothing_to_try(config, machine, request)
    search = _Search(found or shared, machine.memory_limit, request)
    search.consider_all(request.top)
    if not search.ranked and not shared:  # samples do not fit
        search.add(sharing_samples(config, machine, request))
        search.consider_all(request.top)
    search.host_updates()
    search.offloaded()
    if request.compression:
        search.compressed()
    ranked = search.verified() or search.in_files()
    if machine.stragglers:
        ranked = sorted(ranked[: request.top], key=search.rank_among_stragglers)
    for candidate in ranked[: request.top]:
        search.explain(candidate)
    for candidate in search.failed:
        candidate.reject(candidate.reason or why_not(candidate, ranked, search.memory.limit))
    return Result(ranked[: request.top], search.failed, search.considered, search.memory.limit)


class _Search:
    """A queue of candidates ordered by their bounds, the candidates that can run, and those
    rejected."""

    def __init__(self, candidates: Sequence[Candidate], limit: float, request: Request):
        self.request = request
        self.memory = MemoryCheck(limit)
        self.ranked: list[Candidate] = []
        self.failed: list[Candidate] = []
        self.considered = 0
        self._queue: list[tuple[float, int, Candidate]] = []
        self._pushed = 0
        self._too_large: dict[object, int] = {}
        self._seen: set[Config] = set()
        """Variants that were made; several candidates may lead to one."""
        self.add(candidates)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Queue more candidates."""
        for candidate in candidates:
            self.considered += 1
            self._push(candidate)

    def _push(self, candidate: Candidate) -> None:
        self._pushed += 1
        least = _less_sure(candidate) * candidate.bound
        if (
            not candidate.config.parallel.zero
        ):  # of its variants, only ZeRO-1 may be faster, by its shorter update
            update = max(rank.update for rank in candidate.cost.ranks)
            least = min(least, (_less_sure(candidate) + _DOUBT) * (candidate.bound - update))
        heapq.heappush(self._queue, (least, self._pushed, candidate))

    def _consider_later(self, config: Config, machine: Machine) -> None:
        if config not in self._seen:
            self._seen.add(config)
            self.considered += 1
            self._push(balanced(config, machine))

    def consider_all(self, places: int, within: float = math.inf) -> None:
        """Consider candidates in the order of their bounds, until no other can be among the best
        `places` or take less than `within`."""
        while self._queue and self._queue[0][0] < (
            within if len(self.ranked) < places else min(within, _rank(self.ranked[places - 1]))
        ):
            candidate = heapq.heappop(self._queue)[-1]
            if not candidate.is_simulated and not self.memory.knows(candidate.cost):
                # a simulation takes less time than tracing the stages of another grid
                candidate.simulate()
                self._push(candidate)
            else:
                self._consider(candidate)

    def _consider(self, candidate: Candidate) -> None:
        """Rank a candidate that is estimated to fit; otherwise queue it again with recomputation,
        or reject it."""
        fits = self.memory.fits(candidate.cost)
        self._add_sharded(candidate, only_if_worth=fits)
        if not fits:
            self._add_leaner(candidate)
            if not candidate.tried_recomputation and may_split_rows(candidate.config):
                self._consider_later(with_split_rows(candidate.config), candidate.cost.machine)
            if not self._add_recomputed(candidate):
                self.failed.append(candidate)
        elif wrong := problems(candidate.config, candidate.cost.machine.num_devices):
            candidate.reject(str(wrong[0]))
            self.failed.append(candidate)
        else:
            insort(self.ranked, candidate, key=_rank)

    def _add_sharded(self, candidate: Candidate, *, only_if_worth: bool) -> None:
        """Also try ZeRO-1 for a candidate that may gain by it, and ZeRO-2 and 3 for one that does
        not fit."""
        parallel = candidate.config.parallel
        cost = candidate.cost
        if parallel.zero == 3 or parallel.dp_cp == 1 or candidate.tried_recomputation:
            return
        if parallel.zero and (only_if_worth or cost.machine.device.type != "cpu"):
            return
        if (
            not only_if_worth
            or max(rank.update for rank in cost.ranks) >= _WORTH_SHARING * candidate.least_time
        ):
            made = replace(
                candidate.config,
                parallel=replace(parallel, zero=parallel.zero + 1),  # type: ignore[arg-type]
                pipeline=replace(candidate.config.pipeline, split=()),
            )
            for config in (
                made,
                *(self._part_by_part(made) if parallel.zero == 1 else ()),
            ):  # the next variant of ZeRO-2 is ZeRO-3
                if config.parallel.zero < 2 or not problems(config, cost.machine.num_devices):
                    self._consider_later(config, cost.machine)

    def _part_by_part(self, config: Config) -> Iterator[Config]:
        """Yield the configuration with all micro-batches through one block before the next block,
        so that each block's state is loaded once per batch."""
        pipeline = config.pipeline
        if (
            config.parallel.pp == 1
            and pipeline.num_microbatches > 1
            and pipeline.schedule == "1f1b"
            and not config.model.tie_embeddings
            and not self.request.schedules
        ):
            yield replace(config, pipeline=replace(pipeline, schedule="gpipe"))

    def _add_recomputed(self, candidate: Candidate) -> bool:
        """Queue the candidate again with recomputation: selective if that is enough, else of whole
        layers where needed. Return False if it does not fit even so."""
        pipeline = candidate.config.pipeline
        b = candidate.config.train.micro_batch_size
        parallel = candidate.config.parallel
        kind = (
            candidate.grid,
            parallel.cp,
            parallel.ep,
            parallel.zero,
            parallel.sequence,
            pipeline.schedule,
            pipeline.warmup,
            pipeline.num_virtual_stages,
            pipeline.zero_bubble,
            pipeline.stage_layout,
            pipeline.activations,
        )
        if candidate.tried_recomputation or b >= self._too_large.get(kind, b + 1):
            return False
        again = None
        if self.memory.least(candidate.cost) <= max(candidate.cost.limits):
            again = self.memory.recomputed(candidate, exact=False)
        if again is None:
            self._too_large[kind] = b
            return False
        self._push(again)
        model = candidate.config.model
        # only the formulas know the time of selective recomputation
        if model.cost_model is not None and has_selective_recompute(model):
            selective = replace(candidate.config, pipeline=replace(pipeline, recompute="selective"))
            cheap = Candidate(
                selective, StepCost(selective, candidate.cost.machine), tried_recomputation=True
            )
            if self.memory.fits(cheap.cost):
                self._push(cheap)
        return True

    def _add_leaner(self, candidate: Candidate) -> None:
        """Also try a V schedule that keeps fewer activations, if there is one."""
        config = candidate.config
        if config.pipeline.stage_layout == "v" and not candidate.tried_recomputation:
            for pipeline in islice(on_v(config, candidate.cost.pp, config.pipeline.activations), 1):
                self._consider_later(replace(config, pipeline=pipeline), candidate.cost.machine)

    def host_updates(self) -> None:
        """Also rank the best candidates with a host optimizer, if the host has time and that is
        faster."""
        for candidate in self.ranked[: self.request.top]:
            config = candidate.config
            cost = candidate.cost
            made = replace(config, memory=replace(config.memory, host_optimizer=True))
            worth = max(rank.update for rank in cost.ranks) >= _WORTH_SHARING * cost.step_time
            if (
                config.memory.host_optimizer
                or config.parallel.zero > 1
                or not worth
                or config.optim.name not in HOSTED
                or cost.machine.device.type != "cpu"
                or not cost.machine.profile.state.updated
                or not cost.schedule.slack(cost.shape)
                or problems(made, cost.machine.num_devices)
            ):
                continue
            hosted = Candidate(made, StepCost(made, cost.machine), tried_recomputation=True)
            self.considered += 1
            if _rank(hosted) < _rank(candidate) and self.memory.fits(hosted.cost):
                hosted.explain(
                    "with the optimizer on the host "
                    f"{1 - hosted.cost.step_time / cost.step_time:.1%} "
                    "faster than without"
                )
                self.ranked.append(hosted)
        self.ranked.sort(key=_rank)

    def offloaded(self) -> None:
        """Also rank the best candidates that recompute, or else those that do not fit, with
        activations in a file."""
        some_fit = bool(self.ranked)
        best = (
            [
                one
                for one in self.ranked[: self.request.top]
                if one.config.pipeline.recompute != "none"
            ]
            if some_fit
            else sorted(self.failed, key=lambda one: one.least_time)[:_MOST_IN_FILES]
        )
        for candidate in filter(knows_files, best):
            for away in with_activations_away(candidate):
                self.considered += 1
                if some_fit and _rank(away) >= _rank(candidate):
                    break
                self.memory.measure(away)
                if away.peak <= self.memory.limit:
                    why = "faster than recomputation" if some_fit else "all that fits"
                    away.explain(f"activations in a file are {why}")
                    self.ranked.append(away)
                    break
        self.ranked.sort(key=_rank)

    def compressed(self) -> None:
        """Also rank the best candidates with codecs of activations and gradients, the most exact
        first, each only if it is faster by CODEC_GAIN."""
        for candidate in self.ranked[: self.request.top]:
            before = candidate.cost.step_time
            for made in with_codecs(candidate.config):
                if problems(made, candidate.cost.machine.num_devices):
                    continue
                smaller = Candidate(
                    made, StepCost(made, candidate.cost.machine), tried_recomputation=True
                )
                self.considered += 1
                if smaller.cost.step_time * (1 + CODEC_GAIN) < before and self.memory.fits(
                    smaller.cost
                ):
                    smaller.explain(loss_of_codecs(made))
                    self.ranked.append(smaller)
                    before = smaller.cost.step_time
        self.ranked.sort(key=_rank)

    def in_files(self) -> list[Candidate]:
        """Return candidates that fit with a part of their state in a file, best first.

        Each grid and schedule is tried with its smallest micro-batch, at most _MOST_IN_FILES of
        them.
        """
        smallest: dict[object, Candidate] = {}
        for one in sorted(self.failed, key=lambda one: one.config.train.micro_batch_size):
            config = one.config
            if knows_files(one):
                parallel = config.parallel
                kind = one.grid, parallel.cp, parallel.ep, parallel.zero, config.pipeline.schedule
                smallest.setdefault(kind, one)
        machines = {
            config: one.cost.machine
            for one in sorted(smallest.values(), key=lambda one: one.least_time)[:_MOST_IN_FILES]
            for config in (one.config, *self._part_by_part(one.config))
        }
        found = []
        for config, machine in machines.items():
            self.considered += 1
            if (
                made := self.memory.in_file(Candidate(config, StepCost(config, machine)))
            ) is not None:
                moved = max(stage.file for stage in made.memory or ())
                made.explain(
                    f"nothing fits but with state in a file, {moved / 1e9:.2f} GB of a process"
                )
                found.append(made)
        return sorted(found, key=_rank)

    def explain(self, candidate: Candidate) -> None:
        """Record why gradients are sharded, if they are: the memory that ZeRO-1 would need."""
        parallel = candidate.config.parallel
        if parallel.zero > 1 and not candidate.because:
            less = replace(candidate.config, parallel=replace(parallel, zero=1))
            whole = Candidate(less, StepCost(less, candidate.cost.machine))
            self.memory.measure(whole)
            candidate.explain(
                f"ZeRO-{parallel.zero}, as with ZeRO-1 a process needs {whole.peak / 1e9:.2f} of "
                f"{self.memory.limit / 1e9:.2f} GB"
            )

    def verified(self) -> list[Candidate]:
        """Return the best ranked candidates with exactly predicted memory (quick: only until one
        fits)."""
        sure: list[Candidate] = []
        # a candidate with recomputation may be found from several without
        seen: set[Config] = set()
        while True:
            enough = (
                math.inf if len(sure) < self.request.top else min(map(self._rank_with_room, sure))
            )
            self.consider_all(1, enough)
            if not self.ranked or _rank(self.ranked[0]) >= enough:
                return sorted(sure, key=self._rank_with_room)
            candidate = self.ranked.pop(0)
            if candidate.config in seen:
                continue
            seen.add(candidate.config)
            if candidate.memory is None and not (
                self.request.quick and any(map(self._has_room, sure))
            ):
                self.memory.measure(candidate)
            if reason := host_shortage(candidate):
                candidate.reject(reason)
                self.failed.append(candidate)
            elif candidate.memory is None or candidate.peak <= self.memory.limit:
                sure.append(candidate)
            elif (again := self.memory.recomputed(candidate)) is not None:
                insort(self.ranked, again, key=_rank)
            else:
                self.failed.append(candidate)

    def _has_room(self, candidate: Candidate) -> bool:
        return has_room(candidate, self.memory.limit)

    def rank_among_stragglers(self, candidate: Candidate) -> float:
        """Return the sort key of a candidate: the median of its step times."""
        median = candidate.spread.median if candidate.spread else candidate.cost.step_time
        return self._rank_with_room(candidate) * median / candidate.cost.step_time

    def _rank_with_room(self, candidate: Candidate) -> float:
        return _rank(candidate) * (1 if self._has_room(candidate) else 1 + ERROR)


def _rank(candidate: Candidate) -> float:
    return candidate.cost.step_time * _less_sure(candidate)


def _less_sure(candidate: Candidate) -> float:
    """Return the factor by which a candidate must be faster than a simpler one."""
    memory = candidate.config.memory
    doubts = candidate.config.parallel.zero + memory.host_optimizer + (memory.num_away != 0)
    return (1 + _DOUBT * doubts) * (1 + STALE_GAIN * candidate.is_stale)


def handicaps(candidate: Candidate, limit: float) -> dict[str, float]:
    """Return the shares by which a candidate must be faster than a simpler one, by reason."""
    config = candidate.config
    found = {
        "old gradients": STALE_GAIN * candidate.is_stale,
        f"ZeRO-{config.parallel.zero}": _DOUBT * config.parallel.zero,
        "an optimizer on the host": _DOUBT * config.memory.host_optimizer,
        "activations in a file": _DOUBT * (config.memory.num_away != 0),
        f"memory over {TIGHT:.0%} full": ERROR * (not has_room(candidate, limit)),
    }
    return {reason: share for reason, share in found.items() if share}


def has_room(candidate: Candidate, limit: float) -> bool:
    """Return whether a candidate's memory is known to stay well below the limit, or unknown."""
    return candidate.memory is None or candidate.peak <= TIGHT * limit
