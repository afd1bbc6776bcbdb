"""Split the blocks of a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

from hybridpar.config import Config, ModelSpec, message_shape
from hybridpar.errors import config_error
from hybridpar.job.block_times import block_times
from hybridpar.models.balance import balanced_split, even_out
from hybridpar.models.cost import (
    KEPT_BYTES,
    block_placements,
    forward_flops_per_token,
    layer_matmul_parameters,
)

_STATE_BYTES = 18
"""Bytes of a parameter's state in half precision: weight 2, fp32 weight, gradient and Adam's
moments 16."""
_FROZEN_BYTES = 2
"""Bytes of a frozen parameter in half precision: its weight alone."""
_SLACK = 0.01
"""Relative difference up to which two estimated stages count as equal, so that memory decides."""
_UNITS = 10_000
"""Resolution of the times that are compared: parts of the mean stage's time."""


def stage_split(config: Config) -> tuple[range, ...]:
    """Return the blocks of each stage: `pipeline.split`, or the split that balances estimated
    times, then memory.

    The times are of a complete step, so they include embedding, head and optimizer
    (block_times.py). The split depends on the configuration alone.

    Raises:
        ConfigError: There are more stages than blocks, or `pipeline.split` does not give every
            stage a block and every block a stage.
    """
    model = config.model
    num_ranks = config.parallel.pp
    chunks = config.pipeline.num_virtual_stages
    split = config.pipeline.split
    num_stages = num_ranks * chunks
    blocks = config.model.num_blocks
    if num_ranks > blocks:
        raise config_error(
            "parallel.pp", num_ranks, f"the model has only {blocks} blocks", str(blocks)
        )
    if num_stages > blocks:
        most = blocks // num_ranks
        if config.pipeline.stage_layout == "v":
            fewer = "pipeline.stage_layout = loop"
            if most > 1:
                fewer = f"pipeline.virtual_stages = {most - most % 2}"
            raise config_error(
                "parallel.pp",
                num_ranks,
                f'pipeline.stage_layout = "v" has {chunks} stages per rank, but the model has '
                f"only {blocks} blocks",
                str(blocks // chunks) if blocks // chunks > 1 else fewer,
            )
        raise config_error(
            "pipeline.virtual_stages",
            chunks,
            f"parallel.pp = {num_ranks} ranks would hold {num_stages} stages, but the model "
            f"has only {blocks} blocks",
            str(most) if most > 1 else "pipeline.schedule = 1f1b",
        )
    if split and (len(split) != num_stages or sum(split) != blocks or min(split) < 1):
        of = "parallel.pp" if chunks == 1 else "parallel.pp * pipeline.virtual_stages"
        raise config_error(
            "pipeline.split",
            list(split),
            f"must be {num_stages} positive numbers ({of}) that add up to {blocks} "
            f"({_named(model)})",
            str(list(_balanced(config))),
        )
    return _ranges(split or _balanced(config))


def inference_split(model: ModelSpec, num_ranks: int) -> tuple[range, ...]:
    """Return the blocks of each stage that balance forward operations alone, for generation."""
    return _ranges(balanced_split(forward_flops_per_token(model), num_ranks))


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(
        range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)
    )


def _balanced(config: Config) -> tuple[int, ...]:
    num_ranks = config.parallel.pp
    chunks = config.pipeline.num_virtual_stages
    if num_ranks == 1 and chunks == 1:
        return (config.model.num_blocks,)
    times = block_times(config)
    unit = sum(times) / num_ranks / chunks / _UNITS
    costs = tuple(round(time / unit) for time in times)
    sizes = balanced_split(costs, num_ranks * chunks, _held(config.model), _SLACK)
    return even_out(costs, sizes, num_ranks, config.pipeline.stage_layout)


def _named(model: ModelSpec) -> str:
    """Return a description of the blocks for an error message."""
    if model.cost_model is not None:
        return f"embedding, {model.num_blocks - 2} layers, head"
    return f"blocks of {model.kind}"


@lru_cache(maxsize=256)
def _held(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return bytes of each block, to compare splits by: its state, and its activations for a
    micro-batch of one sequence.
    """
    if (formulas := model.cost_model) is None:
        return tuple(
            (
                sum(
                    prod(one.shape) * (_STATE_BYTES if one.trainable else _FROZEN_BYTES)
                    for one in placements
                ),
                2 * prod(message_shape(model, max(0, number - 1))),
            )
            for number, placements in enumerate(block_placements(model))
        )
    token = formulas.seq_length * formulas.hidden_size
    words = formulas.vocab_size * formulas.hidden_size
    embedding = words + (token if formulas.position == "learned" else 0)
    layers = [
        (_STATE_BYTES * layer_matmul_parameters(formulas, layer, stored=True), KEPT_BYTES * token)
        for layer in range(formulas.num_layers)
    ]
    return ((_STATE_BYTES * embedding, 0), *layers, (_STATE_BYTES * words, 0))
