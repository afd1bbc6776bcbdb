"""Continuation of a training on fewer ranks: fewer replicas, each with more micro-batches."""

from __future__ import annotations

from dataclasses import replace

from hybridpar.config import Config
from hybridpar.validate import problems


def shrink(config: Config, num_ranks: int) -> Config | None:
    """The resolved `config` on as many of `num_ranks` ranks as it can use, with the same global batch.

    Tensor parts, stages and sites stay, so every rank keeps its memory. None: not even one replica fits, or no number
    of micro-batches keeps the batch, or there would be fewer ranks than faults.min_ranks.
    """
    parallel, pipeline = config.parallel, config.pipeline
    one, microbatches = parallel.tp * parallel.pp * parallel.sites, pipeline.num_microbatches * parallel.dp
    for dp in range(min(num_ranks // one, parallel.dp - 1), 0, -1):
        if dp * one < max(config.faults.min_ranks, 1) or not config.faults.min_ranks:
            break
        smaller = replace(config, parallel=replace(parallel, dp=dp),
                          pipeline=replace(pipeline, num_microbatches=microbatches // dp))
        if microbatches % dp == 0 and not problems(smaller, dp * one):
            return smaller
    return None
