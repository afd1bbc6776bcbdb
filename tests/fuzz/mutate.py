"""Random changes to valid files, made by a generator alone: the same numbers give the same file."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"{",
    b"[",
    b'"',
    b"}",
    b"\\ud800",
    b"1e999",
    b"-",
    b"NaN",
    b"../",
    b"\n",
    b"[[[[[[[[",
    b"9" * 30,
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"=",
    b"null",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
    -(2**63),
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "a",
    "\0",
    "\ud800",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "\x1b[2J",
    "x" * 300,
    "F32",
    "1",
    "-1",
    [],
    [0],
    [1, 2],
    [[]],
    {},
    {"a": 1},
    [1.5] * 40,
    "é" * 40,
    "." * 3,
)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """One to four changes: bits, bytes, pieces removed, doubled, moved or put in, the end cut
    off."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(changed) + 1)
        end = min(at + random.choice((1, 1, 2, 4, 8, 64)), len(changed))
        what = random.randrange(7)
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif what == 1 and at < len(changed):
            changed[at] = random.randrange(256)
        elif what == 2:
            del changed[at:end]
        elif what == 3:
            changed[at:at] = changed[at:end] * random.choice((1, 2, 50))
        elif what == 4:
            changed[at:at] = random.choice(BYTES)
        elif what == 5:
            changed[at:end] = random.choice(BYTES)
        else:
            del changed[at:]
    return bytes(changed)


def mutate_tree(tree: Any, random: Random) -> Any:
    """A tree of JSON values with one to three nodes replaced, removed, doubled, exchanged or nested
    deeper."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not isinstance(tree, dict | list) or not tree:
            return _value(random)
        holder, key = _place(tree, random)
        what = random.randrange(8)
        if what <= 2:
            holder[key] = _value(random)
        elif what == 3:
            holder[key] = _near(holder[key], random)
        elif what == 4:
            del holder[key]
        elif what == 5 and isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif what == 5:
            holder[random.choice(("a", "../x", "\0", f"{key}x", "9" * 25, str(key)[:-1]))] = holder[
                key
            ]
        elif what == 6:
            other, there = _place(tree, random)
            holder[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[key])
        else:
            for _ in range(random.choice((1, 3, 80))):
                holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}
    return tree


def _value(random: Random) -> Any:
    return copy.deepcopy(random.choice(VALUES))


def _place(tree: Any, random: Random) -> tuple[Any, Any]:
    """A container below `tree` and one of its keys, deep ones as likely as those at the top."""
    while True:
        key = random.choice(list(tree)) if isinstance(tree, dict) else random.randrange(len(tree))
        below = tree[key]
        if not isinstance(below, dict | list) or not below or random.random() < 0.2:
            return tree, key
        tree = below


def _near(value: Any, random: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return random.choice(
            (value - 1, value + 1, -value, value * 2, value * 10**9, str(value), 0.5)
        )
    if isinstance(value, float):
        return random.choice((-value, value * 1e300, 0.0, str(value)))
    if isinstance(value, str):
        return mutate_bytes(value.encode("utf-8", "replace"), random).decode("utf-8", "replace")
    return _value(random)


def mutate_json(
    data: bytes, random: Random, sign: Callable[[Any], Any] = lambda tree: tree
) -> bytes:
    """A JSON file as bytes or as a tree; `sign`: what has to be put right in a tree for a reader to
    look at it."""
    if random.random() < 0.3:
        return mutate_bytes(data, random)
    tree = mutate_tree(json.loads(data), random)
    text = json.dumps(sign(tree))
    if random.random() < 0.02:
        text = "[" * 100_000 + text
    return text.encode()


def mutate_lines(data: bytes, random: Random) -> bytes:
    """One line of a file of JSON lines, or bytes."""
    lines = data.splitlines()
    if random.random() < 0.3 or not lines:
        return mutate_bytes(data, random)
    at = random.randrange(len(lines))
    lines[at] = mutate_json(lines[at], random)
    return b"\n".join(lines) + b"\n"


def mutate_toml(data: bytes, random: Random) -> bytes:
    """A value of a line `key = value` replaced, lines doubled or moved, or bytes."""
    lines = data.decode().splitlines()
    if random.random() < 0.3:
        return mutate_bytes(data, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(lines))
        key, equals, value = lines[at].partition(" = ")
        what = random.randrange(6)
        if equals and what <= 2:
            lines[at] = f"{key} = {_toml(_value(random))}"
        elif equals and what == 3:
            lines[at] = (
                key + equals + mutate_bytes(value.encode(), random).decode("utf-8", "replace")
            )
        elif what == 4:
            lines.insert(random.randrange(len(lines)), lines[at])
        else:
            del lines[at]
            lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "replace")


def _toml(value: Any) -> str:
    if value is None:
        return "1979-05-27T07:32:00Z"
    if isinstance(value, int) and abs(value) > 10**300:
        return hex(value) if value > 0 else str(value)
    return (
        {float("inf"): "inf", float("-inf"): "-inf"}.get(value, "nan")
        if (isinstance(value, float) and not abs(value) < 1e308)
        else json.dumps(value).replace(":", " =")
    )


def mutate_index(data: bytes, random: Random) -> bytes:
    """A .idx file: a number of its header or of its arrays replaced, or bytes."""
    if random.random() < 0.3 or len(data) < 34:
        return mutate_bytes(data, random)
    changed = bytearray(data)
    sequences = struct.unpack_from("<Q", data, 18)[0]
    offsets = 34 + 4 * sequences
    place, form = random.choice(
        (
            (9, "<Q"),
            (17, "<B"),
            (18, "<Q"),
            (26, "<Q"),
            (34 + 4 * random.randrange(max(sequences, 1)), "<i"),
            (offsets + 8 * random.randrange(max((len(data) - offsets) // 8, 1)), "<q"),
        )
    )
    size = struct.calcsize(form)
    if place + size <= len(data):
        now = struct.unpack_from(form, data, place)[0]
        bits = 8 * size
        value = random.choice(
            (
                0,
                1,
                now + 1,
                now - 1,
                2 ** (bits - 1) - 1,
                2**bits - 1,
                2 ** (bits - 1),
                2**33,
                7,
                1000,
            )
        )
        changed[place : place + size] = (value % 2**bits).to_bytes(size, "little")
    return bytes(changed)


def mutate_tensors(data: bytes, random: Random) -> bytes:
    """A safetensors file: its header as a tree, the JSON texts in its metadata too, or bytes."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.25:
        return mutate_bytes(data, random)
    header = json.loads(data[8 : 8 + length])
    inner = [key for key, text in header.get("__metadata__", {}).items() if text.startswith("{")]
    if inner and random.random() < 0.5:
        key = random.choice(inner)
        header["__metadata__"][key] = json.dumps(
            mutate_tree(json.loads(header["__metadata__"][key]), random)
        )
    else:
        header = mutate_tree(header, random)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def mutate_names(files: dict[str, bytes], random: Random) -> dict[str, bytes]:
    """A set of files, one of which is missing, is doubled under another name, or has another's
    content."""
    changed = dict(files)
    name = random.choice(list(files))
    other = random.choice(list(files))
    what = random.randrange(4)
    if what == 0:
        del changed[name]
    elif what == 1:
        changed[name] = files[other]
    else:  # one part of its path
        parts = name.split("/")
        at = random.randrange(len(parts))
        digits = random.choice(("0", "00", "01", "9" * 3, "9" * 30, "\u0663\u0664", "", "00_007"))
        parts[at] = random.choice(
            (re.sub(r"\d+", digits, parts[at]),) * 4 + ("x", ".metadata", parts[at][:-1])
        )
        if what == 2:
            del changed[name]
        changed["/".join(parts)] = files[name]
    return changed
