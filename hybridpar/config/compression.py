"""The section [compression]: what travels in fewer bytes, with fewer bits a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CompressionConfig:
    """Codecs of what ranks send to each other. Evaluation, generation and export use none."""

    messages: Literal["none", "bf16", "int8", "int4"] = "none"
    """Activations between stages in training: bf16; or a bfloat16 scale for each 64 features of a token and 8 or 4 bits
    a feature, 4 bits after a Hadamard rotation. fp32 takes 2, 3.9 or 7.5 times the bytes. A head that is a stage of its
    own gets exact ones."""
    messages_backward: Literal["same", "none", "bf16", "int8", "int4"] = "same"
    """Gradients between stages; same: as `messages`."""

    @property
    def both_ways(self) -> tuple[str, str]:
        """The names of the codecs of activations and of their gradients."""
        forward, backward = self.messages, self.messages_backward
        return forward, forward if backward == "same" else backward
