"""profile.json: what each kind of block, and messages, take: measured on a machine, or estimated for one.

    blocks    embedding, layer, head; by tp degree and micro-batch size: forward, backward, optimizer, collectives
    links     `local` within a server, `network` between servers: seconds against bytes

A stage's time is the sum over its blocks, that of a micro-batch size between two that were measured lies on the line
between them. Units: seconds, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridpar.checkpoint.files import write_text
from hybridpar.config import Config, to_mapping
from hybridpar.errors import ConfigError, DataError, Problem, config_error, shown
from hybridpar.planner.links import Curve, MeasuredLink
from hybridpar.reading import nearest_path, read_limited, reason

FORMAT = "hybridpar profile 1"
KINDS = ("embedding", "layer", "head")
_BEARS: dict[str, tuple[str, ...]] = {
    "model": (), "kernels": (), "train": ("dtype",), "optim": ("name", "staleness"),
}
"""What of a configuration blocks take their time by; (): the whole section."""
_QUIET = 0.9
"""Share of the cores that ranks get where nothing else runs, at least."""
_MOST, _LARGEST, _MAX_BYTES = 10**6, 1e30, 64 << 20
"""Of a count, and of a number, in a file that can be read; bytes of such a file."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block and one micro-batch on one of `tp` ranks.

    forward, backward: computing, without collectives. forward_wait, backward_wait: what its collectives over tp take
    besides, where they were measured; forward_messages, backward_messages: the bytes of each. norm, update: of its
    parameters, once a batch. backward_input: the part of the backward pass that the stage before waits for; 0: not
    measured. kept: bytes between forward and backward.
    """

    forward: float
    backward: float
    norm: float
    update: float
    forward_wait: float = 0.0
    backward_wait: float = 0.0
    forward_messages: tuple[int, ...] = ()
    backward_messages: tuple[int, ...] = ()
    backward_input: float = 0.0
    parameters: int = 0
    kept: int = 0


Key = tuple[str, int, int]
"""A kind of block, tp degree, micro-batch size."""


@dataclass(frozen=True)
class Hardware:
    """Where it was measured. cores: of each host, which its ranks share; 0: each rank has a device of its own.

    devices_per_host: how many processes a host is to have. memory: bytes of each device, or of a host's share for each.
    host_memory: bytes of a host's memory for each device that has its own; 0: not known.
    """

    name: str
    devices_per_host: int
    memory: float
    cores: int = 0
    threads: int = 1
    hosts: int = 1
    host_memory: float = 0.0
    efficiency: float = 1.0
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


@dataclass(frozen=True)
class Profile:
    """What profile.json holds. `settings`: the sections of the configuration that it depends on."""

    hardware: Hardware
    blocks: Mapping[Key, BlockCost]
    links: Mapping[str, MeasuredLink]
    settings: Mapping[str, Any]
    estimated: bool = False
    per_microbatch: float = 0.0
    """What a forward takes on every stage besides its blocks: the micro-batch is made, weights are bound."""
    per_batch: float = 0.0
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
        sizes = self.micro_batches(tp)
        if not sizes:
            known = ", ".join(map(str, self.tp_degrees))
            raise config_error("parallel.tp", tp, f"the profile has tp degrees {known} only", known)
        if b in sizes:
            return self.blocks[kind, tp, b]
        if len(sizes) == 1:
            return _between(self.blocks[kind, tp, sizes[0]], self.blocks[kind, tp, sizes[0]], b / sizes[0])
        above = next((i for i, size in enumerate(sizes) if size > b), len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
        return _between(self.blocks[kind, tp, low], self.blocks[kind, tp, high], None, (b - low) / (high - low))


_PER_MICROBATCH = ("forward", "backward", "forward_wait", "backward_wait", "backward_input", "kept")


def _between(low: BlockCost, high: BlockCost, scale: float | None, share: float = 0.0) -> BlockCost:
    """`low` times `scale`, or so far from `low` to `high`."""
    def at(a: float, b: float) -> float:
        return a * scale if scale is not None else max(0.0, a + share * (b - a))

    values = {name: at(getattr(low, name), getattr(high, name)) for name in _PER_MICROBATCH}
    messages = {
        name: tuple(round(at(a, b)) for a, b in zip(getattr(low, name), getattr(high, name), strict=True))
        for name in ("forward_messages", "backward_messages")}
    return BlockCost(norm=low.norm, update=low.update, parameters=low.parameters,
                     **{**values, "kept": round(values["kept"])}, **messages)  # type: ignore[arg-type]


def settings_of(config: Config) -> dict[str, Any]:
    """What a profile of this configuration depends on."""
    plain = to_mapping(config)
    return {section: {k: v for k, v in plain[section].items() if not keys or k in keys}
            for section, keys in _BEARS.items()}


def check_settings(profile: Profile, config: Config) -> None:
    """Raises: ConfigError with everything in which `config` is not what was profiled."""
    problems, usual = [], settings_of(Config())  # of keys that are younger than the profile
    for section, table in settings_of(config).items():
        for key, value in table.items():
            before = profile.settings.get(section, {}).get(key, usual[section][key])
            if before != value:
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
    """What profile.json holds."""
    document = {
        "format": FORMAT, "estimated": profile.estimated, "about": dict(profile.about),
        "hardware": asdict(profile.hardware), "settings": profile.settings,
        "per_microbatch_s": profile.per_microbatch, "per_batch_s": profile.per_batch,
        "blocks": [{"kind": kind, "tp": tp, "micro_batch": b, **_plain(cost)}
                   for (kind, tp, b), cost in profile.blocks.items()],
        "links": {name: _plain_link(link) for name, link in profile.links.items()},
    }
    return json.dumps(document, indent=1) + "\n"


def _plain(cost: BlockCost) -> dict[str, Any]:
    return {name: round(value, 9) if isinstance(value, float) else value for name, value in asdict(cost).items()}


def _plain_link(link: MeasuredLink) -> dict[str, Any]:
    def points(curve: Curve) -> list[list[float]]:
        return [[size, round(seconds, 9)] for size, seconds in curve.points]

    return {
        "call": round(link.call, 9), "send": points(link.send), "send_work": points(link.send_work),
        "reduce": {str(n): points(curve) for n, curve in link.reduce.items()},
        "reduce_work": {str(n): points(curve) for n, curve in link.reduce_work.items()}}


def read_profile(path: Path) -> Profile:
    """Reads what `write_profile` wrote.

    Raises: ConfigError if there is no such file; DataError, with the place, if it holds something else.
    """
    try:
        document = json.loads(read_limited(path, _MAX_BYTES))
    except FileNotFoundError:
        works = nearest_path(path) or f"hybridpar profile CONFIG --out {path}"
        raise config_error("profile", str(path), "does not exist", works) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)})") from None
    try:
        return _profile(document)
    except _Wrong as error:
        raise DataError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError, IndexError, OverflowError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: is not a profile as `hybridpar profile` writes it: {what}") from None


class _Wrong(Exception):
    """A value that a profile cannot have."""


def _profile(document: Mapping[str, Any]) -> Profile:
    if not isinstance(document, dict):
        raise _Wrong("is not an object")
    if (found := document.get("format")) != FORMAT:
        raise _Wrong(f"format is {shown(found)}, not {FORMAT!r}: profile the machine again")
    blocks = {_key(row): _block(row) for row in document["blocks"]}
    degrees = {(tp, b) for _, tp, b in blocks}
    if not blocks or any((kind, tp, b) not in blocks for kind in KINDS for tp, b in degrees):
        raise _Wrong(f"blocks must have {', '.join(KINDS)} at every tp degree and micro-batch size")
    calls = {(kind, tp, len(cost.forward_messages), len(cost.backward_messages))
             for (kind, tp, _), cost in blocks.items()}
    if len(calls) > len({key[:2] for key in calls}):
        raise _Wrong("blocks of one kind and tp degree must have equally many messages at every micro-batch size")
    settings = document["settings"]
    if not isinstance(settings, dict) or not all(isinstance(section, dict) for section in settings.values()):
        raise _Wrong("settings must hold the sections of a configuration")
    return Profile(
        _hardware(document["hardware"]), blocks, {name: _link(name, row) for name, row in document["links"].items()},
        settings, bool(document["estimated"]), _positive("per_microbatch_s", document["per_microbatch_s"]),
        _positive("per_batch_s", document["per_batch_s"]), document["about"])


def _hardware(row: Mapping[str, Any]) -> Hardware:
    hardware = Hardware(**row)
    if not isinstance(hardware.name, str):
        raise _Wrong(f"hardware.name is {hardware.name!r}, which is no name")
    for name, least in (("devices_per_host", 1), ("hosts", 1), ("threads", 1), ("cores", 0)):
        _count(f"hardware.{name}", getattr(hardware, name), least)
    _positive("hardware.host_memory", hardware.host_memory)
    for name in ("memory", "efficiency"):
        if not _positive(f"hardware.{name}", getattr(hardware, name)):
            raise _Wrong(f"hardware.{name} is 0, it must be positive")
    return hardware


def _key(row: Mapping[str, Any]) -> Key:
    return str(row["kind"]), _count("blocks: tp", row["tp"], 1), _count("blocks: micro_batch", row["micro_batch"], 1)


def _count(where: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise _Wrong(f"{where} is {shown(value)}, which must be an integer of {least} to {_MOST}")
    return value


def _positive(where: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise _Wrong(f"{where} is {shown(value)}, which must be a number of 0 or more")
    return value


def _block(row: Mapping[str, Any]) -> BlockCost:
    values: dict[str, Any] = {}
    where = f"blocks: {row['kind']} tp={row['tp']} micro_batch={row['micro_batch']}"
    for name in (f.name for f in fields(BlockCost)):
        value = row[name]
        if name.endswith("_messages"):
            if not isinstance(value, list):
                raise _Wrong(f"{where}: {name} is {shown(value)}, which must be a list")
            values[name] = tuple(_positive(f"{where}: {name}", v) for v in value)
        else:
            values[name] = _positive(f"{where}: {name}", value)
    return BlockCost(**values)


def _link(name: str, row: Mapping[str, Any]) -> MeasuredLink:
    def curve(key: str, points: Any) -> Curve:
        where = f"links.{name}.{key}"
        return Curve(tuple((_positive(where, x), _positive(where, y)) for x, y in points))

    curves = {
        key: {_count(f"links.{name}.{key}", int(n), 2): curve(key, points) for n, points in row[key].items()}
        for key in ("reduce", "reduce_work")}
    if not curves["reduce"]:
        raise _Wrong(f"links.{name}.reduce must hold an all-reduce over 2 ranks or more")
    return MeasuredLink(name, curve("send", row["send"]), curves["reduce"], curve("send_work", row["send_work"]),
                        curves["reduce_work"], _positive(f"links.{name}.call", row["call"]))
