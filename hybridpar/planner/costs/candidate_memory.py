"""Memory of planning candidates: estimates from footprints of few layers, which stages need
recomputation, and whether checkpoint copies fit into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hybridpar.config import Config, ParallelConfig
from hybridpar.job import JobPlan
from hybridpar.models.build import Recomputation
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.searching.candidates import Candidate, block_costs
from hybridpar.planner.searching.split import Matrix, best_split
from hybridpar.prediction import Footprints, predict
from hybridpar.prediction.footprint import Buffers, Footprint, trace_stage
from hybridpar.prediction.predict import Tracer
from hybridpar.train.forecasts.ghost_rank import GhostRank
from hybridpar.validate import problems

TIGHT = 0.9
"""Share of the limit above which memory is short: fragmentation or longer documents may need the
rest."""
_MIB = 2**20
_HOST_SHARE = 0.9
"""Share of a GPU host's memory that checkpoint copies may take."""
_SURELY = 2 / 3
"""Share of the limit below which an upper bound needs no closer look."""
_TRIES = 4
_TIGHTER = 0.96
"""Share of the limit for each further attempt at a split, relative to the previous attempt: the
estimate may be too low."""


def largest_budget(
    config: Config, limit: float, device: torch.device, trace: Tracer = trace_stage
) -> int:
    """Return the largest memory.budget with which a resolved configuration fits into `limit` bytes,
    with some margin.

    Returns 0 if there is none: one item of the state, or the rest of the memory, is too large, or
    the settings are not supported with a budget.
    """
    nothing = replace(
        config, memory=replace(config.memory, budget=1)
    )  # then the prediction counts only memory that no budget limits
    if device.type != "cpu" or problems(nothing, config.parallel.num_ranks):
        return 0
    stages = predict(JobPlan(nothing), device=device, trace=trace)
    budget = int(TIGHT * limit - max(stage.total for stage in stages)) // _MIB * _MIB
    if budget <= 0:
        return 0
    cpu = JobPlan(replace(nothing, train=replace(config.train, device="cpu")))
    ghosts = GhostRank.pipeline(cpu)
    fits = all(ghost.accesses(cpu.shape).least_budget() <= budget for ghost in ghosts)
    return budget if fits else 0


def host_shortage(candidate: Candidate) -> str:
    """Return a message if checkpoint copies exceed a server's memory, or "" if they fit or the
    memory is unknown."""
    cost = candidate.cost
    stages = [stage.host for stage in candidate.memory or ()]
    machine = cost.machine
    each = cost.tp * cost.replicas
    number = each * len(stages)
    per = machine.devices_per_server
    known = machine.profile.hardware.host_memory * per if machine.measured else 0.0
    needed = max(
        (
            sum(stages[rank // each] for rank in range(first, min(first + per, number)))
            for first in range(0, number, per)
        ),
        default=0,
    )
    if not known or needed <= _HOST_SHARE * known:
        return ""
    return (
        f"the copies that checkpoints are written from need {needed / 1e9:.1f} of "
        f"{_HOST_SHARE * known / 1e9:.1f} "
        "GB of a host's memory; checkpoint.asynchronous = false saves them"
    )


class MemoryCheck:
    """Peaks of candidates on devices of limited memory, from footprints that are traced once.

    The candidates differ only in what a search chooses.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._footprints = Footprints()
        self._known: dict[object, Footprint] = {}
        self._kinds: set[object] = set()

    def knows(self, cost: StepCost) -> bool:
        """Return whether some stage of this grid's kind is traced."""
        return _kind(cost) in self._kinds

    def measure(self, candidate: Candidate) -> None:
        """Predict the candidate's memory exactly."""
        device = candidate.cost.machine.device
        candidate.set_memory(predict(candidate.cost.job, device=device, trace=self._footprints))

    def fits(self, cost: StepCost) -> bool:
        """Return whether the estimated peak of every rank is within the limit."""
        self._kinds.add(_kind(cost))
        if self.least(cost) > max(cost.limits):
            return False
        surely = _SURELY * min(cost.limits)
        if self._largest_state(cost) < surely and self._most(cost) < surely:
            return True
        return all(
            sum(
                self._peak(cost, stage, blocks, cost.job.recomputed[stage])
                for stage, blocks in cost.job.held(rank).items()
            )
            <= limit
            for rank, limit in enumerate(cost.limits)
        )

    def least(self, cost: StepCost) -> float:
        """Return a lower bound in bytes for the fullest rank: its share of the state if blocks were
        divided evenly."""
        whole = self._whole(cost)
        schedule = cost.schedule
        versions = min(map(cost.job.num_versions, range(cost.pp)))
        of_gradients = cost.replicas if cost.splits > 1 and not cost.config.feeds_back else 1
        of_weights = cost.replicas if cost.splits > 2 else 1
        return _in_memory(
            cost,
            (
                versions * whole.weights / of_weights
                + schedule.num_gradient_buffers * whole.gradients / of_gradients
                + (whole.master + whole.optimizer) / cost.zero_share
            )
            / (cost.tp * cost.pp),
        )

    def _most(self, cost: StepCost) -> float:
        """Return an upper bound in bytes for the fullest rank: the unsharded model, with as many
        micro-batches as any rank has in flight."""
        b = cost.config.train.micro_batch_size
        schedule = cost.schedule
        ranks = range(cost.pp)
        whole = self._whole(cost)
        in_flight = max(schedule.max_live_activations(cost.shape, rank) for rank in ranks)
        one = max(whole.kept, whole.waiting) + whole.message
        activations = in_flight * one + 2 * cost.shape.virtual_stages * whole.message
        return (
            self._largest_state(cost)
            + b * (activations + max(whole.forward, whole.first_backward))
            + max(whole.norm, whole.update)
        )

    def _largest_state(self, cost: StepCost) -> float:
        """Return an upper bound in bytes for a rank's state: the unsharded model's."""
        whole = self._whole(cost)
        versions = max(map(cost.job.num_versions, range(cost.pp)))
        return _in_memory(
            cost,
            versions * whole.weights
            + cost.schedule.num_gradient_buffers * whole.gradients
            + whole.master
            + whole.optimizer,
        )

    def _whole(self, cost: StepCost) -> Footprint:
        """Return the footprint of the unsplit model on one device, with micro-batches of one
        sample."""
        train = replace(cost.config.train, micro_batch_size=1)
        config = replace(cost.config, parallel=ParallelConfig(dp=1), train=train)
        key = config.optim.staleness, config.memory.host_optimizer, config.pipeline.split_backward
        if key not in self._known:
            self._known[key] = self._footprints(
                config,
                range(config.model.num_blocks),
                Recomputation(),
                Buffers(1, 1),
                cost.machine.device,
            )
        return self._known[key]

    def recomputed(self, candidate: Candidate, *, exact: bool = True) -> Candidate | None:
        """Return the candidate with a split whose stages fit, recomputed where necessary, or None.

        The stages' peaks are estimates, so the result is checked exactly, and the search repeats
        with less memory if it does not fit.
        """
        config = candidate.config
        cost = candidate.cost
        room = self.limit
        for _ in range(_TRIES):
            impossible = True
            for whole in (False, True):
                if whole and impossible and not self._state_fits(cost, room):
                    return None
                found = best_split(
                    block_costs(cost),
                    cost.shape.num_stages,
                    self._peaks(cost, whole),
                    room / cost.shape.virtual_stages,
                    cost.slowness,
                )
                if found is None:
                    continue
                impossible = False
                text = _recompute_text(
                    found.sizes, found.recomputed, config.model.num_blocks - 2, whole
                )
                made = replace(
                    config, pipeline=replace(config.pipeline, split=found.sizes, recompute=text)
                )
                again = Candidate(made, StepCost(made, cost.machine), tried_recomputation=True)
                if exact:
                    self.measure(again)
                if not exact or again.peak <= self.limit:
                    return again
            if impossible:
                return None
            room *= _TIGHTER
        return None

    def in_file(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with the largest memory.budget that fits, with all layers recomputed
        if necessary.

        Returns None if one item of the state, or the activations, are too large.
        """
        for recompute in dict.fromkeys((candidate.config.pipeline.recompute, "all")):
            made = replace(
                candidate.config, pipeline=replace(candidate.config.pipeline, recompute=recompute)
            )
            if budget := largest_budget(
                made, self.limit, candidate.cost.machine.device, self._footprints
            ):
                made = replace(made, memory=replace(made.memory, budget=budget))
                found = Candidate(
                    made, StepCost(made, candidate.cost.machine), tried_recomputation=True
                )
                self.measure(found)
                return found
        return None

    def _state_fits(self, cost: StepCost, room: float) -> bool:
        """Return whether some split leaves room for the state alone; if not, recomputation does not
        help."""
        return (
            best_split(
                block_costs(cost),
                cost.shape.num_stages,
                self._peaks(cost, False, state_alone=True),
                room / cost.shape.virtual_stages,
            )
            is not None
        )

    def _peaks(
        self, cost: StepCost, whole: bool, *, state_alone: bool = False
    ) -> Callable[[int, bool], Matrix]:
        """Return a function of (stage, recomputed) that estimates memory.

        Its result [i, j] is about the bytes that blocks i .. j-1 take on the stage; infinite if
        they cannot be there, because the model's ends must be on the first and the last stage.
        """
        count = cost.config.model.num_blocks
        p = cost.shape.num_stages
        rows, columns = np.indices((count + 1, count + 1))
        known: dict[object, Matrix] = {}
        placed_once: dict[object, Matrix] = {}

        def peaks(stage: int, again: bool) -> Matrix:
            first = stage == 0
            last = stage == p - 1
            limit = cost.limits[cost.shape.rank_of(stage)]
            key = (first, last, again, buffers := _buffers(cost, stage))
            if (alike := (*key, in_flight := _in_flight(cost, stage), limit)) in placed_once:
                return placed_once[alike]
            if key not in known:
                found = (
                    self._terms_by_size if cost.config.has_equal_layers else self._terms_by_range
                )
                known[key] = found(cost, stage, whole if again else None, buffers)
            terms = known[key]
            taken = (terms[0] if state_alone else _at_peak(terms, in_flight)) * (self.limit / limit)
            begins = rows == 0 if first else rows > 0
            ends = columns == count if last else columns < count
            placed = begins & ends
            return placed_once.setdefault(alike, np.where(placed & (columns > rows), taken, np.inf))

        return peaks

    def _terms_by_size(
        self, cost: StepCost, stage: int, whole: bool | None, buffers: Buffers
    ) -> Matrix:
        """Return [term, i, j]: the terms of `_terms` for blocks i .. j-1, if every other stage has
        as many.

        A rough footprint is linear in the number of layers.

        Args:
            whole: Whether recomputation covers whole stages (True) or layers (False). None: no
                recomputation.
        """
        count = cost.config.model.num_blocks
        p = cost.shape.num_stages
        found = np.zeros((4, count + 1))
        found[0] = np.inf
        line: list[tuple[int, Footprint]] = []
        most = count - p + 1 if p > 1 else count
        for size in range(1 if p > 1 else count, most + 1):
            start = 1
            if stage == 0:
                start = 0
            elif stage == p - 1:
                start = count - size
            blocks = range(start, start + size)
            layers = frozenset(n for n in blocks if 0 < n < count - 1)
            again = Recomputation()
            if whole is not None:
                again = Recomputation(frozenset(blocks) if whole else layers, whole)
            fp = self._rough(cost, blocks, again, buffers)
            found[:, size] = _terms(cost, fp, is_first=start == 0)
            line += [(size, fp)] if layers else []
            if len(line) == 2 and cost.splits < 2:
                (low, one), (high, two) = line
                more = np.arange(high + 1 - low, most + 1 - low)
                rest: Any = Footprint(
                    **{
                        f.name: getattr(one, f.name)
                        + more * (getattr(two, f.name) - getattr(one, f.name)) // (high - low)
                        for f in fields(Footprint)
                    }
                )
                found[:, high + 1 : most + 1] = _terms(cost, rest, is_first=start == 0)
                break
        rows, columns = np.indices((count + 1, count + 1))
        return found[:, np.maximum(columns - rows, 0)]

    def _terms_by_range(
        self, cost: StepCost, stage: int, whole: bool | None, buffers: Buffers
    ) -> Matrix:
        """Return the same as `_terms_by_size`, for blocks that differ."""
        count = cost.config.model.num_blocks
        found = np.zeros((4, count + 1, count + 1))
        found[0] = np.inf
        for start, stop in combinations(range(count + 1), 2):
            if (start == 0) != (stage == 0) or (stop == count) != (
                stage == cost.shape.num_stages - 1
            ):
                continue
            again = (
                Recomputation()
                if whole is None
                else Recomputation(
                    frozenset(n for n in range(start, stop) if whole or 0 < n < count - 1), whole
                )
            )
            fp = self._rough(cost, range(start, stop), again, buffers)
            found[:, start, stop] = _terms(cost, fp, is_first=start == 0)
        return found

    def _peak(self, cost: StepCost, stage: int, blocks: range, recompute: Recomputation) -> float:
        """Return an estimate of the peak that `prediction.walk.walk` finds for these blocks on that
        stage."""
        fp = self._rough(cost, blocks, recompute, _buffers(cost, stage))
        return float(
            _at_peak(
                np.array(_terms(cost, fp, is_first=blocks.start == 0)), _in_flight(cost, stage)
            )
        )

    def _rough(
        self, cost: StepCost, blocks: range, recompute: Recomputation, buffers: Buffers
    ) -> Footprint:
        """Return the rough footprint of a stage, which depends neither on the position of its
        layers nor on the other stages.

        Chunks that replicas shard are exact, because they are not proportional to the number of
        layers.
        """
        config = cost.config
        ends = (blocks.start == 0, blocks.stop == cost.config.model.num_blocks)
        key = (
            config.optim.staleness,
            config.memory.host_optimizer,
            cost.tp,
            config.parallel.cp,
            config.parallel.ep,
            cost.zero_share,
            cost.splits,
            config.train.micro_batch_size,
            config.pipeline.split_backward,
            buffers,
            config.parallel.sequence,
            len(blocks) if config.has_equal_layers else blocks,
            ends,
            bool(recompute.blocks),
            recompute.whole,
            bool(recompute.selective),
            config.feeds_back and config.parallel.dp,
        )
        if key not in self._known:
            exact = cost.splits > 1 and config.has_equal_layers
            trace = self._footprints if exact else self._footprints.rough
            self._known[key] = trace(config, blocks, recompute, buffers, cost.machine.device)
        return self._known[key]


def _kind(cost: StepCost) -> object:
    """Return what the footprint of a layer depends on that a search chooses."""
    parallel = cost.config.parallel
    return parallel.tp, parallel.cp, parallel.ep, parallel.sequence


def _buffers(cost: StepCost, stage: int) -> Buffers:
    schedule = cost.schedule
    return Buffers(
        cost.job.num_versions(cost.shape.rank_of(stage)),
        schedule.num_gradient_buffers,
    )


def _in_flight(cost: StepCost, stage: int) -> int:
    """Return the number of micro-batches that a stage holds."""
    held = cost.schedule.max_live_activations(cost.shape, cost.shape.rank_of(stage))
    return -(-held // cost.shape.virtual_stages)


def _terms(cost: StepCost, fp: Footprint, *, is_first: bool) -> tuple[float, float, float, float]:
    """Return the terms of a peak.

    Returns:
        The bytes that are always allocated, the bytes of each micro-batch in flight, the most that
        a backward takes in addition to both, and the most that other actions take in addition to
        all but one micro-batch.
    """
    state = _in_memory(cost, fp.weights + fp.master + fp.gradients + fp.optimizer)
    return (
        state + fp.message + fp.received + cost.shape.num_microbatches * fp.factors,
        np.maximum(fp.kept, fp.waiting) + (0 if is_first else fp.input),
        np.maximum(fp.backward, fp.first_backward) + fp.whole_weights + fp.whole_gradients,
        np.maximum(np.maximum(fp.forward + fp.message + fp.whole_weights, fp.norm), fp.update),
    )


def _at_peak(terms: Matrix, in_flight: int) -> Matrix:
    always, one, backward, other = terms
    return always + np.maximum(in_flight * one + backward, (in_flight - 1) * one + other)  # type: ignore[no-any-return]


def _in_memory(cost: StepCost, state: float) -> float:
    """Return the resident bytes out of `state` bytes."""
    _, most = cost.config.memory.limiting
    return np.minimum(state, most) if most else state


def _recompute_text(
    sizes: Sequence[int], recomputed: Sequence[bool], num_layers: int, whole: bool
) -> str:
    """Return `pipeline.recompute` for these stages."""
    if all(recomputed):
        return "stage" if whole else "all"
    if not any(recomputed):
        return "none"
    if whole:
        return "stage:" + _ranges([stage for stage, again in enumerate(recomputed) if again])
    layers = []
    start = 0
    for size, again in zip(sizes, recomputed, strict=True):
        layers += [n - 1 for n in range(start, start + size) if again and 0 < n <= num_layers]
        start += size
    return _ranges(layers) or "none"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as '0,2-5'."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
