"""pipedream's stages in one process: every block runs on the weight version that its stage would
have.

    batch t, three stages, m = 2     micro-batch     2t      2t+1
                                     stage 0      W(t-1)    W(t-1)
                                     stage 1      W(t-1)     W(t)
                                     stage 2       W(t)      W(t)

Versions are a function of the micro-batch's number and of the batch before which the pipeline was
last drained. Both ends of a tied weight may have different versions; their gradients accumulate in
one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.engine import Engine
from hybridpar.train.faults.anomalies import AnomalyDetector
from hybridpar.train.run import mark_intervals


class StagedPolicy(BatchPolicy):
    """The decisions of the run `original`, for training with `job`, which is that run on one
    process."""

    def __init__(self, job: JobPlan, original: JobPlan, judge: AnomalyDetector):
        super().__init__(job, judge, original=original)
        self._marks = mark_intervals(original.config)
        self._start = 0

    def resume_at(self, batch: int) -> None:
        """Continue before a batch, from a checkpoint that has been loaded."""
        self._start = batch

    def versions_of(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return the weight version of each stage and micro-batch, if the pipeline drained at
        the marks of the original run."""
        drained = max(self._start, *(batch // n * n for n in self._marks), 0)
        return self.schedule.versions_of(self.shape, batch, drained)

    def versions_by_stage(self, action: Action) -> list[int]:
        """Return the weight version on each stage of an action's micro-batch."""
        batch, index = divmod(action.microbatch, self.shape.num_microbatches)
        return [versions[index] for versions in self.versions_of(batch)]

    def versions_in(self, action: Action) -> tuple[int, ...]:
        return (action.version, *({*self.versions_by_stage(action)} - {action.version}))


def staged_engine(job: JobPlan, original: JobPlan, policy: StagedPolicy) -> Engine:
    """Return an engine that trains like the stages of `original`. `job`: that run on one
    process."""
    engine = Engine(job, ProcessGrid(), torch.device("cpu"), policy=policy)
    weights = engine.state.weights

    def binding(stage: int, places: list[tuple[dict[str, Any], str, str]]) -> Callable[..., None]:
        """Return a function that points a block's modules at its stage's version."""

        def bind(module: nn.Module, inputs: Any) -> None:
            assert engine.executor.current is not None
            leaves = weights.leaves_of(policy.versions_by_stage(engine.executor.current)[stage])
            for table, key, name in places:
                table[key] = leaves[name]

        return bind

    numbered = enumerate(original.split)
    for stage, number in ((stage, number) for stage, numbers in numbered for number in numbers):
        block = engine.stage.blocks[str(number)]
        tables = {id(module._parameters) for module in block.modules()}
        block.register_forward_pre_hook(
            binding(stage, [place for place in weights.places if id(place[0]) in tables])
        )
    return engine
