"""The search: every grid, micro-batch size and schedule that the devices allow, best first, as far as it can matter.

    1  every candidate gets the split that balances its stages' measured times          planner.split
    2  bounds: what a candidate takes at least; the candidate with the least is next    planner.cost
    3  its memory, exactly; where that is too much, a new split, with recomputation
       where a stage needs it                                                           memory, planner.split
    4  its step time, simulated; done when no candidate that is left can be among the best

So what is left out is proved to be slower, up to the bound's being one. Axes that the user has chosen stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import Config, OptimConfig, PipelineConfig
from hybridpar.errors import ConfigError, config_error
from hybridpar.memory import Footprints, StageMemory, predict
from hybridpar.memory.footprint import Buffers, Footprint
from hybridpar.memory.predict import default_device
from hybridpar.models.build import Recomputation
from hybridpar.pipeline.plan.schedules import Sizes, find_schedule, schedule_of
from hybridpar.planner.cost import GRADIENT_BYTES, Machine, Model
from hybridpar.planner.split import best_split
from hybridpar.validate import problems

RESERVED = 1.5 * 2**30
"""Bytes of an accelerator that its context and communicators take; of a host's memory a tenth is left to others."""
STALE = frozenset({"2bw", "pipedream"})
_WORTH_SHARING = 0.01
"""ZeRO-1 is tried where the optimizer takes such a share of the step, or memory is short."""
_SURELY_TOO_MUCH = 1.1
"""Times the limit: a rough estimate of memory that says so is not looked into."""
_FRAGMENTS = 0.04
"""Share of an accelerator's memory that an allocator cannot hand out. An estimate."""


@dataclass(frozen=True)
class Request:
    """What is asked for. keep: sizes of axes that stay. batch_size: samples of a step (0: the configuration's).

    schedules: names (none: the configuration's, and what trains alike). micro_batches: sizes (none: all profiled ones
    and powers of two between them). top: how many are to be ranked.
    """

    keep: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 0
    schedules: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    top: int = 5
    quick: bool = False
    """Memory is predicted of the best alone, and of those that may not fit."""


@dataclass
class Candidate:
    """One configuration under consideration. `reason`: why it cannot run; empty where it can."""

    config: Config
    model: Model
    memory: list[StageMemory] | None = None
    reason: str = ""
    tried_recomputation: bool = False

    @property
    def peak(self) -> int:
        """Bytes of the fullest stage."""
        return max(stage.total for stage in self.memory or [])

    @property
    def grid(self) -> tuple[int, int, int]:
        parallel = self.config.parallel
        return parallel.tp, parallel.pp, parallel.dp


@dataclass(frozen=True)
class Result:
    """Candidates that can run, fastest first; those that cannot, likeliest first; how many were looked at."""

    ranked: list[Candidate]
    failed: list[Candidate]
    considered: int
    limit: float


def memory_limit(machine: Machine) -> float:
    """Bytes that training may take of a device."""
    if machine.profile.hardware.cores:
        return 0.9 * machine.memory
    return (machine.memory - RESERVED) * (1 - _FRAGMENTS)


def search(config: Config, machine: Machine, request: Request) -> Result:
    """Raises: ConfigError if nothing can be tried: no grid has that many devices, or divides the batch."""
    limit = memory_limit(machine)
    found = list(_candidates(config, machine, request))
    if not found:
        raise _nothing(config, machine, request)
    hopes = _Hopes(found, limit, request)
    ranked: list[Candidate] = []
    failed: list[Candidate] = []
    while (candidate := hopes.next()) is not None:
        if len(ranked) >= request.top and candidate.model.bound >= ranked[request.top - 1].model.step_time:
            break
        if hopes.fits(candidate):
            if wrong := problems(candidate.config, machine.num_devices):
                candidate.reason = str(wrong[0])
                failed.append(candidate)
            else:
                ranked.append(candidate)
                ranked.sort(key=lambda one: one.model.step_time)
        elif not hopes.add_recomputed(candidate):
            failed.append(candidate)
    footprints = hopes.footprints
    for candidate in ranked[:1]:
        candidate.memory = candidate.memory or predict(candidate.config, trace=footprints)
    for candidate in failed:
        candidate.reason = candidate.reason or _why(candidate, ranked, limit)
    return Result(ranked[: request.top], failed, len(found), limit)


class _Hopes:
    """Candidates that may still be among the best, that with the lowest bound first; and what is known of memory."""

    def __init__(self, candidates: Sequence[Candidate], limit: float, request: Request):
        self.limit, self.request = limit, request
        self.footprints = Footprints()
        self._queue: list[tuple[float, int, Candidate]] = []
        self._number = 0
        self._too_large: dict[object, int] = {}
        for candidate in candidates:
            self._push(candidate)

    def _push(self, candidate: Candidate) -> None:
        self._number += 1
        heapq.heappush(self._queue, (candidate.model.bound, self._number, candidate))

    def next(self) -> Candidate | None:
        """Takes the one with the lowest bound."""
        return heapq.heappop(self._queue)[2] if self._queue else None

    def fits(self, candidate: Candidate) -> bool:
        """Whether its memory does. Beside one that may gain by it, ZeRO-1 is tried too."""
        if candidate.memory is None:
            if self.request.quick and surely_fits(candidate.model, self.limit):
                self._add_sharded(candidate, only_if_worth=True)
                return True
            if least(candidate.model) <= self.limit and self._rough_peak(candidate) <= _SURELY_TOO_MUCH * self.limit:
                candidate.memory = predict(candidate.config, trace=self.footprints)
        fits = candidate.memory is not None and candidate.peak <= self.limit
        self._add_sharded(candidate, only_if_worth=fits)
        return fits

    def _rough_peak(self, candidate: Candidate) -> float:
        room = _Room(candidate.config, self.footprints, self.limit, whole=False)
        return max(room.peak(i, stage.blocks, Recomputation()) for i, stage in enumerate(candidate.model.stages))

    def _add_sharded(self, candidate: Candidate, *, only_if_worth: bool) -> None:
        parallel, model = candidate.config.parallel, candidate.model
        if parallel.zero or parallel.dp == 1 or candidate.tried_recomputation:
            return
        if only_if_worth and max(stage.update for stage in model.stages) < _WORTH_SHARING * model.bound:
            return
        self._push(_balanced(replace(candidate.config, parallel=replace(parallel, zero=1)), model.machine))

    def add_recomputed(self, candidate: Candidate) -> bool:
        """Puts the candidate back with recomputation where it is needed; False: it does not fit so either."""
        config = candidate.config
        kind = (candidate.grid, config.parallel.zero, config.pipeline.schedule, config.pipeline.warmup)
        b = config.train.micro_batch_size
        if candidate.tried_recomputation or b >= self._too_large.get(kind, b + 1):
            return False
        again = None
        if least(candidate.model, recomputed=True) <= self.limit:
            again = _with_recomputation(candidate, self.limit, self.footprints)
        if again is None:
            self._too_large[kind] = b
            return False
        self._push(again)
        return True


# -- candidates --------------------------------------------------------------------------------------------------------


def _candidates(config: Config, machine: Machine, request: Request) -> Iterator[Candidate]:
    batch = batch_size(config, request)
    for tp, pp, dp in grids(config, machine, request.keep):
        if batch % dp:
            continue
        for b in micro_batches(machine, tp, batch // dp, request):
            m = batch // (dp * b)
            for pipeline, optim in _schedules(config, pp, m, request):
                made = replace(
                    config, pipeline=replace(pipeline, num_microbatches=m, recompute="none"), optim=optim,
                    parallel=replace(config.parallel, tp=tp, pp=pp, dp=dp),
                    train=replace(config.train, micro_batch_size=b))
                keeps_split = config.pipeline.split and len(config.pipeline.split) == pp and request.keep.get("pp")
                yield Candidate(made, Model(made, machine)) if keeps_split else _balanced(made, machine)


def batch_size(config: Config, request: Request) -> int:
    """Samples of a step. Raises: ConfigError."""
    own = config.train.micro_batch_size * config.pipeline.num_microbatches * max(config.parallel.dp, 1)
    if request.batch_size < 0:
        raise config_error("batch_size", request.batch_size, "must be positive, or 0 for the configuration's", str(own))
    return request.batch_size or own


def grids(config: Config, machine: Machine, keep: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """(tp, pp, dp) of all devices. Tensor parallelism stays within a server, unless the user has chosen it."""
    number = machine.num_devices
    found = []
    for tp in [t for t in range(1, number + 1) if number % t == 0]:
        if tp != keep.get("tp", tp) or tp > config.model.num_heads or tp not in machine.profile.tp_degrees:
            continue
        if tp > machine.devices_per_server and "tp" not in keep:
            continue
        for pp in [p for p in range(1, number // tp + 1) if number // tp % p == 0]:
            dp = number // (tp * pp)
            if pp == keep.get("pp", pp) and dp == keep.get("dp", dp) and pp <= config.model.num_blocks:
                found.append((tp, pp, dp))
    return found


def micro_batches(machine: Machine, tp: int, samples: int, request: Request) -> list[int]:
    """Sizes that divide a replica's samples, within what was profiled."""
    known = machine.profile.micro_batches(tp)
    wanted = request.micro_batches or [b for b in range(min(known), max(known) + 1) if b in known or b & (b - 1) == 0]
    return [b for b in wanted if samples % b == 0]


def _schedules(
    config: Config, pp: int, m: int, request: Request
) -> Iterator[tuple[PipelineConfig, OptimConfig]]:
    """The configuration's own schedule and those that train alike, or those asked for; with what they need changed."""
    own = config.pipeline
    names = request.schedules or ((own.schedule,) if own.schedule in STALE else (own.schedule, "1f1b"))
    for name in dict.fromkeys(find_schedule(name).name for name in names):
        stale = name in STALE
        optim = config.optim if stale or config.optim.staleness == "none" else replace(config.optim, staleness="none")
        base = own if name == own.schedule else replace(
            own, schedule=name,  # type: ignore[arg-type]
            warmup="depth", early_switch="off", gradient_buffers=0,
            sync_steps=own.sync_steps if stale else 0)
        for warmup in ("depth", "latency") if name == "2bw" and pp > 1 else (base.warmup,):
            switch = base.early_switch
            if isinstance(switch, int) and warmup == "latency":
                switch = max(switch, pp - 1)
            pipeline = replace(
                base, warmup=warmup, early_switch=switch, num_microbatches=m, split=(),
                gradient_buffers=0 if warmup == "latency" and base.gradient_buffers == 1 else base.gradient_buffers)
            try:
                schedule_of(pipeline).check_sizes(Sizes(pp, m))
            except ConfigError:
                continue
            yield pipeline, optim


def _balanced(config: Config, machine: Machine) -> Candidate:
    """With the split that makes the slowest stage the fastest, whatever it takes of memory."""
    model = Model(config, machine)
    if model.pp > 1:
        found = best_split(*_block_costs(model), model.pp)
        assert found is not None, "there are as many blocks as stages"
        config = replace(config, pipeline=replace(config.pipeline, split=found.sizes))
        model = Model(config, machine)
    return Candidate(config, model)


def _block_costs(model: Model) -> tuple[list[float], list[float], list[float]]:
    """Of each block: forward, backward, and its share of a batch's norm and update for each micro-batch."""
    blocks = range(model.config.model.num_blocks)
    times = [model.block_time(n) for n in blocks]
    m = model.sizes.num_microbatches
    share = model.dp if model.config.parallel.zero else 1
    updates = [(model.block(n).norm + model.block(n).update / share) / m for n in blocks]
    return [f for f, _ in times], [b for _, b in times], updates


# -- memory ------------------------------------------------------------------------------------------------------------


def surely_fits(model: Model, limit: float) -> bool:
    """Whether no stage can come near the limit, by a generous count: thrice what Adam, or Muon's products, hold of a
    parameter, and of every token all that a layer has ever been seen to keep."""
    config, settings = model.config, model.config.model
    state = max(stage.parameters for stage in model.stages) * 3 * (4 * model.item + 24)
    tokens = config.train.micro_batch_size * settings.seq_length
    layer = tokens * model.item * (40 * settings.hidden_size + 6 * settings.num_heads * settings.seq_length)
    head = tokens * settings.vocab_size * 16
    flight = model.sizes.num_microbatches if config.pipeline.schedule == "gpipe" else 2 * model.pp
    return state + flight * (settings.num_layers * layer + head) < limit


def _with_recomputation(candidate: Candidate, limit: float, footprints: Footprints) -> Candidate | None:
    """A split whose stages fit, recomputed where they must be; None where there is none.

    The stages' peaks are estimated from above and below; so what comes out is checked exactly, and tried again with
    less memory where it is too much.
    """
    config, model = candidate.config, candidate.model
    tightened = limit
    for _ in range(4):
        splits = []
        for whole in (False, True):
            room = _Room(config, footprints, tightened, whole)
            found = best_split(*_block_costs(model), model.pp, room.fits)
            if found is None:
                continue
            splits.append(found)
            text = _recompute_text(found.sizes, found.recomputed, config.model.num_layers, whole)
            made = replace(config, pipeline=replace(config.pipeline, split=found.sizes, recompute=text))
            memory = predict(made, trace=footprints)
            if max(stage.total for stage in memory) <= limit:
                return Candidate(made, Model(made, model.machine), memory, tried_recomputation=True)
        if not splits:
            return None
        tightened *= 0.96
    return None


def least(model: Model, *, recomputed: bool = False) -> float:
    """Bytes that the fullest stage takes at least: weights, gradients and Adam's state, and what is in flight."""
    config = model.config
    schedule, sizes = schedule_of(config.pipeline), model.sizes
    mixed = config.train.dtype in ("bf16", "fp16")
    share = model.dp if config.parallel.zero else 1
    moments = {"adamw": 2, "lamb": 2}.get(config.optim.name, 0)
    most = 0.0
    # any split has a stage of the mean weight
    mean = sum(stage.parameters for stage in model.stages) / model.pp
    for stage in range(model.pp):
        parameters = mean if recomputed else model.stages[stage].parameters
        state: float = schedule.max_live_versions(sizes, stage) * model.item
        state += GRADIENT_BYTES[config.train.dtype] * schedule.num_gradient_buffers
        state += (4 * mixed + 4 * moments) / share
        flight = schedule.max_live_activations(sizes, stage) - 1
        kept = model.message_bytes * (1 if recomputed else len(model.stages[stage].blocks) - 1)
        most = max(most, parameters * state + flight * kept)
    return most


def _recompute_text(sizes: Sequence[int], recomputed: Sequence[bool], num_layers: int, whole: bool) -> str:
    if all(recomputed):
        return "stage" if whole else "all"
    if not any(recomputed):
        return "none"
    if whole:
        return "stage:" + _ranges([stage for stage, again in enumerate(recomputed) if again])
    layers, start = [], 0
    for size, again in zip(sizes, recomputed, strict=True):
        layers += [n - 1 for n in range(start, start + size) if again and 0 < n <= num_layers]
        start += size
    return _ranges(layers) if layers else "none"


def _ranges(numbers: Sequence[int]) -> str:
    """Such as '0,2-5'."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


class _Room:
    """Which blocks fit where, as far as a formula tells; whole: stages are recomputed as a whole."""

    def __init__(self, config: Config, footprints: Footprints, limit: float, whole: bool):
        self.config, self.footprints, self.limit, self.whole = config, footprints, limit, whole
        self.schedule = schedule_of(config.pipeline)
        self.sizes = Sizes(config.parallel.pp, config.pipeline.num_microbatches)
        self.device = default_device(config)

    def fits(self, stage: int, again: bool) -> NDArray[np.bool_]:
        """[i, j]: whether blocks i .. j-1 fit on that stage. The ends are on the first and the last stage alone."""
        count, p = self.config.model.num_blocks, self.sizes.num_stages
        first, last = stage == 0, stage == p - 1
        most = count - (p - 1)  # every other stage has a block
        ok = np.zeros((count + 1, count + 1), dtype=bool)
        starts = [0] if first else range(1, count)
        room = [self._fit(stage, size, first, last, again) for size in range(1, most + 1)]
        for i in starts:
            stops = range(i + 1, min(i + most, count) + 1) if not last else [count] if count - i <= most else []
            for j in stops:
                if last or j < count:
                    ok[i, j] = room[j - i - 1]
        return ok

    def _fit(self, stage: int, size: int, first: bool, last: bool, again: bool) -> bool:
        count = self.config.model.num_blocks
        blocks = range(0, size) if first else range(count - size, count) if last else range(1, 1 + size)
        if blocks.stop == count and not last:
            return False
        inner = frozenset(n for n in blocks if 0 < n < count - 1)
        recompute = Recomputation(frozenset(blocks) if self.whole else inner, self.whole) if again else Recomputation()
        return self.peak(stage, blocks, recompute) <= self.limit

    def peak(self, stage: int, blocks: range, recompute: Recomputation) -> float:
        """About what that stage takes."""
        buffers = Buffers(self.schedule.max_live_versions(self.sizes, stage), self.schedule.num_gradient_buffers)
        footprint = self.footprints.rough(self.config, blocks, recompute, buffers, self.device)
        return _peak(footprint, self.schedule.max_live_activations(self.sizes, stage), blocks.start == 0)


def _peak(fp: Footprint, in_flight: int, first: bool) -> float:
    """About what memory.predict.walk finds."""
    static = fp.weights + fp.master + fp.gradients + fp.optimizer
    one = fp.kept + (0 if first else fp.message)
    return static + 2 * fp.message + max(
        in_flight * one + max(fp.backward, fp.first_backward), (in_flight - 1) * one + fp.forward + fp.message,
        (in_flight - 1) * one + max(fp.norm, fp.update))


# -- reasons -----------------------------------------------------------------------------------------------------------


def _why(candidate: Candidate, ranked: Sequence[Candidate], limit: float) -> str:
    """Which stage needs how much, and what near it would fit."""
    if candidate.memory is None:
        text = f"a stage needs more than {least(candidate.model) / 1e9:.1f} of {limit / 1e9:.1f} GB"
    else:
        totals = [stage.total for stage in candidate.memory]
        stage = totals.index(max(totals))
        text = f"stage {stage} needs {totals[stage] / 1e9:.1f} of {limit / 1e9:.1f} GB, and recomputation is not enough"
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
    if grids(config, machine, request.keep):
        return config_error(
            "batch_size", batch, f"no grid of {number} devices with {kept} divides it into micro-batches of the "
            f"profiled sizes {machine.profile.micro_batches(machine.profile.tp_degrees[0])} that the schedule can run",
            str(max(batch, number) * 2))
    return config_error("devices", number, f"no grid with {kept} has so many (tp degrees: "
                        f"{machine.profile.tp_degrees})", "1")


