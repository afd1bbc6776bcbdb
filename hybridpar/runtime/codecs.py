"""Codecs of activations and gradients between stages: rows of numbers as fewer bytes, and back.

    stage r     x ---- encode ----> bytes ==== link ====> bytes ---- decode_ ----> C(x)     stage r + 1
                dC(x) <---- decode_ ---- bytes ==== link ==== bytes <---- encode ---- dx

A row is a token's features. Its bytes depend on it alone, so it is sent as the same bytes on every
grid. The backward treats C as the identity (straight through), except that a codec may send only
the gradients of the features that were sent (`Codec.follows`; both sides know which). The codecs
are in state/compression.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.config import Config, message_shape
from hybridpar.errors import config_error
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.registry import message_codec


@dataclass(frozen=True)
class Codecs:
    """The codecs of a pipeline's activations and their gradients.

    Attributes:
        forward: Codec of activations.
        backward: Codec of gradients.
        exact: First blocks of the stages that receive exact activations: a head alone, and with
            stage_layout "v" the stages that a rank sends to itself.
    """

    forward: Codec | None = None
    backward: Codec | None = None
    exact: frozenset[int] = frozenset()

    @classmethod
    def of(cls, job: JobPlan) -> Codecs:
        """Create the codecs of a job.

        Raises:
            ConfigError: A codec saves no bytes.
        """
        config = job.config
        names = config.compression.both_ways
        forward, backward = (message_codec(name, config) for name in names)
        if backward is not None:
            backward = backward.for_gradients()
        for key, name, codec in zip(
            ("messages", "messages_backward"), names, (forward, backward), strict=True
        ):
            if codec is not None:
                _require_fewer(config, key, name, codec)
        exact = {config.model.num_blocks - 1}
        if config.pipeline.stage_layout == "v" and names != ("none", "none"):
            pp = config.parallel.pp
            exact |= {job.split[turn].start for turn in range(pp, len(job.split), pp)}
        return cls(forward, backward, frozenset(exact))

    def on(self, flow: int, first: int, *, training: bool = True) -> Codec | None:
        """Return the codec on the link into the stage that starts with block `first`; None: exact.

        Args:
            flow: 1 for activations, -1 for their gradients.
            first: First block of the stage.
            training: If False, the link is exact.
        """
        if first in self.exact or not training:
            return None
        return self.forward if flow > 0 else self.backward


def _require_fewer(config: Config, key: str, name: str, codec: Codec) -> None:
    """Check that a codec saves bytes.

    Raises:
        ConfigError: A codec saves no bytes of a token.
    """
    hidden = message_shape(config.model, 0)[-1]
    dtype = config.train.dtype
    plain = hidden * DTYPES[dtype].itemsize
    coded = codec.row_bytes(hidden)
    if coded >= plain:
        raise config_error(
            f"compression.{key}",
            name,
            f"would save nothing: it takes {coded} bytes per token, and the {hidden} features "
            f"(model.hidden_size) take {plain} bytes in {dtype}",
            "none",
        )


def through(codec: Codec | None, x: Tensor) -> Tensor:
    """Return `x` [b, s, h] as the receiver of a link gets it."""
    if codec is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    arrived = torch.empty_like(rows)
    codec.decode_(arrived, codec.encode(rows))
    return arrived.view(x.shape)
