"""From the words of a command line to a command: which word belongs to which flag, and what it stands for.

A flag is `--name value`, `--name=value`, or `--name` alone where it is true or false; lists take the words up to the
next flag. Values are read by the rules that the TOML file has, and everything wrong with them is said at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridpar.cli.within import Within
from hybridpar.config import Config, from_mapping, from_words, load_toml
from hybridpar.config.toml import nearest_option
from hybridpar.config.words import BOOLEANS
from hybridpar.errors import ConfigError, HybridparError, Problem


class UsageError(HybridparError):
    """A word of the command line belongs nowhere, or one is missing."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a command takes."""

    command: type[Any]
    positional: dict[str, Any]
    """Type by field, in their order; a tuple takes all words that no flag takes."""
    own: dict[str, str]
    """Field by flag, for those that are not keys of the configuration."""
    kinds: dict[str, Any]
    """Type by flag: the command's own and every `section.key`."""
    ranges: dict[str, Within]
    """By flag, for its own."""

    @staticmethod
    def of(command: type[Any]) -> Signature:
        hints, kinds_of = typing.get_type_hints(command, include_extras=True), typing.get_type_hints(command)
        positional, own = {}, {}
        ranges: dict[str, Within] = {}
        for field in dataclasses.fields(command):
            notes = getattr(hints[field.name], "__metadata__", ())
            if "Positional" in map(str, notes):
                positional[field.name] = kinds_of[field.name]
            elif field.name != "config":
                flag = next((note.name for note in notes if getattr(note, "name", None)), field.name)
                own[flag] = field.name
                ranges.update((flag, note) for note in notes if isinstance(note, Within))
        kinds = {flag: kinds_of[field] for flag, field in own.items()}
        if "config" in kinds_of:
            for section, kind in typing.get_type_hints(Config).items():
                kinds |= {f"{section}.{key}": hint for key, hint in typing.get_type_hints(kind).items()}
        return Signature(command, positional, own, kinds, ranges)

    @property
    def takes_config(self) -> bool:
        return "config" in self.command.__dataclass_fields__

    @property
    def num_positional(self) -> float:
        variadic = any(typing.get_origin(kind) is tuple for kind in self.positional.values())
        return math.inf if variadic else len(self.positional)

    def usual(self, flag: str) -> str:
        """The default of a flag as it is written on a command line; empty if it has none."""
        section, _, key = flag.rpartition(".")
        value = (getattr(getattr(Config(), section), key) if section
                 else self.command.__dataclass_fields__[self.own[flag]].default)
        if value is None or value is dataclasses.MISSING:
            return ""
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return text.lower() if isinstance(value, bool) else text


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a command line says."""

    fields: dict[str, Any]
    document: dict[str, dict[str, Any]]
    """What comes over the configuration's file."""


def flag_of(word: str) -> str | None:
    """The name of the flag that a word is, without dashes and value; None: it is none."""
    match = re.match(r"--([A-Za-z][^=\s]*)(=|$)", word)
    return match[1].replace("-", "_") if match else None


def read_arguments(signature: Signature, args: Sequence[str]) -> Arguments:
    """Reads a command line whose flags are all known.

    Raises: UsageError; ConfigError with every value that does not fit.
    """
    for word in args:
        if re.search(r"[\x00\ud800-\udfff]", word):  # how Python shows bytes that are no text
            raise UsageError(f"{word!r} is not UTF-8 text")
    words, given = _share_out(signature, args)
    found, problems = Arguments({}, {}), []
    for flag, values in given.items():
        section, _, key = flag.rpartition(".")
        kind, text = signature.kinds[flag], " ".join(values)
        try:
            value = from_words(values, kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("must be finite")
        except ValueError as error:
            problems.append(Problem(flag, text, str(error), nearest_option(text, kind) or signature.usual(flag)))
            continue
        if section:
            found.document.setdefault(section, {})[key] = value
        else:
            found.fields[signature.own[flag]] = value
    if problems:
        raise ConfigError(*problems)
    if not words and signature.takes_config and "run" in given:
        words = [str(Path(given["run"][0], "config.toml"))]
    for flag, field in signature.own.items():
        if field not in found.fields and signature.command.__dataclass_fields__[field].default is dataclasses.MISSING:
            raise UsageError(f"--{flag} is missing")
    found.fields.update(_positional(signature, words))
    return found


def make_command(signature: Signature, arguments: Arguments) -> Any:
    """The command, with its configuration. Raises: ConfigError with every number that is out of its range, or for the
    configuration's file."""
    fields, problems = arguments.fields, []
    for flag, within in signature.ranges.items():
        if (field := signature.own[flag]) in fields and not within.holds(value := fields[field]):
            rule = f"must be at least {within.least} and at most {within.most}"
            shown = list(value) if isinstance(value, tuple) else value
            problems.append(Problem(flag, shown, rule, signature.usual(flag) or str(within.least)))
    if problems:
        raise ConfigError(*problems)
    if signature.takes_config:
        fields = fields | {"config": from_mapping(arguments.document, load_toml(fields["path"]))}
    return signature.command(**fields)


def _share_out(signature: Signature, args: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words that belong to no flag, and those of each flag; of a flag that is there twice, the last ones."""
    words, given, left = [], {}, list(args)
    while left:
        word = left.pop(0)
        if (flag := flag_of(word)) is None:
            words.append(word)
            continue
        kind = signature.kinds[flag]
        count = next((i for i, other in enumerate(left) if flag_of(other)), len(left))
        if "=" in word:
            count, given[flag] = 0, [word.partition("=")[2]]
        elif kind is bool:
            no_other_place = len(words) >= signature.num_positional
            count = min(count, 1) if no_other_place or (left and left[0].lower() in BOOLEANS) else 0
            given[flag] = left[:count] or ["true"]
        else:
            count = count if typing.get_origin(kind) is tuple else min(count, 1)
            given[flag] = left[:count]
        del left[:count]
    return words, given


def _positional(signature: Signature, words: Sequence[str]) -> dict[str, Any]:
    if signature.num_positional == math.inf:
        return {name: tuple(words) for name in signature.positional}
    names = list(signature.positional)
    if len(words) < len(names):
        raise UsageError("the first argument must be a configuration file" if signature.takes_config
                         else f"{names[len(words)]} is missing: the arguments are {', '.join(names)}")
    if len(words) > len(names):
        raise UsageError(f"{words[len(names)]!r} is one argument too many")
    return {name: kind(word) for (name, kind), word in zip(signature.positional.items(), words, strict=True)}
