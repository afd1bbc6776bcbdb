"""From a TOML file to a configuration, and back."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpar.config.model import ModelConfig
from hybridpar.config.sections import Config
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
from hybridpar.config.typed import convert, hints_of
from hybridpar.config.update_rule import UpdateRule, import_rule
from hybridpar.errors import ConfigError, Problem
from hybridpar.reading import read_limited, read_toml

MAX_TOML = 1 << 20
"""Bytes of a TOML file."""
_EXAMPLES = {
    "data.valid_sets": '{"wiki": ["wiki.txt"]}',
    "data.valid_corpus": '["valid.txt"], or for several sets data.valid_sets = {"wiki": ["wiki.txt"]}'}
"""Values of keys whose default does not show their form."""
MODEL_FOLDER = "model_folder"
"""Name of a file beside a run's configuration: the folders of the modules that it names, a line each."""


def load_toml(path: str | Path, spec: str = "") -> Config:
    """Reads a TOML file over the defaults, and imports the code that it names: the file is the user's program.

    Classes that model.spec and optim.spec name are imported from beside the file, from the folder that a run has noted
    there (MODEL_FOLDER), from the working folder, or from installed packages. `spec` replaces model.spec.
    `read_run_config` reads the file of a run folder and imports nothing.

    Raises: ConfigError naming every unknown section or key (with the nearest known one) and every wrong type; also if
    the file says nothing at all.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(Problem("config", path, "must be the path of a TOML file", '"my.toml"'))
    path = Path(path)
    document = _read(path)
    if spec:
        document["model"] = {**document.get("model", {}), "spec": spec}
    _import_named(document, [path.parent, *_noted_folders(path), "."])
    return from_mapping(document)


def read_run_config(path: Path, *, trust: bool = False) -> Config:
    """Reads the configuration of a run folder (`path`: its config.toml) without importing what it names.

    Whoever sends a run folder chooses these names. A custom model that has not been imported becomes an
    `UnloadedModel`. With `trust` the code is imported, as in `load_toml`. No link leads out of the folder.

    Raises: ConfigError, as `load_toml`.
    """
    document = _read(path, within=path.parent)
    if trust:
        _import_named(document, [path.parent, *_noted_folders(path), "."])
    return from_mapping(document, unloaded=not trust)


def import_beside_user(config: Config, folder: Path) -> None:
    """Imports the code that the configuration of the run in `folder` names, if Python finds it without that folder.

    It looks in the working folder and in installed packages. A module that lies in the run folder is not imported.
    Raises: ConfigError where the code is not found, or fails to be imported.
    """
    for field, name, base in _named_code(to_mapping(config)):
        if not is_imported(name, base):
            _check_is_outside(field, name, folder)
            import_class(field, name, base)


def unloaded_code(config: Config) -> ConfigError | None:
    """The error for the first code that the configuration names and that is not imported; None if there is none."""
    for field, name, base in _named_code(to_mapping(config)):
        if not is_imported(name, base):
            return not_imported(field, name)
    return None


def _read(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The file as plain values; `within` as in `reading.open_regular`. Raises: ConfigError."""
    try:
        document = read_toml(path, MAX_TOML, within=within)
    except OSError as error:
        others = [p.name for p in path.parent.glob("*.toml") if p != path and p.is_file()]
        near = difflib.get_close_matches(path.name, others, 1)
        rule = f"cannot be read ({error.strerror})"
        problem = Problem("config", str(path), rule, str(path.with_name(near[0])) if near else "")
        raise ConfigError(problem) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem("config", str(path), f"is not valid TOML: {error}")) from None
    if not document:
        raise ConfigError(Problem("config", str(path), "has no section", "a file with [model] in it"))
    return document


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
    """Raises: ConfigError if Python would take the module of `name` from `folder`, or not find it."""
    top = name.partition(":")[0].partition(".")[0]
    sys.path[:0] = [path for path in [str(Path.cwd())] if path not in sys.path]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    places = [] if found is None else [*(found.submodule_search_locations or []), *filter(None, [found.origin])]
    root = folder.resolve()
    if found is None or any(Path(place).resolve().is_relative_to(root) for place in places):
        raise not_imported(field, name)


def from_mapping(document: Mapping[str, Any], base: Config | None = None, *, unloaded: bool = False) -> Config:
    """`base` (default: the defaults) with the sections and keys of `document` put over it.

    unloaded: a model that has not been imported becomes an `UnloadedModel`; otherwise it is an error.
    Raises: ConfigError.
    """
    base = base or Config()
    problems: list[Problem] = []
    sections = {f.name for f in dataclasses.fields(Config)}
    changed: dict[str, Any] = {}
    for name, table in document.items():
        if name not in sections:
            problems.append(_no_section(name, table, base))
        elif not isinstance(table, Mapping):
            problems.append(Problem(name, table, "is a section and needs keys", f"[{name}]"))
        elif name == "model" and unloaded and (model := _unloaded_model(table)) is not None:
            changed[name] = model
        else:
            start, keys = (_model(base.model, table, problems) if name == "model" else (getattr(base, name), table))
            changed[name] = _read_section(name, start, keys, base, problems)
    if problems:
        raise ConfigError(*problems)
    return dataclasses.replace(base, **changed)


def as_typed(config: Config) -> Config:
    """`config`, which a program has made, with lists as tuples and the like. Raises: ConfigError for wrong types."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return from_mapping({name: {f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.init}
                         if dataclasses.is_dataclass(section) else section for name, section in sections.items()},
                        Config(type(config.model)()))


def to_toml(config: Config) -> str:
    """The configuration as TOML; `load_toml` reads back an equal one."""
    import tomli_w  # here, so that operators and benchmarks run without it

    return tomli_w.dumps(to_mapping(config))


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars."""
    plain = dataclasses.asdict(config)
    if isinstance(config.model, UnloadedModel):
        plain["model"] = {"spec": config.model.name, **dict(config.model.settings)}
    elif not isinstance(config.model, ModelConfig):
        plain["model"] = {"spec": spec_name(type(config.model)), **plain["model"]}
    return {name: _plain(table) for name, table in plain.items()}


def _plain(value: Any) -> Any:
    """A value with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _model(base: ModelSpec, table: Mapping[str, Any], problems: list[Problem]) -> tuple[ModelSpec, Mapping[str, Any]]:
    """What the keys of [model] come over, and these: the defaults of the class that "spec" names, where it is one."""
    keys = {key: value for key, value in table.items() if key != "spec"}
    name = table.get("spec", "")
    if not isinstance(name, str):
        problems.append(Problem("model.spec", name, "must be of type str", '"my_package.my_module:MyModel"'))
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
    return UnloadedModel(name, tuple((key, tuple(value) if isinstance(value, list) else value)
                                     for key, value in table.items() if key != "spec"))


def _no_section(name: str, value: Any, base: Config) -> Problem:
    """A name at the top of the file that is no section: misspelled, or a key that has lost its own."""
    if (holders := _holders(name, base)) and not isinstance(value, Mapping):
        rule = f"is a key of {' or '.join(f'[{s}]' for s in holders)}, and stands in no section"
        return Problem(name, value, rule, f"{holders[0]}.{name}")
    return Problem(name, "...", "is not a section of the configuration", _nearest(name, list(to_mapping(base))))


def _holders(key: str, base: Config) -> list[str]:
    """The sections that have such a key."""
    return [section for section, table in to_mapping(base).items() if key in table]


def _as_toml(value: Any) -> str:
    """A value as it would be written in the file; JSON's form is TOML's for all that a configuration has."""
    return json.dumps(value, default=str)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1, cutoff=0.5)
    return near[0] if near else "one of " + ", ".join(sorted(known))


def _read_section(name: str, base: Any, table: Mapping[str, Any], whole: Config, problems: list[Problem]) -> Any:
    section: Any = type(base)
    hints, values = hints_of(section), {}
    for key, value in table.items():
        if key not in hints:
            near = " or ".join(f"{section}.{key}" for section in _holders(key, whole)) or _nearest(key, [*hints])
            problems.append(Problem(f"{name}.{key}", value, "is not a key of the configuration", near))
            continue
        try:
            values[key] = convert(value, hints[key][0])
        except ValueError as error:
            works = _nearest_option(value, hints[key][0]) or getattr(base, key)
            example = _EXAMPLES.get(f"{name}.{key}") or _as_toml(works)
            problems.append(Problem(f"{name}.{key}", value, str(error), example))
    return dataclasses.replace(base, **values)


def _nearest_option(value: object, kind: Any) -> str | None:
    """Of the names that the annotated type allows, the one that was probably meant."""
    options = [name for part in (kind, *typing.get_args(kind)) for name in typing.get_args(part)
               if isinstance(name, str)]
    return next(iter(difflib.get_close_matches(str(value).lower(), options, 1)), None)
