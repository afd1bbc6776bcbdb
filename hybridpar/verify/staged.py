"""pipedream's stages in one process: every block runs on the version of the weights that its stage would have.

    batch t, three stages, m = 2     micro-batch     2t      2t+1
                                     stage 0      W(t-1)    W(t-1)
                                     stage 1      W(t-1)     W(t)
                                     stage 2       W(t)      W(t)

Versions are a function of the micro-batch's number and of the batch before which the pipeline was last drained. Both
ends of a tied weight may be of different versions; their gradients meet in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.models.cost import stage_split
from hybridpar.optim.schedule import learning_rate
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.schedules import schedule_of
from hybridpar.pipeline.plan.sizes import Sizes
from hybridpar.train.engine import Engine
from hybridpar.train.run import mark_intervals


class StagedEngine(Engine):
    """Trains as the stages of `original` did; `config`: the same on one process.

    `start`: the batch before which training went on from a checkpoint, to be set once that is loaded.
    """

    def __init__(self, config: Config, original: Config):
        self._original, self._stages = original, Sizes.of(original)
        self._rules = schedule_of(original.pipeline)
        self.start = 0
        super().__init__(config, ProcessGrid(), torch.device("cpu"))
        split = stage_split(original.model, original.parallel.pp, original.pipeline.split)
        for stage, number in ((stage, number) for stage, numbers in enumerate(split) for number in numbers):
            block = self.stage.blocks[str(number)]
            tables = {id(module._parameters) for module in block.modules()}
            places = [place for place in self.weights.places if id(place[0]) in tables]
            block.register_forward_pre_hook(self._binding(stage, places))

    def _num_versions(self) -> int:
        return self._rules.max_live_versions(self._stages, 0)

    def _binding(self, stage: int, places: list[tuple[dict[str, Any], str, str]]) -> Callable[..., None]:
        """Points a block's modules at its stage's version."""
        def bind(module: nn.Module, inputs: Any) -> None:
            assert self.executor.current is not None
            leaves = self.weights.leaves_of(self._versions_by_stage(self.executor.current)[stage])
            for table, key, name in places:
                table[key] = leaves[name]

        return bind

    def _versions_by_stage(self, action: Action) -> list[int]:
        batch, index = divmod(action.microbatch, self._stages.num_microbatches)
        return [versions[index] for versions in self.versions_of(batch)]

    def versions_of(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """By stage and micro-batch, where the pipeline drained at the marks of the original run."""
        drained = max(self.start, *(batch // n * n for n in mark_intervals(self._original)), 0)
        return self._rules.versions_of(self._stages, batch, drained)

    def _before_backward(self, action: Action) -> float:
        factor = super()._before_backward(action)
        buffer = self.gradients.buffer_index(action.microbatch // self._stages.num_microbatches)
        for version in {*self._versions_by_stage(action)} - {action.version}:
            self.gradients.bind(self.weights.leaves_of(version), buffer)
        self.gradients.arm(None)  # there is nobody to reduce them with
        return factor

    def _lr(self, batch: int) -> float:
        delay = self._rules.mean_delay(self._stages, 0) if batch >= self._rules.sync_steps else 0.0
        return learning_rate(batch, self.config.optim, self.config.train.num_steps, delay)
