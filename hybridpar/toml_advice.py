"""Explain what is wrong with a line of a TOML file, and how to write it instead."""

from __future__ import annotations

import re

_PLACE = re.compile(r" ?\(at line (\d+), column (\d+)\)$")
_PAIR = re.compile(r"^\s*(?P<key>[\w.\"'-]+)\s*(?P<sign>[=:])\s*(?P<value>.*?)\s*$")
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'"})
"""Typographic quotation marks, which word processors write, and TOML's."""
_LONGEST = 120
"""Upper bound of the characters of a line that is shown."""


def toml_advice(text: str, said: str) -> str:
    """Return the parser's message with the line that it is about, and a line that works if one is
    known.

    Args:
        text: The content of the file.
        said: The message of the parser.
    """
    place = _PLACE.search(said)
    lines = text.splitlines()
    if place is None or int(place[1]) > len(lines):
        return said
    number = int(place[1])
    rule = said[: place.start()]
    line = lines[number - 1].strip()
    if text.lstrip().startswith("{"):
        return (
            f"line {number}, column {place[2]}: this is JSON; write [section] on one line, "
            f"and key = value on the lines below"
        )
    if len(line) > _LONGEST:
        return f"line {number}, column {place[2]}: {rule}: {line[:_LONGEST]} .."
    works = _mended(line, rule)
    return f"line {number}, column {place[2]}: {rule}: {line}" + (f"; {works}" if works else "")


def _mended(line: str, rule: str) -> str:
    """Return what to write instead of a line; empty if that is unknown."""
    if "twice" in rule:
        return "the section appears twice; write all its keys below one heading"
    if "overwrite" in rule:
        return "the key appears twice; remove one of the two lines"
    if line.startswith("["):
        return f"try [{line.strip('[] ')}]" if line.count("[") != line.count("]") else ""
    if (plain := line.translate(_QUOTES)) != line:
        return f"try {plain}"
    pair = _PAIR.match(line)
    if pair is None:
        return "a line must be [section] or key = value"
    key = pair["key"]
    value = pair["value"]
    if not value:
        return f"{key} needs a value after =" if pair["sign"] == "=" else f"try [{key}]"
    if (found := _value(value)) is None:
        return f"{key} has no value; remove the line"
    if "\\" in value and value.startswith('"'):
        return f"try {key} = '{value.strip(chr(34))}'"
    return f"try {key} = {found}" if found != value or pair["sign"] == ":" else ""


def _value(text: str) -> str | None:
    """Return a value in TOML notation; None if it stands for the lack of one."""
    if text in ("None", "null", "nil"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower()
    if re.fullmatch(r"[+-]?\.\d+.*", text):
        return text.replace(".", "0.", 1)
    if re.fullmatch(r"[+-]?\d+\.", text):
        return f"{text}0"
    if re.fullmatch(r"\d+,\d+", text):
        return text.replace(",", ".")
    if re.fullmatch(r"0\d+", text):
        return text.lstrip("0") or "0"
    if text.startswith("(") and text.endswith(")"):
        return f"[{text[1:-1]}]"
    if re.fullmatch(r"[A-Za-z_./~][\w./~ -]*|\d+[A-Za-z][\w-]*", text):
        return f'"{text}"'
    return text
