"""A profile: times of each kind of block, and of messages, measured on a machine or estimated for
one.

    blocks    embedding, layer, head (of other models: see prediction.work.block_kinds); by tp
              degree and micro-batch size: forward, backward, optimizer, collectives
    links     `local` within a server, `network` between servers: seconds against bytes
    state     what moves a rank's state: updates on the host, copies to it, the file of a budget
    codecs    of messages between stages, by name: bytes a second

A stage's time is the sum over its blocks, that of a micro-batch size between two that were measured
lies on the line between them. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Annotated, Any

from hybridpar.config import Config, Within, to_mapping
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.planner.measuring.links import MeasuredLink

_BEARS: dict[str, tuple[str, ...]] = {
    "model": (),
    "parallel": ("sequence",),
    "kernels": (),
    "train": ("dtype",),
    "optim": ("name", "spec", "staleness"),
}
"""Keys of the configuration that decide how long blocks take, by section; (): the whole section."""
_QUIET = 0.9
"""Least share of the cores that ranks get where nothing else runs."""
Amount = Annotated[float, Within(0, 1e30)]
MaybeAmount = Annotated[float | None, Within(0, 1e30)]
Bytes = Annotated[int, Within(0, 10**30)]
Count = Annotated[int, Within(1, 10**6)]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost of one block and one micro-batch on one of `tp` ranks.

    forward, backward: computing, without collectives. forward_wait, backward_wait: what its
    collectives over tp take besides, where they were measured; forward_messages, backward_messages:
    the bytes of each. norm, update: of its parameters, once a batch. backward_input: the part of
    the backward pass that the stage before waits for; 0: not measured. remake: outputs of norms and
    activations, once more. kept: bytes between forward and backward. forward_idle, backward_idle:
    the parts of these that a device waits for launches of kernels, which CUDA graphs save; 0: none,
    or not known.
    """

    forward: Amount
    backward: Amount
    norm: Amount
    update: Amount
    forward_wait: Amount = 0.0
    backward_wait: Amount = 0.0
    forward_messages: Annotated[tuple[int, ...], Within(0, 10**30)] = ()
    backward_messages: Annotated[tuple[int, ...], Within(0, 10**30)] = ()
    backward_input: Amount = 0.0
    remake: Amount = 0.0
    parameters: Bytes = 0
    kept: Bytes = 0
    forward_idle: Amount = 0.0
    backward_idle: Amount = 0.0


Key = tuple[str, int, int]
"""A kind of block, tp degree, micro-batch size."""


@dataclass(frozen=True)
class Hardware:
    """Hardware of a profile. cores: of each host, which its ranks share; 0: each rank has a device
    of its own.

    devices_per_host: how many processes a host is to have. memory: bytes of each device, or of a
    host's share for each. host_memory: bytes of a host's memory for each device that has its own;
    0: not known.
    """

    name: str
    devices_per_host: Count
    memory: Annotated[float, Within(above=0, most=1e30)]
    cores: Annotated[int, Within(0, 10**6)] = 0
    threads: Count = 1
    hosts: Count = 1
    host_memory: Amount = 0.0
    efficiency: Annotated[float, Within(above=0, most=1e30)] = 1.0
    """Share of the cores that ranks get when all of them compute."""

    @property
    def taken(self) -> float:
        """Share of the cores that other programs took while this was measured."""
        return max(0.0, 1 - self.efficiency)

    @property
    def was_quiet(self) -> bool:
        """Whether what was measured may be trusted, and kept."""
        return self.efficiency >= _QUIET

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return "cpu" if self.cores else "cuda"


@dataclass(frozen=True, slots=True)
class StateSpeeds:
    """Speeds of a rank while all ranks of a host do the same; 0: not known.

    updated: parameters that the optimizer updates on the host, in a second. copied: bytes to the
    host or from it. read, written: bytes from and to the file of memory.budget. read_work,
    written_work: what a GiB of these takes of a rank that computes meanwhile, seconds of its own.
    gathered_work, summed_work: likewise, of weights and gradients that all ranks of the profile
    share (beside.py). None: not known, as 0 of these is little.
    """

    updated: Amount = 0.0
    copied: Amount = 0.0
    read: Amount = 0.0
    written: Amount = 0.0
    read_work: MaybeAmount = None
    written_work: MaybeAmount = None
    gathered_work: MaybeAmount = None
    summed_work: MaybeAmount = None


@dataclass(frozen=True, slots=True)
class CodecSpeeds:
    """Bytes of numbers that a rank encodes and decodes in a second while all ranks of a host do; 0:
    not known.

    encoded, decoded: activations. gradients_encoded, gradients_decoded: their gradients. Of dct:
    with the messages_kept that the profile was made with.
    """

    encoded: Amount = 0.0
    decoded: Amount = 0.0
    gradients_encoded: Amount = 0.0
    gradients_decoded: Amount = 0.0


@dataclass(frozen=True)
class Profile:
    """Times of a machine. `settings`: the sections of the configuration that they depend on."""

    hardware: Hardware
    blocks: Mapping[Key, BlockCost]
    links: Mapping[str, MeasuredLink]
    settings: Mapping[str, Any]
    estimated: bool = False
    per_microbatch: float = 0.0
    """Time of a forward on every stage besides its blocks: the micro-batch is made, weights are
    bound."""
    per_batch: float = 0.0
    state: StateSpeeds = StateSpeeds()
    codecs: Mapping[str, CodecSpeeds] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """Date, commit, versions."""

    @property
    def tp_degrees(self) -> list[int]:
        return sorted({tp for _, tp, _ in self.blocks})

    def micro_batches(self, tp: int) -> list[int]:
        """The sizes that were measured at this degree."""
        return sorted({b for _, t, b in self.blocks if t == tp})

    def block(self, kind: str, tp: int, b: int) -> BlockCost:
        """Measured, or on the line through the two nearest sizes.

        Raises: ConfigError if nothing was measured at this tp degree.
        """
        if not (sizes := self.micro_batches(tp)):
            known = ", ".join(map(str, self.tp_degrees))
            raise config_error(
                "parallel.tp", tp, f"the profile has only the tp degrees {known}", known
            )
        if (kind, tp, sizes[0]) not in self.blocks:
            raise config_error(
                "profile",
                kind,
                "the profile does not have this kind of block: the model has changed since it "
                "was made",
                "running hybridpar profile again",
            )
        if b in sizes:
            return self.blocks[kind, tp, b]
        if len(sizes) == 1:
            return _between(None, self.blocks[kind, tp, sizes[0]], b / sizes[0])
        above = next((i for i, size in enumerate(sizes) if size > b), len(sizes) - 1)
        low = sizes[max(above - 1, 0)]
        high = sizes[max(above, 1)]
        return _between(
            self.blocks[kind, tp, low], self.blocks[kind, tp, high], (b - low) / (high - low)
        )


def _between(low: BlockCost | None, high: BlockCost, share: float) -> BlockCost:
    """The cost so far from `low` (None: nothing) to `high`."""

    def at(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    times = {
        name: at(getattr(low, name, 0.0), getattr(high, name))
        for name in (
            "forward",
            "backward",
            "forward_wait",
            "backward_wait",
            "backward_input",
            "remake",
            "forward_idle",
            "backward_idle",
        )
    }
    messages = {
        name: tuple(
            round(at(a, b))
            for a, b in zip(
                getattr(low, name, repeat(0)), getattr(high, name), strict=low is not None
            )
        )
        for name in ("forward_messages", "backward_messages")
    }
    kept = round(at(low.kept if low else 0, high.kept))
    return replace(low or high, **times, **messages, kept=kept)  # type: ignore[arg-type]


def settings_of(config: Config) -> dict[str, Any]:
    """The part of a configuration that a profile depends on."""
    plain = to_mapping(config)
    return {
        section: {k: v for k, v in plain[section].items() if not keys or k in keys}
        for section, keys in _BEARS.items()
    }


def check_settings(profile: Profile, config: Config) -> None:
    """Raises: ConfigError with everything in which `config` is not what was profiled."""
    # of keys that are younger than the profile
    problems = []
    usual = settings_of(Config())
    for section, table in settings_of(config).items():
        for key, value in table.items():
            before = profile.settings.get(section, {}).get(key, usual[section].get(key))
            if before != value and (key, before) != (
                "sequence",
                False,
            ):  # of which the rest follows: sequence.py
                rule = f"does not match the profile, which was made with {before!r}"
                problems.append(Problem(f"{section}.{key}", value, rule, str(before)))
    if problems:
        raise ConfigError(*problems)
