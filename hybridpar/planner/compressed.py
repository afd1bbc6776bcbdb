"""Compressed gradients as a planner counts them, and the codecs that it tries where training may
change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from hybridpar.config import CompressionConfig, Config
from hybridpar.models.build import DTYPES
from hybridpar.models.cost import block_placements
from hybridpar.ops.quantize import TILE, quantized_bytes

MESSAGES = {"int8": 0.0, "int4": 0.5, "dct": 19.0}
GRADIENTS = {"int8": 0.0, "int4": 0.1, "dct": 16.0}
"""What `plan --compression` tries, from the most exact on, and by how many per cent the validation
loss ended higher in small studies: means over three seeds, of 1f1b and 2bw the larger. Source:
benchmarks/README.md."""


def gradient_share(config: Config) -> float:
    """Bytes of a replica's message over those of its gradients in `compression.gradients`, of large
    tensors.

    dct: in the mean over a period, in which it sends up to gradients_limit times what it is to
    keep. powersgd, sbpca: of blocks between the ends.
    """
    settings = config.compression
    item = max(DTYPES[config.train.dtype].itemsize, 4)
    return _ITEM_BYTES[settings.gradients](settings, config, item) / item


def _dct(settings: CompressionConfig, config: Config, item: int) -> float:
    kept = min(1.0, settings.gradients_kept * (1 + settings.gradients_limit) / 2)
    return kept * (2 if settings.gradients_values == "bf16" else item) + min(1 / 8, 1 / 255 + kept)


def _powersgd(settings: CompressionConfig, config: Config, item: int) -> float:
    """Those of as many numbers as it sends, in the form of gradients_values."""
    values = _ITEM_BYTES[
        "none" if settings.gradients_values == "full" else settings.gradients_values
    ]
    return _factors(settings, config) * values(settings, config, item)


def _factors(settings: CompressionConfig, config: Config) -> float:
    """Elements of factors for one of the matrices of blocks between the ends, or of all: rows and
    columns for their elements."""
    blocks = block_placements(config.model, config.optim.groups)
    matrices = [
        one.shape
        for block in blocks[1:-1] or blocks
        for one in block
        if one.trainable and len(one.shape) > 1
    ]
    sent = sum(shape[0] + prod(shape[1:]) for shape in matrices)
    return min(1.0, settings.gradients_rank * sent / max(1, sum(map(prod, matrices))))


_ITEM_BYTES: dict[str, Callable[[CompressionConfig, Config, int], float]] = {
    "none": lambda settings, config, item: float(item),
    "bf16": lambda settings, config, item: 2.0,
    "int8": lambda settings, config, item: quantized_bytes(TILE, 8) / TILE,
    "int4": lambda settings, config, item: quantized_bytes(TILE, 4) / TILE,
    "dct": _dct,
    "powersgd": _powersgd,
    "sbpca": lambda settings, config, item: (
        settings.gradients_blocks * _factors(settings, config) * item
    ),
}
"""Bytes of an element, by the value of compression.gradients."""


def with_codecs(config: Config) -> Iterator[Config]:
    """The configuration with codecs where something is sent that it does not compress yet."""
    compression = config.compression
    parallel = config.parallel
    messages = MESSAGES if parallel.pp > 1 and compression.messages == "none" else ()
    gradients = GRADIENTS if parallel.dp > 1 and compression.gradients == "none" else ()
    for message, gradient in product(
        (compression.messages, *messages), (compression.gradients, *gradients)
    ):
        made = replace(compression, messages=message, gradients=gradient)  # type: ignore[arg-type]
        if made != compression:
            yield replace(config, compression=made)


def loss_of_codecs(config: Config) -> str:
    """What the codecs of a configuration that were tried cost in loss, in words."""
    compression = config.compression
    named = (
        ("messages", compression.messages, MESSAGES),
        ("gradients", compression.gradients, GRADIENTS),
    )
    costs = [
        f"+{measured[name]:g} % by {name} {what}"
        for what, name, measured in named
        if name in measured
    ]
    return f"changes training: loss {', '.join(costs)} in a small study; see docs/slow_links.md"
