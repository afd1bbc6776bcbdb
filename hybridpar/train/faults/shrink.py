"""Continuation of a training on fewer ranks: fewer replicas or sites, each with more
micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hybridpar.config import Config
from hybridpar.validate import problems


def shrink(config: Config, num_ranks: int) -> Config | None:
    """The resolved `config` on as many of `num_ranks` ranks as it can use, with the same global
    batch.

    Tensor parts and stages stay, so every rank keeps its memory. Of two ways that use as many ranks
    the one with more sites is taken. None: not even one replica fits, or no number of micro-batches
    keeps the batch, or there would be fewer ranks than faults.min_ranks.
    """
    parallel = config.parallel
    pipeline = config.pipeline
    one = parallel.tp * parallel.pp
    microbatches = pipeline.num_microbatches * parallel.replicas
    ways = sorted(
        product(range(1, parallel.dp + 1), range(1, parallel.sites + 1)),
        key=lambda way: (way[0] * way[1], way[1]),
        reverse=True,
    )
    for dp, sites in ways[1:] if config.faults.min_ranks else ():
        if not config.faults.min_ranks <= dp * sites * one <= num_ranks or microbatches % (
            dp * sites
        ):
            continue
        smaller = replace(
            config,
            parallel=replace(parallel, dp=dp, sites=sites),
            pipeline=replace(pipeline, num_microbatches=microbatches // (dp * sites)),
        )
        if not problems(smaller, dp * sites * one):
            return smaller
    return None
