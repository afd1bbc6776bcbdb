"""Continue training on fewer ranks: fewer replicas or sites, each with more micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd

from hybridpar.config import Config
from hybridpar.validate import problems


def shrink(config: Config, num_ranks: int) -> Config | None:
    """Return `config` for at most `num_ranks` ranks with the same global batch.

    It uses as many ranks as it can. Tensor and context parallelism and stages stay, so that every rank keeps
    its memory. Between two ways with equally many ranks, the one with more sites is taken.

    Returns None if not even one replica fits, if no number of micro-batches keeps the batch, or if
    fewer than faults.min_ranks ranks would remain.
    """
    parallel = config.parallel
    pipeline = config.pipeline
    one = parallel.tp * parallel.cp * parallel.pp
    microbatches = pipeline.num_microbatches * parallel.replicas
    ways = sorted(
        product(range(1, parallel.dp + 1), range(1, parallel.sites + 1)),
        key=lambda way: (way[0] * way[1], way[1]),
        reverse=True,
    )
    for dp, sites in ways[1:] if config.faults.min_ranks else ():
        num_ranks_used = dp * sites * one
        if not config.faults.min_ranks <= num_ranks_used <= num_ranks:
            continue
        if microbatches % (dp * sites):
            continue
        smaller = replace(
            config,
            parallel=replace(parallel, dp=dp, sites=sites, ep=gcd(parallel.ep, dp * parallel.cp)),
            pipeline=replace(pipeline, num_microbatches=microbatches // (dp * sites)),
        )
        if not problems(smaller, num_ranks_used):
            return smaller
    return None
