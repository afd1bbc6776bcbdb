"""Check the words of a command line before tyro parses them, and report unusable words in one
message that says what works."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shlex
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.config import Config
from hybridpar.config.names import as_list, meant
from hybridpar.config.typed import Size, entries_of, hints_of, parse_size

_FLAG = re.compile(r"-+[A-Za-z]|--$")
"""Pattern of a word that is taken for a flag; -1 and -inf are numbers."""
_TRUE = ("yes", "y", "on", "1", "true")
_FALSE = ("no", "n", "off", "0", "false")


@dataclass(frozen=True)
class Argument:
    """A flag or a positional argument of a command.

    Args:
        name: The name, with the dashes of a flag.
        kind: The type.
        usual: The default value.
        required: Whether the command line must give it.
        most: Largest number of words that it takes; None for no limit.
        is_size: Its value is a number of bytes, or a size with a unit.
    """

    name: str
    kind: Any
    usual: Any
    required: bool
    most: int | None
    is_size: bool = False

    @property
    def entry(self) -> Any:
        """The type of one word."""
        inner = typing.get_args(self.kind)
        return inner[0] if typing.get_origin(self.kind) is tuple else self.kind

    @property
    def example(self) -> str:
        """A value that works, in the spelling of a command line."""
        if self.usual in (None, dataclasses.MISSING, ""):
            return self._first
        if isinstance(self.usual, tuple):
            return " ".join(map(shlex.quote, map(str, self.usual))) or self._first
        usual = str(self.usual).lower() if isinstance(self.usual, bool) else str(self.usual)
        return shlex.quote("1" if usual in ("0", "0.0") else usual)

    @property
    def _first(self) -> str:
        """A word that is always accepted, if there is no default; empty if only the user knows
        one."""
        if self.entry in (int, float):
            return "1"
        if options := _options(self.entry):
            return options[0]
        return "runs/run" if self.name == "--checkpoint" else ""


def own_arguments(command: type[Any]) -> Iterator[Argument]:
    """Return the arguments of a command that are not keys of the configuration, in the order of its
    fields."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        if field.name == "config":
            continue
        notes = getattr(hints[field.name], "__metadata__", ())
        named = [note for note in notes if hasattr(note, "metavar")]
        kind = hints[field.name] if not notes else typing.get_args(hints[field.name])[0]
        name = next((note.name for note in named if note.name), field.name)
        positional = "Positional" in map(str, notes)
        if positional:
            name = next((note.metavar for note in named if note.metavar), field.name.upper())
        required = field.default is dataclasses.MISSING and typing.get_origin(kind) is not tuple
        most = 1 if "UseAppendAction" in map(str, notes) else _words_of(kind)
        if not positional:
            name = f"--{name}"
        is_size = any(isinstance(note, Size) for note in notes)
        yield Argument(name, kind, field.default, required, 0 if kind is bool else most, is_size)


def config_arguments(config: Config) -> Iterator[Argument]:
    """Return a flag for each key of the configuration. A list of tables gives a flag for each key
    of its entries."""
    for section in dataclasses.fields(config):
        settings: Any = getattr(config, section.name)
        for key, (kind, rule) in hints_of(type(settings)).items():  # type: ignore[arg-type]
            usual = getattr(settings, key)
            if entries_of(kind) is None:
                flag = f"--{section.name}.{key}"
                yield Argument(flag, kind, usual, False, _words_of(kind), isinstance(rule, Size))
            for number, entry in enumerate(usual if isinstance(usual, tuple) else ()):
                if not dataclasses.is_dataclass(entry):
                    continue
                for name, (of, _) in hints_of(type(entry)).items():  # type: ignore[arg-type]
                    flag = f"--{section.name}.{key}.{number}.{name}"
                    yield Argument(flag, of, getattr(entry, name), False, _words_of(of))


def tables_of(config: Config) -> set[str]:
    """Return the keys (section.key) that are lists of tables, which can only be set in a file."""
    found = set()
    for section in dataclasses.fields(config):
        settings: Any = getattr(config, section.name)
        found |= {
            f"{section.name}.{key}"
            for key, (kind, _) in hints_of(type(settings)).items()  # type: ignore[arg-type]
            if entries_of(kind) is not None
        }
    return found


def _words_of(kind: Any) -> int | None:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (dict, Mapping):
        return None
    if typing.get_origin(kind) is not tuple:
        return 1
    return None if Ellipsis in inner else len(inner)


def complaint(arguments: Sequence[Argument], words: Sequence[str]) -> str:
    """Return what is wrong with the words of a command line and what to write instead, or "".

    Args:
        arguments: All arguments of the command.
        words: The words after the name of the command.
    """
    flags = {argument.name: argument for argument in arguments if argument.name.startswith("--")}
    places = [argument for argument in arguments if argument.name not in flags]
    given: list[Argument] = []
    taken: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not _FLAG.match(word):
            place = next((one for one in places if one.most is None or one not in given), None)
            if place is None:
                needs = [
                    a for a in arguments if a.required and a.name not in words and a not in given
                ]
                return _stray(word, given, taken, flags, needs[0] if needs else None)
            given.append(place)
            continue
        head, equals, value = word.partition("=")
        flag = flags.get("--" + head[2:].replace("-", "_")) if head.startswith("--") else None
        if flag is None:
            return unknown_flag(head, {name[2:] for name in flags})
        taken = [value] if equals else []
        while (
            not equals
            and left
            and not _FLAG.match(left[0])
            and (flag.most is None or len(taken) < flag.most)
        ):
            taken.append(left.pop(0))
        if problem := _wrong_words(head, flag, taken):
            return problem
        given.append(flag)
    missing = [
        argument.name for argument in arguments if argument.required and argument not in given
    ]
    if not missing:
        return ""
    return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"


def sizes_as_bytes(arguments: Iterable[Argument], words: Sequence[str]) -> list[str]:
    """Return the words with sizes such as 40MiB written as bytes, for the flags that take a size."""
    sizes = {argument.name for argument in arguments if argument.is_size}
    found: list[str] = []
    flag = ""
    for word in words:
        head, equals, value = word.partition("=")
        if head.startswith("--"):
            flag = "--" + head[2:].replace("-", "_")
            head += equals
        else:
            head, value = "", word
        if flag in sizes and value:
            with contextlib.suppress(ValueError):  # `complaint` reports it
                value = str(parse_size(value))
        found.append(head + value)
    return found


def usage(arguments: Sequence[Argument]) -> str:
    """Return the required arguments of a command, in the order in which they are written."""
    names = [
        argument
        for argument in arguments
        if argument.required or not argument.name.startswith("--")
    ]
    return " ".join(f"{a.name} {a.example}" if a.name.startswith("--") else a.name for a in names)


def unknown_flag(head: str, known: Collection[str]) -> str:
    """Return the message about an unknown flag.

    Args:
        head: The flag without dashes.
        known: The command's flags, without dashes.
    """
    if head == "--":
        return "-- has no name; write --NAME VALUE"
    if near := meant(head.lstrip("-"), known):
        return f"unknown flag {head}; did you mean --{' or --'.join(near)}?"
    section = head.lstrip("-").partition(".")[0]
    beside = [f"--{name}" for name in sorted(known) if name.startswith(f"{section}.")]
    if not beside and "." in head:
        sections = {name.partition(".")[0] for name in known if "." in name}
        if close := difflib.get_close_matches(section, sections, 1):
            return f"unknown flag {head}; did you mean a flag of --{close[0]}?"
    own = [f"--{name}" for name in sorted(known) if "." not in name]
    listed = as_list(beside or own, "there are")
    return f"unknown flag {head}" + (f"; {listed}" if listed else "")


def _stray(
    word: str,
    given: Sequence[Argument],
    taken: Sequence[str],
    flags: Mapping[str, Argument],
    needed: Argument | None,
) -> str:
    """Return the message about a word that no argument takes.

    Args:
        word: The word.
        given: The arguments before it.
        taken: The words of the last flag before it.
        flags: All flags by name.
        needed: An argument that is required and not given.
    """
    key, equals, value = word.partition("=")
    near = meant(key, [name[2:] for name in flags])
    if near and (equals or "." in key or f"--{key}" in flags):
        return (
            f"{word!r} is not a flag; did you mean --{near[0]} "
            f"{value or flags[f'--{near[0]}'].example}?"
        )
    last = given[-1] if given else None
    if last is not None and last.most == 0:
        hint = "leave the flag out" if word.lower() in _FALSE else f"write {last.name} alone"
        return f"{last.name} takes no value, but is followed by {word!r}; {hint}"
    if needed is not None:
        return f"{word!r} has no flag before it; did you mean {needed.name} {shlex.quote(word)}?"
    if last is not None and last.name.startswith("--") and last.entry is str:
        whole = shlex.quote(" ".join([*taken, word]))
        return (
            f"{last.name} takes one value, but {word!r} is a second one; put a value with "
            f"spaces in quotation marks: {last.name} {whole}"
        )
    if last is not None and last.name.startswith("--"):
        if last.is_size and taken and _meant_size(taken[-1] + word):
            return (
                f"{last.name} takes one value; write {last.name} {taken[-1]}{word}, without a space"
            )
        count = f"{last.most} values" if last.most != 1 else "one value"
        return f"{last.name} takes {count}; remove {word!r}"
    takes = " and ".join(one.name for one in given) or "flags alone"
    return f"{word!r} is one argument too many: the command takes {takes}; remove it"


def _wrong_words(head: str, flag: Argument, words: Sequence[str]) -> str:
    """Return what is wrong with the value of a flag, or ""."""
    if flag.most == 0:
        return (
            f"{head}={words[0]}: takes no value; write {head} alone, or remove it" if words else ""
        )
    line = " ".join([head, *words])
    wrong = next((word for word in words if not _fits(flag.entry, word)), None)
    too_few = len(words) < (flag.most or 0)
    if wrong is None and not too_few:
        return ""
    works = _mended(flag, words)
    if works and _options(flag.entry):
        return f"{line}: {_rule(flag)}; did you mean {head} {' '.join(works)}?"
    example = " ".join(works) or (flag.is_size and _meant_size(words[0])) or flag.example
    return f"{line}: {_rule(flag)}; {f'try {head} {example}' if example else '--help describes it'}"


def _mended(flag: Argument, words: Sequence[str]) -> list[str]:
    """Return the words with each invalid one replaced by the valid word that was probably meant, or
    [] if that is unknown."""
    pieces = [
        piece for word in words for piece in re.split(r"[,;\s]+", word.strip("[]()")) if piece
    ]
    many = flag.most is None or flag.most > 1
    found = [_nearest(flag.entry, piece) for piece in (pieces if many else words)]
    if not found or "" in found or (flag.most is not None and len(found) != flag.most):
        return []
    return found


def _fits(kind: Any, word: str) -> bool:
    """Return whether a word is of a type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(one, word) for one in typing.get_args(kind))
    if options := _options(kind):
        return word in options
    if kind is bool:
        return word.lower() in ("true", "false")
    if kind is types.NoneType:
        return word == "None"
    if kind in (int, float):
        try:
            kind(word)
        except ValueError:
            return False
    return True


def _nearest(kind: Any, word: str) -> str:
    """Return the word of a type that was probably meant, or "" if unknown."""
    if _fits(kind, word):
        return word
    options = _options(kind)
    if options:
        if word.lower() == "gpu" and "cuda" in options:
            return "cuda"  # closer in meaning than cpu, which is closer in letters
        return next(iter(difflib.get_close_matches(word.lower(), options, 1, 0.5)), "")
    if kind is bool:
        if word.lower() in _TRUE:
            return "true"
        return "false" if word.lower() in _FALSE else ""
    if kind in (int, float):
        try:
            if kind is int:
                return str(round(float(word.replace(",", ""))))
            return str(float(word.replace(",", ".")))
        except (ValueError, OverflowError):
            return ""
    return ""


def _meant_size(word: str) -> str:
    """Return the size that a word with a wrong unit probably means, or "" if unknown."""
    found = re.fullmatch(r"([0-9.]+)([KMGT])[A-Za-z]*", word.strip(), re.IGNORECASE)
    if found is None:
        return ""
    size = f"{found[1]}{found[2].upper()}iB"
    with contextlib.suppress(ValueError):
        parse_size(size)
        return size
    return ""


def _options(kind: Any) -> list[str]:
    """Return the words that a type allows, if it lists them."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(option) for option in typing.get_args(kind)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [option for one in typing.get_args(kind) for option in _options(one)]
    return []


def _rule(flag: Argument) -> str:
    """Return what the words of a flag must be."""
    if options := _options(flag.entry):
        number = "a whole number or " if int in typing.get_args(flag.entry) else ""
        return f"must be {number}one of {', '.join(options)}"
    if flag.entry is bool:
        return "must be true or false"
    if flag.entry not in (int, float) and int not in typing.get_args(flag.entry):
        return "needs a value"
    if flag.is_size:
        return "must be a number of bytes, or a size with a unit, such as 40MiB"
    count = flag.most
    what = f"{'whole ' * (flag.entry is not float)}number{'s' * (count != 1)}"
    return f"must be {'a' if count == 1 else count or 'any number of'} {what}"
