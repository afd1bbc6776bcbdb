"""int4: blocks of 64 integers of 4 bits with a scale, 34 bytes, after a Hadamard rotation
(ops/quantize.py); gradients with error feedback."""

from __future__ import annotations

from hybridpar.config import Config
from hybridpar.state.compression.codec import BlockQuantized
from hybridpar.state.compression.rounded import Rounded


class Int4(Rounded):
    """Elements as integers of 4 bits."""

    name = "int4"


def make_codec(config: Config) -> BlockQuantized:
    """Create the codec of messages."""
    return BlockQuantized(4, rotate=True, backend=config.kernels.quantize)


GRADIENTS = Int4
MESSAGES = make_codec
