"""Write and read profile.json, the file of a profile (profile.py)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from hybridpar.checkpoint.format.files import write_text
from hybridpar.config import Within, from_plain
from hybridpar.errors import DataError, config_error, shown
from hybridpar.planner.measuring.links import Curve, MeasuredLink
from hybridpar.planner.measuring.profile import (
    Amount,
    BlockCost,
    CodecSpeeds,
    Count,
    Hardware,
    Key,
    Profile,
    StateSpeeds,
)
from hybridpar.prediction.work import KINDS
from hybridpar.reading import errors_as, nearest_path, read_json

FORMAT = "hybridpar profile 3"
_MAX_BYTES = 64 << 20
"""Largest size in bytes of a file that is read."""
_OPTIONAL = frozenset({"forward_idle", "backward_idle", "forward_attention", "backward_attention"})
"""Fields that a file may omit: they are never measured, or not in every profile."""
_OF_GROUPS = ("reduce", "reduce_work", "gather", "gather_work", "scatter", "scatter_work")
"""Curves of a link by number of ranks."""


def write_profile(profile: Profile, path: Path) -> None:
    """Write profile.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, profile_json(profile))


def profile_json(profile: Profile) -> str:
    """Return the text of profile.json."""
    document = {
        "format": FORMAT,
        "estimated": profile.estimated,
        "about": dict(profile.about),
        "hardware": asdict(profile.hardware),
        "settings": profile.settings,
        "per_microbatch_s": profile.per_microbatch,
        "per_batch_s": profile.per_batch,
        "state": asdict(profile.state),
        "blocks": [
            {"kind": kind, "tp": tp, "micro_batch": b, **_plain(cost)}
            for (kind, tp, b), cost in profile.blocks.items()
        ],
        "links": {name: _plain_link(link) for name, link in profile.links.items()},
        "codecs": {name: asdict(speeds) for name, speeds in profile.codecs.items()},
    }
    return json.dumps(document, indent=1) + "\n"


def _plain(cost: BlockCost) -> dict[str, Any]:
    return {
        name: round(value, 9) if isinstance(value, float) else value
        for name, value in asdict(cost).items()
    }


def _plain_link(link: MeasuredLink) -> dict[str, Any]:
    def points(curve: Curve) -> list[list[float]]:
        return [[size, round(seconds, 9)] for size, seconds in curve.points]

    return {
        "call": round(link.call, 9),
        "there": round(link.there, 4),
        "send": points(link.send),
        "send_work": points(link.send_work),
        **{
            name: {str(n): points(curve) for n, curve in getattr(link, name).items()}
            for name in _OF_GROUPS
        },
    }


def read_profile(path: Path) -> Profile:
    """Read a file written by `write_profile`.

    Raises:
        ConfigError: There is no such file.
        DataError: Names the place where the file holds something else.
    """
    if not path.exists():
        works = nearest_path(path) or f"hybridpar profile CONFIG --output {path}"
        raise config_error("profile", str(path), "does not exist", works)
    again = f"; try hybridpar profile CONFIG.toml --output {path}"
    with errors_as(DataError, path, f"is not a profile as `hybridpar profile` writes it{again}"):
        document = read_json(path, _MAX_BYTES)
    with errors_as(
        DataError,
        path,
        "is not a profile as `hybridpar profile` writes it",
        TypeError,
        AssertionError,
    ):
        return _profile(document)


_Points = tuple[tuple[float, float], ...]
_ALLOWED = Within(0, 1e30)


@dataclass(frozen=True)
class _Link:
    """The file format of a MeasuredLink; collectives by number of ranks."""

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
    """The file format of a BlockCost."""

    kind: str
    tp: Count
    micro_batch: Count


@dataclass(frozen=True)
class _Document:
    """The file format of profile.json."""

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
    """Return the profile of a document.

    Raises:
        ValueError: The document is no profile. Also TypeError and AssertionError.
    """
    if isinstance(document, dict) and (found := document.get("format")) != FORMAT:
        raise ValueError(f"format is {shown(found)}, not {FORMAT!r}; run hybridpar profile again")
    read: _Document = from_plain(_Document, document, "profile")
    blocks: dict[Key, BlockCost] = {}
    for i, (row, given) in enumerate(zip(read.blocks, document["blocks"], strict=True)):
        values = {f.name: getattr(row, f.name) for f in fields(BlockCost)}
        if missing := values.keys() - given.keys() - _OPTIONAL:
            raise ValueError(f"profile.blocks[{i}]: {min(missing)!r} is missing")
        blocks[row.kind, row.tp, row.micro_batch] = BlockCost(**values)
    degrees = {(tp, b) for _, tp, b in blocks}
    kinds = dict.fromkeys(kind for kind, _, _ in blocks)
    if "spec" not in read.settings.get("model", {}):  # a GPT or BERT
        layers = [kind for kind in kinds if kind not in KINDS] or [KINDS[1]]
        kinds = dict.fromkeys((KINDS[0], *layers, *kinds, KINDS[2]))
    if not blocks or any((kind, tp, b) not in blocks for kind in kinds for tp, b in degrees):
        raise ValueError(
            f"blocks must have {', '.join(kinds)} at every tp degree and micro-batch size"
        )
    calls = {
        (kind, tp, len(cost.forward_messages), len(cost.backward_messages))
        for (kind, tp, _), cost in blocks.items()
    }
    if len(calls) > len({key[:2] for key in calls}):
        raise ValueError(
            "blocks of one kind and tp degree must have the same number of messages at every "
            "micro-batch size"
        )
    return Profile(
        read.hardware,
        blocks,
        {name: _link(name, link) for name, link in read.links.items()},
        read.settings,
        read.estimated,
        read.per_microbatch_s,
        read.per_batch_s,
        read.state,
        read.codecs,
        read.about,
    )


def _link(name: str, link: _Link) -> MeasuredLink:
    curves = {
        of: {n: Curve(points) for n, points in getattr(link, of).items()} for of in _OF_GROUPS
    }
    if not link.reduce or min(n for of in curves.values() for n in (*of, 2)) < 2:
        raise ValueError(f"links.{name}.reduce must hold all-reduces over 2 ranks or more")
    return MeasuredLink(
        name,
        Curve(link.send),
        send_work=Curve(link.send_work),
        call=link.call,
        there=link.there,
        **curves,
    )
