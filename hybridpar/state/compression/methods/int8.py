"""int8: blocks of 64 integers of 8 bits with a scale, 66 bytes (ops/quantize.py); gradients with
error feedback."""

from __future__ import annotations

from hybridpar.config import Config
from hybridpar.state.compression.codec import BlockQuantized
from hybridpar.state.compression.rounded import Rounded


class Int8(Rounded):
    """Elements as integers of 8 bits."""

    name = "int8"


def make_codec(config: Config) -> BlockQuantized:
    """Create the codec of messages."""
    return BlockQuantized(8, backend=config.kernels.quantize)


GRADIENTS = Int8
MESSAGES = make_codec
