"""The section [compression]: what is sent between ranks in fewer bytes than it has, with what is lost made up for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from hybridpar.config.typed import AtLeastOne, Count, Within
from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections import Config


@dataclass(frozen=True)
class CompressionConfig:
    """Gradients between replicas. What a batch does not send is added to the next one's gradient (error feedback).

    No effect where parallel.dp is 1 and no weight is tied across stages.
    """

    gradients: Literal["none", "bf16", "int8", "int4", "dct", "powersgd"] = "none"
    """bf16, int8, int4: rounded; every replica gets those of all others, so with 4, 8 and 16 replicas they take as many
    bytes as whole ones do. dct: elements above a threshold, with their places (arXiv 2010.08899). powersgd: two factors
    of each matrix (arXiv 1905.13727)."""
    gradients_kept: Annotated[float, Within(above=0, most=1)] = 0.01
    """dct: share of a tensor's elements above its threshold where that is set anew."""
    gradients_limit: Annotated[float, Within(1, most=1e6)] = 2.0
    """dct: most elements that a batch sends of a tensor, in multiples of gradients_kept; the rest waits."""
    gradients_period: AtLeastOne = 100
    """dct: batches from one setting of the thresholds to the next."""
    gradients_values: Literal["full", "bf16"] = "full"
    """dct: type of the elements that are sent; full: that of gradients."""
    gradients_rank: AtLeastOne = 4
    """powersgd: columns of each factor."""
    gradients_smallest: Count = 1024
    """Tensors of fewer elements are sent whole."""

    def conflicts(self, config: Config) -> Iterator[Problem]:
        """Settings that do not go with those of other sections."""
        for reason in self._against_gradients(config) if self.gradients != "none" else ():
            yield Problem("compression.gradients", self.gradients, reason, "none")

    @staticmethod
    def _against_gradients(config: Config) -> Iterator[str]:
        if config.parallel.zero > 1:
            yield f"does not go with parallel.zero = {config.parallel.zero}, which sums gradients block by block"
        if config.memory.host_optimizer:
            yield "does not go with memory.host_optimizer = true"
        if config.memory.budget or config.memory.parts:
            yield "does not go with memory.budget and memory.parts"
        if config.train.record_memory:
            yield f"does not go with train.record_memory = {config.train.record_memory}"
        if config.train.dtype == "fp16":
            yield "does not go with train.dtype = fp16, whose loss scale is the unit of what was not sent"


UNCOMPRESSED = CompressionConfig()
