"""Cost of codecs for activations and gradients between stages: measured on all ranks of a job at
the same time, and by stage.

A tp rank encodes its slice of an activation and decodes all of it. A codec that sends only the
gradients of transmitted features (`Codec.follows`) decodes only the rank's slice. A stage with full
recomputation decodes its input twice.

Units: seconds, bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import fmean, median

import torch

from hybridpar.comm import barrier, gather_objects
from hybridpar.config import Config, message_shape
from hybridpar.config.compression_methods import MESSAGES
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.models.custom_blocks import context_of
from hybridpar.planner.measuring.profile import CodecSpeeds, Profile
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.runtime.codecs import Codecs
from hybridpar.state.compression.codec import Codec

_ROUNDS = 5


def measure_codecs(config: Config, world: Axis) -> dict[str, CodecSpeeds]:
    """Return the codec speeds by name in compression.messages, as means over the ranks.

    Codecs that save nothing are left out. `config` says which share dct keeps.

    Collectives: on all ranks of the job.
    """
    found = {}
    *each, features = message_shape(config.model, 0)
    rows = min(config.train.micro_batch_size * prod(each), 2048)
    x = torch.randn((rows, features), generator=torch.Generator().manual_seed(0))
    x = x.to(DTYPES[config.train.dtype])
    for name in MESSAGES:
        settings = replace(config.compression, messages=name, messages_backward="same")
        try:
            codecs = Codecs.of(JobPlan(replace(config, compression=settings)))
        except ConfigError:
            continue
        if codecs.forward is not None and codecs.backward is not None:
            barrier(world)
            everyone = gather_objects(_speeds(codecs.forward, codecs.backward, x), world)
            found[name] = CodecSpeeds(*(fmean(speeds) for speeds in zip(*everyone, strict=True)))
    return found


def _speeds(forward: Codec, backward: Codec, x: torch.Tensor) -> tuple[float, float, float, float]:
    """Return the bytes of numbers encoded and decoded per second, for activations and for
    gradients."""
    message = forward.encode(x)
    out = torch.empty_like(x)
    if backward.follows:
        backward = backward.at(forward.places(message, x.shape[1]))
    back = backward.encode(x)
    return (
        _speed(lambda: forward.encode(x), x.nbytes),
        _speed(lambda: forward.decode_(out, message), x.nbytes),
        _speed(lambda: backward.encode(x), x.nbytes),
        _speed(lambda: backward.decode_(out, back), x.nbytes),
    )


def _speed(call: Callable[[], object], num_bytes: int) -> float:
    """Return bytes per second, from the median of a few calls."""
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return num_bytes / max(median(times[1:]), 1e-9)


class CodecCosts:
    """Bytes and times of the activations and gradients between stages of a job.

    A link is named by the first block of the stage after it. `flow` is 1 for activations and -1 for
    their gradients. If a profile has no speeds of a codec (an estimated one has none), the codec
    counts as free.
    """

    def __init__(self, job: JobPlan, profile: Profile):
        config = job.config
        *rows, self._hidden = message_shape(config.model, 0)
        self._codecs = Codecs.of(job)
        self._tp = config.parallel.tp
        self.exact = self._codecs.exact
        """First blocks after links that have no codec."""
        self._sliced = not config.parallel.sequence
        self._item = DTYPES[config.train.dtype].itemsize
        self._num_blocks = config.model.num_blocks
        if config.parallel.cp > 1:
            rows[0] = max(context_of(config.model, silent_axis("cp", config.parallel.cp)).sizes)
        self._rows = config.train.micro_batch_size * prod(rows)
        self._speeds = [
            profile.codecs.get(name, CodecSpeeds()) for name in config.compression.both_ways
        ]

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation."""
        return self._rows * self._hidden * self._item

    def wire_bytes(self, flow: int, first: int) -> int:
        """Return the bytes of an activation or a gradient on a link, from all tp ranks together."""
        codec = self._codecs.on(flow, first)
        return self.message_bytes if codec is None else self._rows * codec.row_bytes(self._hidden)

    def gathered_bytes(self, flow: int, first: int) -> int:
        """Return the bytes of a message in the form in which tp ranks gather it."""
        codec = self._codecs.on(flow, first)
        follows = codec is not None and codec.follows
        return self.message_bytes if follows else self.wire_bytes(flow, first)

    def times(self, blocks: Sequence[int], decodes_again: bool) -> tuple[float, float]:
        """Return the seconds of encoding and decoding in a forward and in a backward of the stage
        of `blocks`.

        Args:
            blocks: Numbers of the stage's blocks.
            decodes_again: Whether the stage is fully recomputed, which decodes its input again.
        """
        first = blocks[0]
        last = blocks[-1]
        forward = 0.0
        backward = 0.0
        if first:
            forward += (decoded := self._decoded(1, first))
            backward += self._encoded(-1, first) + decodes_again * decoded
        if last + 1 < self._num_blocks:
            forward += self._encoded(1, last + 1)
            backward += self._decoded(-1, last + 1)
        return forward, backward

    def _encoded(self, flow: int, first: int) -> float:
        """Return the seconds of encoding one message, of which a rank has a slice."""
        if self._codecs.on(flow, first) is None:
            return 0.0
        speeds = self._speeds[flow < 0]
        return _seconds(
            self.message_bytes / self._tp, speeds.encoded if flow > 0 else speeds.gradients_encoded
        )

    def _decoded(self, flow: int, first: int) -> float:
        codec = self._codecs.on(flow, first)
        if codec is None:
            return 0.0
        speeds = self._speeds[flow < 0]
        is_whole = self._sliced and not codec.follows
        speed = speeds.decoded if flow > 0 else speeds.gradients_decoded
        return _seconds(self.message_bytes / (1 if is_whole else self._tp), speed)


def _seconds(num_bytes: float, speed: float) -> float:
    """Return the seconds, or 0 if the speed is unknown."""
    return num_bytes / speed if speed else 0.0
