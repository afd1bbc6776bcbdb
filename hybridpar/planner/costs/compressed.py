"""Cost of compressed gradients, and the codecs that the planner tries if training may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from hybridpar.config import Config
from hybridpar.config.compression_methods import (
    GRADIENTS,
    MESSAGES,
    GradientCompression,
    MessageCompression,
)
from hybridpar.models.build import DTYPES
from hybridpar.state.compression.registry import gradient_method


def _tried(rows: Mapping[str, GradientCompression | MessageCompression]) -> dict[str, float]:
    """Return the loss increase in percent of the methods that `plan --compression` tries, most
    exact first."""
    return {name: row.loss_percent for name, row in rows.items() if row.loss_percent is not None}


TRIED_MESSAGES = _tried(MESSAGES)
TRIED_GRADIENTS = _tried(GRADIENTS)


def gradient_share(config: Config) -> float:
    """Return the compressed size of large gradients with `compression.gradients`, as a share of
    their size."""
    item = max(DTYPES[config.train.dtype].itemsize, 4)
    if not config.feeds_back:
        return 1.0
    return gradient_method(config.compression.gradients).element_bytes(config, item) / item


def with_codecs(config: Config) -> Iterator[Config]:
    """Yield the configuration with codecs for traffic that it does not compress yet."""
    compression = config.compression
    parallel = config.parallel
    messages = TRIED_MESSAGES if parallel.pp > 1 and compression.messages == "none" else ()
    gradients = TRIED_GRADIENTS if parallel.dp_cp > 1 and compression.gradients == "none" else ()
    for message, gradient in product(
        (compression.messages, *messages), (compression.gradients, *gradients)
    ):
        made = replace(compression, messages=message, gradients=gradient)
        if made != compression:
            yield replace(config, compression=made)


def loss_of_codecs(config: Config) -> str:
    """Return in words how much loss the tried codecs of a configuration cost."""
    compression = config.compression
    named = (
        ("messages", compression.messages, TRIED_MESSAGES),
        ("gradients", compression.gradients, TRIED_GRADIENTS),
    )
    costs = [
        f"+{measured[name]:g} % by {name} {what}"
        for what, name, measured in named
        if name in measured
    ]
    return f"changes training: loss {', '.join(costs)} in a small study; see docs/slow_links.md"
