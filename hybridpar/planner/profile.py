"""profile.json: times of each kind of block, and of messages, measured on a machine or estimated for one.

    blocks    embedding, layer, head (of other models: see memory.work.block_kinds); by tp degree and micro-batch
              size: forward, backward, optimizer, collectives
    links     `local` within a server, `network` between servers: seconds against bytes
    state     what moves a rank's state: updates on the host, copies to it, the file of a budget
    codecs    of messages between stages, by name: bytes a second

A stage's time is the sum over its blocks, that of a micro-batch size between two that were measured lies on the line
between them. Units: seconds, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

from hybridpar.checkpoint.files import write_text
from hybridpar.config import Config, Within, from_plain, to_mapping
from hybridpar.errors import ConfigError, DataError, Problem, config_error, shown
from hybridpar.memory.work import KINDS
from hybridpar.planner.links import Curve, MeasuredLink
from hybridpar.reading import errors_as, nearest_path, read_json

FORMAT = "hybridpar profile 3"
_BEARS: dict[str, tuple[str, ...]] = {
    "model": (), "parallel": ("sequence",), "kernels": (), "train": ("dtype",), "optim": ("name", "spec", "staleness"),
}
"""Keys of the configuration that decide how long blocks take, by section; (): the whole section."""
_QUIET = 0.9
"""Least share of the cores that ranks get where nothing else runs."""
_MAX_BYTES = 64 << 20
"""Bytes of a file that is read."""
Amount = Annotated[float, Within(0, 1e30)]
MaybeAmount = Annotated[float | None, Within(0, 1e30)]
Bytes = Annotated[int, Within(0, 10**30)]
Count = Annotated[int, Within(1, 10**6)]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost of one block and one micro-batch on one of `tp` ranks.

    forward, backward: computing, without collectives. forward_wait, backward_wait: what its collectives over tp take
    besides, where they were measured; forward_messages, backward_messages: the bytes of each. norm, update: of its
    parameters, once a batch. backward_input: the part of the backward pass that the stage before waits for; 0: not
    measured. remake: outputs of norms and activations, once more. kept: bytes between forward and backward.
    forward_idle, backward_idle: the parts of these that a device waits for launches of kernels, which CUDA graphs save;
    0: none, or not known.
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


_ESTIMATED = frozenset({"forward_idle", "backward_idle"})
"""What nothing measures: in a file it may be left out."""
_OF_GROUPS = ("reduce", "reduce_work", "gather", "gather_work", "scatter", "scatter_work")
"""Curves of a link by number of ranks."""
Key = tuple[str, int, int]
"""A kind of block, tp degree, micro-batch size."""


@dataclass(frozen=True)
class Hardware:
    """Hardware of a profile. cores: of each host, which its ranks share; 0: each rank has a device of its own.

    devices_per_host: how many processes a host is to have. memory: bytes of each device, or of a host's share for each.
    host_memory: bytes of a host's memory for each device that has its own; 0: not known.
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

    updated: parameters that the optimizer updates on the host, in a second. copied: bytes to the host or from it. read,
    written: bytes from and to the file of memory.budget. read_work, written_work: what a GiB of these takes of a rank
    that computes meanwhile, seconds of its own. gathered_work, summed_work: likewise, of weights and gradients that
    all ranks of the profile share (beside.py). None: not known, as 0 of these is little.
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
    """Bytes of numbers that a rank encodes and decodes in a second while all ranks of a host do; 0: not known.

    encoded, decoded: activations. gradients_encoded, gradients_decoded: their gradients. Of dct: with the messages_kept
    that the profile was made with.
    """

    encoded: Amount = 0.0
    decoded: Amount = 0.0
    gradients_encoded: Amount = 0.0
    gradients_decoded: Amount = 0.0


@dataclass(frozen=True)
class Profile:
    """Contents of profile.json. `settings`: the sections of the configuration that it depends on."""

    hardware: Hardware
    blocks: Mapping[Key, BlockCost]
    links: Mapping[str, MeasuredLink]
    settings: Mapping[str, Any]
    estimated: bool = False
    per_microbatch: float = 0.0
    """Time of a forward on every stage besides its blocks: the micro-batch is made, weights are bound."""
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
            raise config_error("parallel.tp", tp, f"the profile has tp degrees {known} only", known)
        if (kind, tp, sizes[0]) not in self.blocks:
            raise config_error("profile", kind, "is a kind of block that it does not have: the model has changed "
                               "since", "hybridpar profile, once more")
        if b in sizes:
            return self.blocks[kind, tp, b]
        if len(sizes) == 1:
            return _between(None, self.blocks[kind, tp, sizes[0]], b / sizes[0])
        above = next((i for i, size in enumerate(sizes) if size > b), len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
        return _between(self.blocks[kind, tp, low], self.blocks[kind, tp, high], (b - low) / (high - low))


def _between(low: BlockCost | None, high: BlockCost, share: float) -> BlockCost:
    """The cost so far from `low` (None: nothing) to `high`."""
    def at(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    times = {name: at(getattr(low, name, 0.0), getattr(high, name))
             for name in ("forward", "backward", "forward_wait", "backward_wait", "backward_input", "remake",
                          "forward_idle", "backward_idle")}
    messages = {name: tuple(round(at(a, b)) for a, b in zip(
                    getattr(low, name, repeat(0)), getattr(high, name), strict=low is not None))
                for name in ("forward_messages", "backward_messages")}
    kept = round(at(low.kept if low else 0, high.kept))
    return replace(low or high, **times, **messages, kept=kept)  # type: ignore[arg-type]


def settings_of(config: Config) -> dict[str, Any]:
    """The part of a configuration that a profile depends on."""
    plain = to_mapping(config)
    return {section: {k: v for k, v in plain[section].items() if not keys or k in keys}
            for section, keys in _BEARS.items()}


def check_settings(profile: Profile, config: Config) -> None:
    """Raises: ConfigError with everything in which `config` is not what was profiled."""
    problems, usual = [], settings_of(Config())  # of keys that are younger than the profile
    for section, table in settings_of(config).items():
        for key, value in table.items():
            before = profile.settings.get(section, {}).get(key, usual[section].get(key))
            if before != value and (key, before) != ("sequence", False):  # of which the rest follows: sequence.py
                rule = f"the profile was made with {before!r}"
                problems.append(Problem(f"{section}.{key}", value, rule, str(before)))
    if problems:
        raise ConfigError(*problems)


# -- the file ----------------------------------------------------------------------------------------------------------


def write_profile(profile: Profile, path: Path) -> None:
    """Writes profile.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, profile_json(profile))


def profile_json(profile: Profile) -> str:
    """The text of profile.json."""
    document = {
        "format": FORMAT, "estimated": profile.estimated, "about": dict(profile.about),
        "hardware": asdict(profile.hardware), "settings": profile.settings,
        "per_microbatch_s": profile.per_microbatch, "per_batch_s": profile.per_batch, "state": asdict(profile.state),
        "blocks": [{"kind": kind, "tp": tp, "micro_batch": b, **_plain(cost)}
                   for (kind, tp, b), cost in profile.blocks.items()],
        "links": {name: _plain_link(link) for name, link in profile.links.items()},
        "codecs": {name: asdict(speeds) for name, speeds in profile.codecs.items()}}
    return json.dumps(document, indent=1) + "\n"


def _plain(cost: BlockCost) -> dict[str, Any]:
    return {name: round(value, 9) if isinstance(value, float) else value for name, value in asdict(cost).items()}


def _plain_link(link: MeasuredLink) -> dict[str, Any]:
    def points(curve: Curve) -> list[list[float]]:
        return [[size, round(seconds, 9)] for size, seconds in curve.points]

    return {
        "call": round(link.call, 9), "there": round(link.there, 4),
        "send": points(link.send), "send_work": points(link.send_work),
        **{name: {str(n): points(curve) for n, curve in getattr(link, name).items()} for name in _OF_GROUPS}}


def read_profile(path: Path) -> Profile:
    """Reads what `write_profile` wrote.

    Raises: ConfigError if there is no such file; DataError, with the place, if it holds something else.
    """
    if not path.exists():
        works = nearest_path(path) or f"hybridpar profile CONFIG --output {path}"
        raise config_error("profile", str(path), "does not exist", works)
    with errors_as(DataError, path, "cannot be read"):
        document = read_json(path, _MAX_BYTES)
    with errors_as(DataError, path, "is not a profile as `hybridpar profile` writes it", TypeError, AssertionError):
        return _profile(document)


_Points = tuple[tuple[float, float], ...]
_ALLOWED = Within(0, 1e30)


@dataclass(frozen=True)
class _Link:
    """A MeasuredLink as it is written; collectives by number of ranks."""

    call: Amount
    send: Annotated[_Points, _ALLOWED]
    send_work: Annotated[_Points, _ALLOWED]
    reduce: Annotated[dict[int, _Points], _ALLOWED]
    reduce_work: Annotated[dict[int, _Points], _ALLOWED]
    gather: Annotated[dict[int, _Points], _ALLOWED]
    gather_work: Annotated[dict[int, _Points], _ALLOWED]
    scatter: Annotated[dict[int, _Points], _ALLOWED]
    scatter_work: Annotated[dict[int, _Points], _ALLOWED]
    there: Annotated[float, Within(above=0, below=2)] = 1.0


@dataclass(frozen=True, kw_only=True)
class _Block(BlockCost):
    """A BlockCost as it is written."""

    kind: str
    tp: Count
    micro_batch: Count


@dataclass(frozen=True)
class _Document:
    """profile.json as it is written."""

    format: str
    estimated: bool
    about: dict[str, Any]
    hardware: Hardware
    settings: dict[str, dict[str, Any]]
    per_microbatch_s: Amount
    per_batch_s: Amount
    state: StateSpeeds
    blocks: tuple[_Block, ...]
    links: dict[str, _Link]
    codecs: dict[str, CodecSpeeds] = field(default_factory=dict)


def _profile(document: Any) -> Profile:
    """Raises: ValueError, TypeError or AssertionError where the document is no profile."""
    if isinstance(document, dict) and (found := document.get("format")) != FORMAT:
        raise ValueError(f"format is {shown(found)}, not {FORMAT!r}: profile the machine again")
    read: _Document = from_plain(_Document, document, "profile")
    blocks: dict[Key, BlockCost] = {}
    for i, (row, given) in enumerate(zip(read.blocks, document["blocks"], strict=True)):
        values = {f.name: getattr(row, f.name) for f in fields(BlockCost)}
        if missing := values.keys() - given.keys() - _ESTIMATED:
            raise ValueError(f"profile.blocks[{i}]: {min(missing)!r} is missing")
        blocks[row.kind, row.tp, row.micro_batch] = BlockCost(**values)
    degrees = {(tp, b) for _, tp, b in blocks}
    kinds = dict.fromkeys(kind for kind, _, _ in blocks) if "spec" in read.settings.get("model", {}) else KINDS
    if not blocks or any((kind, tp, b) not in blocks for kind in kinds for tp, b in degrees):
        raise ValueError(f"blocks must have {', '.join(kinds)} at every tp degree and micro-batch size")
    calls = {(kind, tp, len(cost.forward_messages), len(cost.backward_messages))
             for (kind, tp, _), cost in blocks.items()}
    if len(calls) > len({key[:2] for key in calls}):
        raise ValueError("blocks of one kind and tp degree must have equally many messages at every micro-batch size")
    return Profile(read.hardware, blocks, {name: _link(name, link) for name, link in read.links.items()}, read.settings,
                   read.estimated, read.per_microbatch_s, read.per_batch_s, read.state, read.codecs, read.about)


def _link(name: str, link: _Link) -> MeasuredLink:
    curves = {of: {n: Curve(points) for n, points in getattr(link, of).items()} for of in _OF_GROUPS}
    if not link.reduce or min(n for of in curves.values() for n in (*of, 2)) < 2:
        raise ValueError(f"links.{name}.reduce must hold all-reduces over 2 ranks or more")
    return MeasuredLink(
        name, Curve(link.send), send_work=Curve(link.send_work), call=link.call, there=link.there, **curves)
