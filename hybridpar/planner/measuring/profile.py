"""A profile: times of each kind of block and of messages, measured on a machine or estimated for
one.

blocks    embedding, layer, head (of other models: see prediction.work.block_kinds); by tp
          degree and micro-batch size: forward, backward, optimizer, collectives
links     `local` within a server, `network` between servers: seconds by bytes
state     transfers of a rank's state: updates on the host, copies to it, the file of a budget
codecs    of activations and gradients between stages, by name: bytes per second

A stage's time is the sum over its blocks. A micro-batch size between two measured ones is
interpolated linearly. Units: seconds, bytes.
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
"""Keys of the configuration that decide how long blocks take, by section; (): the full section."""
_QUIET = 0.9
"""Smallest share of the cores that ranks get if nothing else runs."""
Amount = Annotated[float, Within(0, 1e30)]
MaybeAmount = Annotated[float | None, Within(0, 1e30)]
Bytes = Annotated[int, Within(0, 10**30)]
Count = Annotated[int, Within(1, 10**6)]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost of one block and one micro-batch on one of `tp` ranks.

    Args:
        forward: Computing time, without collectives.
        backward: Computing time, without collectives.
        forward_wait: Additional time of the forward's collectives over tp, where measured.
        backward_wait: The same for the backward.
        forward_messages: Bytes of each collective of the forward.
        backward_messages: Bytes of each collective of the backward.
        norm: Seconds of the gradient norm of its parameters, once per batch.
        update: Seconds of the update of its parameters, once per batch.
        backward_input: Part of the backward that the previous stage waits for; 0 if not measured.
        remake: Seconds of recomputing the outputs of norms and activation functions.
        kept: Bytes between forward and backward.
        forward_idle: Part of the forward in which the device waits for kernel launches, which CUDA
            graphs save; 0 if none or unknown.
        backward_idle: The same part of the backward.
        forward_attention: Part of the forward that is in proportion to the pairs of a query and a
            visible key; 0 if not measured.
        backward_attention: The same part of the backward.
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
    forward_attention: Amount = 0.0
    backward_attention: Amount = 0.0


Key = tuple[str, int, int]
"""Kind of block, tp degree, micro-batch size."""


@dataclass(frozen=True)
class Hardware:
    """Hardware of a profile.

    Args:
        cores: Cores of each host, which its ranks share; 0: each rank has its own device.
        devices_per_host: Number of processes that a host is meant to run.
        memory: Bytes of each device, or of the share of host memory for each process.
        host_memory: Bytes of host memory for each separate device; 0 if unknown.
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
        """Share of the cores that other programs took during the measurement."""
        return max(0.0, 1 - self.efficiency)

    @property
    def was_quiet(self) -> bool:
        """Whether the measurement was undisturbed, so that it may be trusted and cached."""
        return self.efficiency >= _QUIET

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return "cpu" if self.cores else "cuda"


@dataclass(frozen=True, slots=True)
class StateSpeeds:
    """Speeds of a rank while all ranks of a host do the same; 0 if unknown.

    Args:
        updated: Parameters that the host optimizer updates per second.
        copied: Bytes per second to the host or from it.
        read: Bytes per second from the file of memory.budget.
        written: Bytes per second to the file of memory.budget.
        read_work: Seconds that reading a GiB takes from a rank that computes at the same time.
        written_work: The same for writing.
        gathered_work: The same for gathering weights over all ranks of the profile
            (overlap_bench.py).
        summed_work: The same for reducing gradients.

    The `.._work` values are None if unknown, because a value of 0 is plausible.
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
    """Bytes of numbers that a rank encodes and decodes per second while all ranks of a host do; 0
    if unknown.

    `encoded` and `decoded` are for activations, `gradients_encoded` and `gradients_decoded` for
    gradients. dct was measured with the messages_kept of the profile's configuration.
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
    """Time of a forward on every stage in addition to its blocks: creating the micro-batch and
    binding weights."""
    per_batch: float = 0.0
    state: StateSpeeds = StateSpeeds()
    codecs: Mapping[str, CodecSpeeds] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """Date, commit, versions."""

    @property
    def tp_degrees(self) -> list[int]:
        return sorted({tp for _, tp, _ in self.blocks})

    def micro_batches(self, tp: int) -> list[int]:
        """Return the micro-batch sizes that were measured at this degree."""
        return sorted({b for _, t, b in self.blocks if t == tp})

    def block(self, kind: str, tp: int, b: int) -> BlockCost:
        """Return the measured cost of a block, or an interpolation between the two nearest
        micro-batch sizes.

        Raises:
            ConfigError: Nothing was measured at this tp degree.
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
    """Return the cost at `share` of the way from `low` (None: zero) to `high`."""

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
            "forward_attention",
            "backward_attention",
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
    """Return the part of a configuration that a profile depends on."""
    plain = to_mapping(config)
    return {
        section: {k: v for k, v in plain[section].items() if not keys or k in keys}
        for section, keys in _BEARS.items()
    }


def check_settings(profile: Profile, config: Config) -> None:
    """Check that `config` matches the profiled settings.

    Raises:
        ConfigError: Lists every difference.
    """
    # keys newer than the profile have their defaults
    problems = []
    usual = settings_of(Config())
    for section, table in settings_of(config).items():
        for key, value in table.items():
            before = profile.settings.get(section, {}).get(key, usual[section].get(key))
            if before != value and (key, before) != (
                "sequence",
                False,
            ):  # sequence.py derives the times with sequence parallelism
                rule = f"does not match the profile, which was made with {before!r}"
                problems.append(Problem(f"{section}.{key}", value, rule, str(before)))
    if problems:
        raise ConfigError(*problems)
