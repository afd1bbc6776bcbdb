"""bf16: numbers rounded to bfloat16; gradients with error feedback."""

from __future__ import annotations

import torch

from hybridpar.config import Config
from hybridpar.state.compression.codec import Cast
from hybridpar.state.compression.rounded import Rounded


class BFloat16(Rounded):
    """Elements rounded to bfloat16: 2 bytes each."""

    name = "bf16"


def make_codec(config: Config) -> Cast:
    """Create the codec of messages."""
    return Cast(torch.bfloat16)


GRADIENTS = BFloat16
MESSAGES = make_codec
