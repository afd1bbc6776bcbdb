"""From a TOML file to a configuration, and back."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpar.config.all_sections import Config
from hybridpar.config.megatron_flags import MEGATRON, PAGE
from hybridpar.config.names import as_list, meant
from hybridpar.config.old_keys import translate
from hybridpar.config.spec import (
    ModelSpec,
    UnloadedModel,
    import_class,
    import_spec,
    is_imported,
    known_spec,
    not_imported,
    spec_name,
)
from hybridpar.config.typed import Size, convert, entries_of, from_plain, hints_of, parse_size
from hybridpar.config.update_rule import UpdateRule, import_rule
from hybridpar.errors import ConfigError, Problem
from hybridpar.reading import nearest_path, read_limited, read_toml

MAX_TOML = 1 << 20
"""Bytes of a TOML file."""
_EXAMPLES = {
    "data.valid_sets": '{wiki = ["wiki.txt"]}',
    "data.valid_corpus": '["valid.txt"], or data.valid_sets = {wiki = ["wiki.txt"]}',
}
"""Values of keys whose default does not show their form."""
MODEL_FOLDER = "model_folder"
"""Name of a file beside a run's configuration: the folders of the modules that it names, a line
each."""
_SHOWN = {
    "model": (
        "spec",
        "kind",
        "num_layers",
        "hidden_size",
        "num_heads",
        "seq_length",
        "vocab_size",
        "position",
        "norm",
        "activation",
    ),
    "optim": ("name", "lr"),
    "train": ("num_steps", "micro_batch_size", "dtype", "start_from"),
    "data": ("corpus", "tokenizer"),
    "run": ("name",),
}
"""Keys by section that a short file has even with their defaults."""
_MOST_FILES = 8
"""Most files of a folder that a message lists."""
_SECTIONS = {
    "training": ("train",),
    "trainer": ("train",),
    "optimizer": ("optim",),
    "dataset": ("data",),
    "logging": ("run",),
    "parallelism": ("parallel",),
    "scheduler": ("optim", "pipeline"),
}
"""Names that other programs give to sections."""
_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
"""Words and numbers that stand for a truth value elsewhere."""


def load_toml(path: str | Path, spec: str = "") -> Config:
    """Reads a TOML file over the defaults, and imports the code that it names: the file is the
    user's program.

    Classes that model.spec and optim.spec name are imported from beside the file, from the folder
    that a run has noted there (MODEL_FOLDER), from the working folder, or from installed packages.
    `spec` replaces model.spec. `read_run_config` reads the file of a run folder and imports
    nothing.

    Raises:
        ConfigError: It names every unknown section or key (with the nearest known one) and every
            wrong type, or says that the file is empty.
    """
    if not isinstance(path, str | Path):
        keywords = 'sections as keywords: Trainer(model, optim={"lr": 0.0003})'
        works = keywords if isinstance(path, Mapping) else '"my.toml"'
        raise ConfigError(Problem("config", path, "must be the path of a TOML file", works))
    path = Path(path)
    document = _read(path)
    if spec:
        document["model"] = {**document.get("model", {}), "spec": spec}
    _import_named(document, [path.parent, *_noted_folders(path), "."])
    return from_mapping(document)


def read_run_config(path: Path, *, trust: bool = False) -> Config:
    """Reads the configuration of a run folder (`path`: its config.toml) without importing what it
    names.

    Whoever sends a run folder chooses these names. A custom model that has not been imported
    becomes an `UnloadedModel`. With `trust` the code is imported, as in `load_toml`. No link leads
    out of the folder.

    Raises: ConfigError, as `load_toml`.
    """
    document = _read(path, within=path.parent)
    if trust:
        _import_named(document, [path.parent, *_noted_folders(path), "."])
    return from_mapping(document, unloaded=not trust)


def import_beside_user(config: Config, folder: Path) -> None:
    """Imports the code that the configuration of the run in `folder` names, if Python finds it
    without that folder.

    It looks in the working folder and in installed packages. A module that lies in the run folder
    is not imported.
    Raises: ConfigError where the code is not found, or fails to be imported.
    """
    for field, name, base in _named_code(to_mapping(config)):
        if not is_imported(name, base):
            _check_is_outside(field, name, folder)
            import_class(field, name, base)


def unloaded_code(config: Config) -> ConfigError | None:
    """The error for the first code that the configuration names and that is not imported; None if
    there is none."""
    for field, name, base in _named_code(to_mapping(config)):
        if not is_imported(name, base):
            return not_imported(field, name)
    return None


def _read(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The file as plain values; `within` as in `reading.open_regular`. Raises: ConfigError."""
    try:
        document = read_toml(path, MAX_TOML, within=within)
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem("config", str(path), f"is not valid TOML: {error}")) from None
    if not document:
        works = "the line [model], then the line num_layers = 4"
        raise ConfigError(Problem("config", str(path), "the file is empty", works))
    return document


def _unreadable(path: Path, error: OSError) -> Problem:
    """Return what is wrong with the path of a configuration, and the file that was probably meant."""
    if path.is_dir():
        inside = [path / "config.toml", *sorted(path.glob("*.toml"))]
        works = next((str(file) for file in inside if file.is_file()), "the path of a TOML file")
        return Problem("config", str(path), "is a folder", works)
    rule = f"cannot be read ({error.strerror})"
    near = nearest_path(path)
    others = (
        [] if near else sorted(str(file) for file in path.parent.glob("*.toml") if file != path)
    )
    return Problem(
        "config", str(path), rule, near or " or ".join(others if len(others) <= _MOST_FILES else ())
    )


def _noted_folders(path: Path) -> list[str]:
    """The folders of modules that a run has noted beside its configuration; none without a note."""
    try:
        noted = read_limited(path.with_name(MODEL_FOLDER), MAX_TOML, within=path.parent)
    except (OSError, ValueError):
        return []
    return noted.decode("utf-8", "surrogateescape").split("\n")[:-1]


def _import_named(document: Mapping[str, Any], folders: Sequence[str | Path]) -> None:
    """Imports the classes that a configuration names, from these folders or installed packages."""
    load = {"model.spec": import_spec, "optim.spec": import_rule}
    for field, name, _ in _named_code(document):
        load[field](name, folders)


def _named_code(document: Mapping[str, Any]) -> Iterator[tuple[str, str, type]]:
    """Each key that names code, its value, and the class that the code must inherit from."""
    for section, base in (("model", ModelSpec), ("optim", UpdateRule)):
        table = document.get(section)
        if isinstance(table, Mapping) and isinstance(name := table.get("spec", ""), str) and name:
            yield f"{section}.spec", name, base


def _check_is_outside(field: str, name: str, folder: Path) -> None:
    """Raises: ConfigError if Python would take the module of `name` from `folder`, or not find
    it."""
    top = name.partition(":")[0].partition(".")[0]
    sys.path[:0] = [path for path in [str(Path.cwd())] if path not in sys.path]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    places = (
        []
        if found is None
        else [*(found.submodule_search_locations or []), *filter(None, [found.origin])]
    )
    root = folder.resolve()
    if found is None or any(Path(place).resolve().is_relative_to(root) for place in places):
        raise not_imported(field, name)


def from_mapping(
    document: Mapping[str, Any], base: Config | None = None, *, unloaded: bool = False
) -> Config:
    """`base` (default: the defaults) with the sections and keys of `document` put over it.

    unloaded: a model that has not been imported becomes an `UnloadedModel`; otherwise it is an
    error.
    Raises: ConfigError.
    """
    base = base or Config()
    document, problems = translate(document)
    sections = {f.name for f in dataclasses.fields(Config)}
    changed: dict[str, Any] = {}
    for name, table in document.items():
        if name not in sections:
            problems.append(_no_section(name, table, base))
        elif not isinstance(table, Mapping):
            problems.append(_no_table(name, table, base))
        elif name == "model" and unloaded and (model := _unloaded_model(table)) is not None:
            changed[name] = model
        else:
            start, keys = (
                _model(base.model, table, problems)
                if name == "model"
                else (getattr(base, name), table)
            )
            changed[name] = _read_section(name, start, keys, base, problems)
    if problems:
        raise ConfigError(*problems)
    return dataclasses.replace(base, **changed)


def as_typed(config: Config) -> Config:
    """`config`, which a program has made, with lists as tuples and the like. Raises: ConfigError
    for wrong types."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return from_mapping(
        {
            name: {f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.init}
            if dataclasses.is_dataclass(section)
            else section
            for name, section in sections.items()
        },
        Config(type(config.model)()),
    )


def to_toml(config: Config) -> str:
    """The configuration as TOML; `load_toml` reads back an equal one."""
    return _dumped(to_mapping(config))


def to_short_toml(config: Config) -> str:
    """The configuration as TOML without settings at their defaults, except the ones that a user
    changes first; `load_toml` reads back an equal one."""
    usual = to_mapping(Config(type(config.model)()))
    short = {}
    for section, table in to_mapping(config).items():
        changed = {
            key: value
            for key, value in table.items()
            if key in _SHOWN.get(section, ()) or value != usual[section][key]
        }
        if changed:
            short[section] = changed
    return _dumped(short)


def _dumped(tables: Mapping[str, Any]) -> str:
    import tomli_w  # here, so that operators and benchmarks run without it

    return tomli_w.dumps(tables)


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars."""
    plain = dataclasses.asdict(config)
    model = config.model
    plain["model"] = ({"spec": model.spec} if model.spec else {}) | model.settings_table()
    return {name: _plain(table) for name, table in plain.items()}


def _plain(value: Any) -> Any:
    """A value with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _model(
    base: ModelSpec, table: Mapping[str, Any], problems: list[Problem]
) -> tuple[ModelSpec, Mapping[str, Any]]:
    """Return the model that the keys of [model] change, and these keys.

    The model has the defaults of the class that "spec" names, or else is `base`.
    """
    keys = {key: value for key, value in table.items() if key != "spec"}
    name = table.get("spec", "")
    if not isinstance(name, str):
        problems.append(
            Problem("model.spec", name, "must be of type str", '"my_package.my_module:MyModel"')
        )
    elif name and name != spec_name(type(base)):
        try:
            return known_spec(name)(), keys
        except ConfigError as error:
            problems += error.problems
            return base, {}
    return base, keys


def _unloaded_model(table: Mapping[str, Any]) -> UnloadedModel | None:
    """The model that [model] names, if its class has not been imported."""
    name = table.get("spec", "")
    if not isinstance(name, str) or not name or is_imported(name, ModelSpec):
        return None
    return UnloadedModel(
        name,
        tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in table.items()
            if key != "spec"
        ),
    )


def _no_section(name: str, value: Any, base: Config) -> Problem:
    """A name at the top of the file that is no section: misspelled, or a key that has lost its
    own."""
    plain = to_mapping(base)
    if not isinstance(value, Mapping):
        if holders := _holders(name, base):
            rule = (
                f"is a key of {' or '.join(f'[{s}]' for s in holders)}, but is in no section here"
            )
            return Problem(name, value, rule, f"{holders[0]}.{name}")
        near = meant(
            name, [f"{section}.{key}" for section, table in plain.items() for key in table]
        )
        if near and name not in plain:
            return Problem(
                name,
                value,
                "unknown key, outside of any section",
                " or ".join(near),
                True,
            )
    near = difflib.get_close_matches(name.lower(), plain, 1)
    near = [*_SECTIONS.get(name.lower(), near)]
    given = "..." if isinstance(value, Mapping) else value
    if near:
        works = " or ".join(f"[{one}]" for one in near)
        return Problem(name, given, "unknown section", works, True)
    return Problem(name, given, f"unknown section. Sections: {', '.join(plain)}")


def _no_table(name: str, value: object, base: Config) -> Problem:
    """A section that was given as a value."""
    keys = to_mapping(base)[name]
    key = next(
        (one for one in ("name", "kind", "corpus", "schedule") if one in keys), next(iter(keys))
    )
    works = f"the line [{name}], then the line {key} = {_as_toml(keys[key])}"
    return Problem(name, value, "is a section, so it must have keys below it", works)


def _of_megatron(section: str, key: str, value: object, whole: Config) -> Problem | None:
    """The problem of a key that is a flag of Megatron-LM, with what to write; None if it is no such
    flag, or a key."""
    setting = MEGATRON.get(str(key).replace("-", "_"), "")
    ours, _, name = setting.partition(" = ")[0].partition(".")
    if not setting or _holders(key, whole) or (name and ours not in _holders(name, whole)):
        return None
    rule = f"unknown key: a flag of Megatron-LM ({PAGE})"
    return Problem(f"{section}.{key}", value, rule, setting if name else "without it")


def _holders(key: str, base: Config) -> list[str]:
    """The sections that have such a key."""
    return [section for section, table in to_mapping(base).items() if key in table]


def _as_toml(value: Any) -> str:
    """A value as it would be written in the file; JSON's form is TOML's for all that a
    configuration has."""
    return json.dumps(value, default=str)


def _read_section(
    name: str, base: Any, table: Mapping[str, Any], whole: Config, problems: list[Problem]
) -> Any:
    section: Any = type(base)
    hints = hints_of(section)
    values = {}
    for key, value in table.items():
        if key not in hints and (problem := _of_megatron(name, key, value, whole)):
            problems.append(problem)
            continue
        if key not in hints:
            problems.append(_no_key(name, key, value, [*hints], whole))
            continue
        kind, rule = hints[key]
        entry = entries_of(kind)
        try:
            if isinstance(rule, Size) and isinstance(value, str):
                value = parse_size(value)
            values[key] = from_plain(kind, value, key) if entry else convert(value, kind)
        except ValueError as error:
            option = _nearest_option(value, kind)
            works = _without_quotes(value, kind) if option is None else option
            works = getattr(base, key) if works is None else works
            example = _EXAMPLES.get(f"{name}.{key}") or _as_toml(works)
            if entry:
                example = f'[{{{next(iter(hints_of(entry)))} = "*"}}]'
            problems.append(
                Problem(f"{name}.{key}", value, str(error), example, is_guess=option is not None)
            )
    return dataclasses.replace(base, **values)


def _no_key(section: str, key: str, value: object, known: Sequence[str], whole: Config) -> Problem:
    """A key that its section does not have: misspelled, of another section, or unknown."""
    everywhere = [
        f"{name}.{one}"
        for name, table in to_mapping(whole).items()
        for one in table
        if name != section
    ]
    rule = "unknown key"
    if near := meant(f"{section}.{key}", [*everywhere, *(f"{section}.{one}" for one in known)]):
        return Problem(f"{section}.{key}", value, rule, " or ".join(near), True)
    return Problem(
        f"{section}.{key}",
        value,
        as_list(known, f"unknown key. Keys of [{section}]:")
        or f"unknown key of [{section}]; `hybridpar train --help` lists all keys",
    )


def _nearest_option(value: object, kind: Any) -> str | None:
    """Return the name that was probably meant, of the names that the annotated type allows."""
    options = [
        name
        for part in (kind, *typing.get_args(kind))
        for name in typing.get_args(part)
        if isinstance(name, str)
    ]
    return next(iter(difflib.get_close_matches(str(value).lower(), options, 1)), None)


def _without_quotes(value: object, kind: Any) -> object:
    """Return the numbers or the truth value that a text of the file holds; None if it holds
    none."""
    if kind is bool and str(value).lower() in _TRUTH:
        return _TRUTH[str(value).lower()]
    if (
        typing.get_origin(kind) is tuple
        and isinstance(value, str)
        and typing.get_args(kind)[0] in (int, float)
    ):
        found = [
            _without_quotes(word, typing.get_args(kind)[0])
            for word in re.findall(r"[^,;\s()\[\]]+", value)
        ]
        return None if None in found else found
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
        return kind(number) if number == kind(number) else None
    except (ValueError, OverflowError):
        return None
