"""What fits into memory: limits, quick estimates from above and below, and where recomputation is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hybridpar.memory import Footprints, predict
from hybridpar.memory.footprint import Buffers, Footprint
from hybridpar.models.build import Recomputation
from hybridpar.pipeline.plan.schedules import schedule_of
from hybridpar.planner.candidates import Candidate, block_costs
from hybridpar.planner.cost import Model
from hybridpar.planner.machine import Machine
from hybridpar.planner.split import Matrix, best_split

RESERVED = 1.5 * 2**30
"""Bytes of an accelerator that its context and communicators take; of a host's memory a tenth is left to others."""
TIGHT = 0.9
"""Share of the limit beyond which memory is short: fragments, or longer documents, may need the rest."""
_HOST_SHARE = 0.9
"""Of a host's memory, beside GPUs, that checkpoints' copies may take."""
_FRAGMENTS = 0.04
"""Share of an accelerator's memory that an allocator cannot hand out. An estimate."""


def memory_limit(machine: Machine) -> float:
    """Bytes that training may take of a device."""
    if machine.profile.hardware.cores:
        return 0.9 * machine.memory
    return (machine.memory - RESERVED) * (1 - _FRAGMENTS)


def device_of(model: Model) -> torch.device:
    """The kind of device that is planned for, which need not be on this machine."""
    return torch.device(model.machine.profile.hardware.device_type)


def host_shortage(candidate: Candidate) -> str:
    """What its checkpoints' copies lack of a server's memory; empty where nothing, or where that is not known."""
    model, stages = candidate.model, [stage.host for stage in candidate.memory or ()]
    machine, each = model.machine, model.tp * model.dp
    number, per = each * len(stages), machine.devices_per_server
    known = machine.profile.hardware.host_memory * per if machine.measured else 0.0
    needed = max((sum(stages[rank // each] for rank in range(first, min(first + per, number)))
                  for first in range(0, number, per)), default=0)
    if not known or needed <= _HOST_SHARE * known:
        return ""
    return (f"the copies that checkpoints are written from need {needed / 1e9:.1f} of {_HOST_SHARE * known / 1e9:.1f} "
            "GB of a host's memory; checkpoint.asynchronous = false saves them")


def surely_fits(model: Model, limit: float) -> bool:
    """Whether no stage can come near the limit, by a generous count: thrice what Adam, or Muon's products, hold of a
    parameter, and of every token all that a layer has ever been seen to keep."""
    config, settings = model.config, model.config.model
    state = max(rank.parameters for rank in model.ranks) * 3 * (4 * model.item + 24)
    tokens = config.train.micro_batch_size * settings.seq_length
    layer = tokens * model.item * (40 * settings.hidden_size + 6 * settings.num_heads * settings.seq_length)
    head = tokens * settings.vocab_size * 16
    chunks = model.sizes.chunks
    flight = model.sizes.num_microbatches if config.pipeline.schedule == "gpipe" else 2 * chunks * model.pp
    return state + flight * (settings.num_layers * layer + head) < limit


def with_recomputation(
    candidate: Candidate, limit: float, footprints: Footprints, *, exact: bool = True
) -> Candidate | None:
    """A split whose stages fit, recomputed where they must be; None where there is none.

    The stages' peaks are estimated from above and below; so what comes out is checked exactly, and tried again with
    less memory where it is too much.
    """
    config, model = candidate.config, candidate.model
    tightened = limit
    for _ in range(4):
        splits = []
        for whole in (False, True):
            room = Room(model, footprints, whole)
            found = best_split(
                *block_costs(model), model.sizes.num_stages, room.peaks, tightened / model.sizes.chunks)
            if found is None:
                continue
            splits.append(found)
            text = _recompute_text(found.sizes, found.recomputed, config.model.num_layers, whole)
            made = replace(config, pipeline=replace(config.pipeline, split=found.sizes, recompute=text))
            memory = predict(made, device=device_of(model), trace=footprints) if exact else None
            if memory is None or max(stage.total for stage in memory) <= limit:
                return Candidate(made, Model(made, model.machine), memory, tried_recomputation=True)
        if not splits:
            return None
        tightened *= 0.96
    return None


def least(model: Model, *, recomputed: bool = False) -> float:
    """Bytes that the fullest stage takes at least: weights, gradients and Adam's state, and what is in flight."""
    config = model.config
    schedule, sizes = schedule_of(config.pipeline), model.sizes
    most = 0.0
    # any split has a rank of the mean weight
    mean = sum(rank.parameters for rank in model.ranks) / model.pp
    for rank in range(model.pp):
        parameters = mean if recomputed else model.ranks[rank].parameters
        flight = schedule.max_live_activations(sizes, rank) - 1
        fewest = min(len(model.stages[stage].blocks) for stage in sizes.stages_of(rank))
        kept = model.message_bytes * (1 if recomputed else fewest - 1)
        most = max(most, parameters * model.state_bytes(rank) + flight * kept)
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


class Room:
    """About what blocks take where, from their footprints; whole: stages are recomputed as a whole."""

    def __init__(self, model: Model, footprints: Footprints, whole: bool):
        self.config, self.footprints, self.whole = model.config, footprints, whole
        self.schedule, self.sizes, self.device = schedule_of(model.config.pipeline), model.sizes, device_of(model)

    def peaks(self, stage: int, again: bool) -> Matrix:
        """[i, j]: about what blocks i .. j-1 take on that stage; infinite where they cannot be on it: the ends are on
        the first and the last stage alone."""
        count, p = self.config.model.num_blocks, self.sizes.num_stages
        first, last = stage == 0, stage == p - 1
        most = count - (p - 1)  # every other stage has a block
        found = np.full((count + 1, count + 1), np.inf)
        starts = [0] if first else range(1, count)
        of_size = [self._peak(stage, size, first, last, again) for size in range(1, most + 1)]
        for i in starts:
            stops = range(i + 1, min(i + most, count) + 1) if not last else [count] if count - i <= most else []
            for j in stops:
                if last or j < count:
                    found[i, j] = of_size[j - i - 1]
        return found

    def _peak(self, stage: int, size: int, first: bool, last: bool, again: bool) -> float:
        count = self.config.model.num_blocks
        blocks = range(0, size) if first else range(count - size, count) if last else range(1, 1 + size)
        if blocks.stop == count and not last:
            return np.inf
        inner = frozenset(n for n in blocks if 0 < n < count - 1)
        recompute = Recomputation(frozenset(blocks) if self.whole else inner, self.whole) if again else Recomputation()
        return self.peak(stage, blocks, recompute)

    def peak(self, stage: int, blocks: range, recompute: Recomputation) -> float:
        """About what that stage takes."""
        rank = self.sizes.rank_of(stage)
        buffers = Buffers(self.schedule.max_live_versions(self.sizes, rank), self.schedule.num_gradient_buffers)
        footprint = self.footprints.rough(self.config, blocks, recompute, buffers, self.device)
        in_flight = -(-self.schedule.max_live_activations(self.sizes, rank) // self.sizes.chunks)
        return _peak(footprint, in_flight, blocks.start == 0)


def _peak(fp: Footprint, in_flight: int, first: bool) -> float:
    """About what memory.predict.walk finds."""
    static = fp.weights + fp.master + fp.gradients + fp.optimizer
    one = fp.kept + (0 if first else fp.message)
    return static + 2 * fp.message + max(
        in_flight * one + max(fp.backward, fp.first_backward), (in_flight - 1) * one + fp.forward + fp.message,
        (in_flight - 1) * one + max(fp.norm, fp.update))
