"""Translation between config.json and [model]."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridpar.checkpoint.huggingface.families import (
    EVERYWHERE,
    FAMILIES,
    REQUIRED,
    SAYS_NOTHING,
    Family,
    Key,
)
from hybridpar.checkpoint.huggingface.source import CONFIG
from hybridpar.config import ModelConfig
from hybridpar.config.typed import FINITE, convert, hints_of
from hybridpar.errors import ConfigError, Problem, config_error, shown

Plain = Mapping[str, Any]
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_ROPE_PARAMETERS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def family_of(plain: Plain, tensors: Iterable[str]) -> Family:
    """Return the model family of a folder. Older folders do not name it, and are recognized by
    their tensors.

    Raises:
        ConfigError: The model type is not supported.
    """
    name = plain.get("model_type")
    if name is None:
        name = _guess(set(tensors))
    if not isinstance(name, str) or name not in FAMILIES:
        raise config_error(
            "config.json: model_type",
            name,
            "not supported by import",
            ", ".join(FAMILIES),
        )
    return FAMILIES[name]


def _guess(tensors: set[str]) -> str | None:
    for family in FAMILIES.values():
        words = f"{family.tensors['embedding.tokens'].names[0]}.weight"
        if tensors & {words, words.removeprefix(family.prefix)}:
            return family.model_type
    return None


def model_of(plain: Plain, family: Family) -> tuple[ModelConfig, list[str]]:
    """Return the model that config.json describes, for sequences of all its positions, and the keys
    that transformers does not know either.

    Raises:
        ConfigError: Names every key that is missing, wrong or not supported.
    """
    plain, problems = _without_aliases(plain, family)
    problems += _unsupported(plain, family)
    values: dict[str, Any] = {
        key: value for key, value in family.model.items() if key != "norm_position"
    }
    given: dict[str, str] = {}
    for key in family.keys:
        try:
            value = _read(plain, key)
        except ValueError as error:
            value = plain.get(key.theirs, None if key.default is REQUIRED else key.default)
            problems.append(_problem(key.theirs, value, str(error), where=family.settings))
            continue
        if key.ours in given and values[key.ours] != value:
            problems.append(
                _problem(
                    key.theirs,
                    plain.get(key.theirs, key.default),
                    f"must be as {given[key.ours]}: both are model.{key.ours} here",
                    where=family.settings,
                )
            )
        values[key.ours], given[key.ours] = value, key.theirs
    if family.rotary:
        problems += _read_rotary(plain, values, family)
    if family.sliding_window is not None:
        problems += _windows(plain, values, family)
    if "max_positions" in values:
        values["seq_length"] = values["max_positions"]
    if problems:
        raise ConfigError(*problems)
    known = (
        {k.theirs for k in family.keys}
        | set(family.only)
        | set(EVERYWHERE)
        | SAYS_NOTHING
        | family.ignored
    )
    known |= (
        {*_ROPE_KEYS, family.rotary.base, family.rotary.fraction, "head_dim"}
        if family.rotary
        else set()
    )
    known |= set() if family.sliding_window is None else {"sliding_window"}
    return replace(ModelConfig(), **values), sorted(set(plain) - known)


def _problem(
    key: str, value: object, rule: str, suggestion: str = "", where: str = CONFIG
) -> Problem:
    return Problem(f"{where}: {key}", value, rule, suggestion)


def _without_aliases(plain: Plain, family: Family) -> tuple[dict[str, Any], list[Problem]]:
    """Return the keys under the table's names, and a problem for each key that has two values
    under two names."""
    named = dict(plain)
    problems = []
    for alias, key in family.aliases.items():
        if alias not in named:
            continue
        value = named.pop(alias)
        if named.setdefault(key, value) != value:
            problems.append(_contradiction(alias, value, key, named[key], family))
    return named, problems


def _contradiction(
    name: str, value: object, other: str, other_value: object, family: Family
) -> Problem:
    return _problem(
        name,
        value,
        f"contradicts {other} = {shown(other_value)}: both say the same thing of the model",
        "the right one alone",
        family.settings,
    )


def _unsupported(plain: Plain, family: Family) -> Iterator[Problem]:
    for key, works in {**EVERYWHERE, **family.only}.items():
        value = plain.get(key, works[0])
        if not any(value == w and isinstance(value, bool) == isinstance(w, bool) for w in works):
            yield _problem(
                key,
                value,
                f"hybridpar has no such feature for {family.model_type}",
                str(works[0]),
                family.settings,
            )


def _windows(plain: Plain, values: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """Yield a problem if a sliding window hides earlier positions from some position."""
    window = plain.get("sliding_window", family.sliding_window)
    length = values.get("max_positions")
    if window is None or length is None:
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < length:
        absent = (
            ""
            if "sliding_window" in plain
            else f" (the key is absent, and so has {family.model_type}'s default)"
        )
        yield _problem(
            "sliding_window",
            window,
            f"must reach all {length} positions of max_position_embeddings, as "
            f"hybridpar has no windows yet{absent}",
            "null for a model that was trained without a window, else a smaller "
            "max_position_embeddings",
            family.settings,
        )


def _read(plain: Plain, key: Key) -> Any:
    """Return a key's value. Raises: ValueError with the rule that is broken."""
    if key.theirs not in plain and key.default is REQUIRED:
        raise ValueError("missing")
    value = plain.get(key.theirs, key.default)
    if key.words:
        if not isinstance(value, str) or value not in key.words:
            raise ValueError(f"not supported; must be one of {', '.join(key.words)}")
        return key.words[value]
    if value is None and (key.default is None or key.is_nullable):
        return 0
    kind, rule = hints_of(ModelConfig)[key.ours]
    value = convert(value, kind)
    if kind is float and not FINITE.allows(value):
        raise ValueError(FINITE.rule)
    if not value and (kind is int or key.ours == "norm_eps"):  # 0 means a default in [model]
        raise ValueError("must be above 0")
    if rule is not None and not rule.allows(value):
        raise ValueError(rule.rule)
    return value


def _read_rotary(plain: Plain, values: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Set rotary_base and rotary_fraction, and yield settings of the rotary embeddings that are
    not supported."""
    rotary = family.rotary
    assert rotary is not None
    ropes = {}
    for name in ("rope_scaling", "rope_parameters"):  # the names in older and newer files
        rope = plain.get(name) or {}
        if (
            not isinstance(rope, Mapping)
            or rope.keys() - _ROPE_PARAMETERS
            or (any(rope.get(key, "default") != "default" for key in ("rope_type", "type")))
        ):
            yield _problem(
                name,
                rope,
                "hybridpar has rotary positions without scaling, the same in all layers",
                "null",
            )
            continue
        ropes[name] = rope
    bases = _spellings(plain, ropes, rotary.base, "rope_theta", rotary.default_base)
    parts = _spellings(
        plain, ropes, rotary.fraction, "partial_rotary_factor", rotary.default_fraction
    )
    for found in (bases, parts):
        (name, value), *others = found.items()
        for other, other_value in others:
            if other_value != value:
                yield _contradiction(name, value, other, other_value, family)
    name, part = next(iter(parts.items()))
    if (
        not _is_number(part)
        or not 0 < part <= 1
        or part != family.model.get("rotary_fraction", part)
    ):
        rule = "must be above 0 and at most 1"
        if "rotary_fraction" in family.model:
            rule = f"not supported: {family.model_type} rotates all features of a head"
        yield _problem(name, part, rule, "1.0")
    else:
        values["rotary_fraction"] = float(part)
    name, base = next(iter(bases.items()))
    if not _is_number(base) or base <= 0:
        yield _problem(name, base, "must be a finite number above 0", "10000.0")
        return
    values["rotary_base"] = float(base)
    hidden = values.get("hidden_size")
    heads = values.get("num_heads")
    dim = plain.get("head_dim")
    if (
        hidden
        and heads
        and dim is not None
        and not (isinstance(dim, int) and dim * heads == hidden)
    ):
        yield _problem(
            "head_dim",
            dim,
            f"must be hidden_size / num_attention_heads = {hidden} / {heads} here",
            "null",
        )


def _spellings(
    plain: Plain, ropes: Mapping[str, Plain], key: str, inner: str, default: float
) -> dict[str, Any]:
    """Return the values that a configuration gives one quantity of its rotary embeddings, by the
    names of their keys.

    Args:
        key: Its name in config.json.
        inner: Its name in rope_parameters and rope_scaling, and in config.json of most families.
        default: The value if transformers would read neither.
    """
    found = {key: plain[key]} if plain.get(key) is not None else {}
    found |= {
        f"{name}.{inner}": rope[inner]
        for name, rope in ropes.items()
        if rope.get(inner) is not None
    }
    found = found or {key: default}
    return found if plain.get(inner) is None else {**found, inner: plain[inner]}


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of at least 0 that fits a float."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )


def choose_family(model: ModelConfig) -> Family:
    """Return the family that a hybridpar model belongs to.

    Raises:
        ConfigError: There is none; names what the nearest one lacks.
    """
    mismatches = {
        name: _mismatches(model, family)
        for name, family in FAMILIES.items()
        if family.model["kind"] == model.kind
    }
    nearest = min(mismatches, key=lambda name: len(mismatches[name]))
    if mismatches[nearest]:
        raise ConfigError(*mismatches[nearest])
    return FAMILIES[nearest]


def _mismatches(model: ModelConfig, family: Family) -> list[Problem]:
    ours = canonical(model)
    words = {key.ours: tuple(dict.fromkeys(key.words.values())) for key in family.keys if key.words}
    allowed = {**{name: (value,) for name, value in family.model.items()}, **words}
    if all(key.ours != "num_kv_heads" for key in family.keys):
        allowed["num_kv_heads"] = (model.num_heads,)
    rule = f"not supported by transformers; its nearest model is {family.model_type}"
    return [
        Problem(f"model.{name}", ours[name], rule, " or ".join(map(str, works)))
        for name, works in allowed.items()
        if ours[name] not in works
    ]


def canonical(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of [model] with zeros and 'auto' replaced by what they stand for."""
    return {
        **vars(model),
        "num_kv_heads": model.kv_heads,
        "ffn_hidden_size": model.ffn_size,
        "norm_position": "post" if model.post_norm else "pre",
        "norm_eps": model.norm_epsilon,
        "max_positions": model.num_positions,
    }


def plain_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return config.json for a model of that family, without keys that depend on its tokenizer
    and files."""
    ours = canonical(model)
    bert = model.kind == "bert"
    plain: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architectures[model.sentence_head if bert else ""]],
    }
    for key in family.keys:
        backward = {word: theirs for theirs, word in reversed(list(key.words.items()))}
        plain[key.theirs] = (
            backward.get(ours[key.ours], ours[key.ours]) if key.words else ours[key.ours]
        )
    plain |= {key: works[0] for key, works in family.only.items()}
    if family.rotary:
        plain |= {
            family.rotary.base: model.rotary_base,
            "head_dim": model.hidden_size // model.num_heads,
        }
        if "rotary_fraction" not in family.model:
            plain[family.rotary.fraction] = model.rotary_fraction
    if bert:
        plain["sentence_head"] = model.sentence_head  # transformers has one class for nsp and sop
    return plain
