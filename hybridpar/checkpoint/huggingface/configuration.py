"""Translation between config.json and [model]."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridpar.checkpoint.huggingface.families import (
    EVERYWHERE,
    FAMILIES,
    ON_OFF,
    REQUIRED,
    SAYS_NOTHING,
    Family,
    Key,
)
from hybridpar.checkpoint.huggingface.layers import (
    INTERVAL,
    MLP_LAYERS,
    NO_ROPE,
    SPARSE_STEP,
    WINDOW_KEYS,
    period_of,
    read_expert_layers,
    read_rotary_layers,
    read_windows,
    write_layers,
)
from hybridpar.checkpoint.huggingface.rope import (
    ORIGINAL,
    PLACES,
    is_number,
    read_rotary,
    write_rotary,
)
from hybridpar.checkpoint.huggingface.source import CONFIG
from hybridpar.config import ModelConfig
from hybridpar.config.typed import FINITE, convert, hints_of
from hybridpar.errors import ConfigError, Problem, config_error, shown

Plain = Mapping[str, Any]
_ROPE_KEYS = (*PLACES, "rope_theta", "partial_rotary_factor", "rope_local_base_freq", ORIGINAL)


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
    values = dict(family.model)
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
        problems += read_rotary(plain, values, family)
    if family.has_rotary_layers:
        problems += read_rotary_layers(plain, values, family)
    if family.has_dense_layers:
        problems += read_expert_layers(plain, values, family)
    if family.windows is not None:
        problems += read_windows(plain, values, family)
    if "max_positions" in values:
        values["seq_length"] = values["max_positions"]
    if family.scales_embeddings and "hidden_size" in values:
        values["embedding_scale"] = values["hidden_size"] ** 0.5
    if problems:
        raise ConfigError(*problems)
    known = (
        {k.theirs for k in family.keys}
        | set(family.only)
        | set(EVERYWHERE)
        | SAYS_NOTHING
        | family.ignored
    )
    if family.rotary:
        known |= {*_ROPE_KEYS, family.rotary.base, family.rotary.fraction}
    if family.has_rotary_layers:
        known |= {NO_ROPE, INTERVAL}
    if family.has_dense_layers:
        known |= {SPARSE_STEP, MLP_LAYERS}
    if family.windows is not None:
        known |= WINDOW_KEYS
    return replace(ModelConfig(), **_as_defaults(values)), sorted(set(plain) - known)


def _as_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return keys of [model], with the default for each that says what the default means."""
    bias = ON_OFF[values.get("bias", True)]
    heads = values.get("num_heads", 0)
    usual: dict[str, Any] = {"qkv_bias": bias, "out_bias": bias, "norm_position": "pre"}
    if values.get("kind") == "bert":
        usual["norm_position"] = "post"
    if heads and values["hidden_size"] % heads == 0:
        usual["head_dim"] = values["hidden_size"] // heads
    head_dim = values.get("head_dim") or usual.get("head_dim")
    if head_dim:
        usual["attention_scale"] = head_dim**-0.5
    return {name: value for name, value in values.items() if value != usual.get(name)}


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
    named = {key.theirs for key in family.keys}
    for key, works in {**EVERYWHERE, **family.only}.items():
        if key in named:
            continue
        value = plain.get(key, works[0])
        if not any(value == w and isinstance(value, bool) == isinstance(w, bool) for w in works):
            yield _problem(
                key,
                value,
                f"hybridpar has no such feature for {family.model_type}",
                str(works[0]),
                family.settings,
            )


def shown_plain(value: Any) -> str:
    """Return a plain value as JSON has it, but texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _read(plain: Plain, key: Key) -> Any:
    """Return a key's value. Raises: ValueError with the rule that is broken."""
    if key.theirs not in plain and key.default is REQUIRED:
        raise ValueError("missing")
    value = plain.get(key.theirs, key.default)
    if key.words:
        for theirs, ours in key.words.items():
            if value == theirs and type(value) is type(theirs):
                return ours
        words = ", ".join(shown_plain(theirs) for theirs in key.words)
        raise ValueError(f"not supported; must be one of {words}")
    if value is None and (key.default is None or key.is_nullable):
        return 0
    if key.inverse_root:
        if not is_number(value) or not value:
            raise ValueError("must be a finite number above 0")
        return value**-0.5
    kind, rule = hints_of(ModelConfig)[key.ours]
    value = convert(value, kind)
    if kind is float and not FINITE.allows(value):
        raise ValueError(FINITE.rule)
    if not value and (kind is int or key.ours == "norm_eps"):  # 0 means a default in [model]
        raise ValueError("must be above 0")
    if rule is not None and not rule.allows(value):
        raise ValueError(rule.rule)
    return value


def choose_family(model: ModelConfig, wanted: str = "") -> Family:
    """Return the family that a hybridpar model belongs to.

    Args:
        wanted: The family to take if it has the model's mathematics. Otherwise the first that has.

    Raises:
        ConfigError: There is none; names what the nearest one lacks.
    """
    mismatches = {
        name: _mismatches(model, family)
        for name, family in FAMILIES.items()
        if family.model["kind"] == model.kind
    }

    def distance(name: str) -> tuple[bool, int, bool]:
        fields = [problem.field for problem in mismatches[name]]
        return "model.num_experts" in fields, len(fields), name != wanted

    nearest = min(mismatches, key=distance)
    if mismatches[nearest]:
        raise ConfigError(*mismatches[nearest])
    return FAMILIES[nearest]


def families_of(model: ModelConfig) -> list[Family]:
    """Return all families that have the model's mathematics; `choose_family` takes the first."""
    return [
        family
        for family in FAMILIES.values()
        if family.model["kind"] == model.kind and not _mismatches(model, family)
    ]


def _mismatches(model: ModelConfig, family: Family) -> list[Problem]:
    ours = canonical(model)
    words = {key.ours: tuple(dict.fromkeys(key.words.values())) for key in family.keys if key.words}
    allowed = {**{name: (value,) for name, value in family.model.items()}, **words}
    named = {key.ours for key in family.keys}
    if "num_kv_heads" not in named:
        allowed["num_kv_heads"] = (model.num_heads,)
    if "head_dim" not in named:
        allowed["head_dim"] = (model.hidden_size // model.num_heads,)
    if not family.has_rotary_layers:
        allowed["rotary_pattern"] = ("1",)
    if "num_experts" in named and not model.num_experts:
        allowed["num_experts"] = ("above 0",)
    scale = model.hidden_size**0.5 if family.scales_embeddings else 1.0
    allowed["embedding_scale"] = (scale,)
    allowed["rotary_scaling"] = ("none", *(family.rotary.scalings if family.rotary else ()))
    allowed |= _one_of_two(ours, family)
    allowed |= _windows_of(model, family)
    if allowed.get("bias", (ours["bias"],)) != (ours["bias"],):
        # biases that follow a wrong bias are wrong, too
        for name in ("qkv_bias", "out_bias"):
            if getattr(model, name) == "auto":
                allowed.pop(name, None)
    rule = f"not supported by transformers; its nearest model is {family.model_type}"
    return [
        Problem(f"model.{name}", ours[name], rule, " or ".join(map(str, works)))
        for name, works in allowed.items()
        if ours[name] not in works
    ]


def _one_of_two(ours: Mapping[str, Any], family: Family) -> dict[str, tuple[Any, ...]]:
    """Return keys of [model] that must equal another, as one key of the family says both."""
    first: dict[str, str] = {}
    allowed = {}
    for key in family.keys:
        other = first.setdefault(key.theirs, key.ours)
        if other != key.ours:
            allowed[key.ours] = (ours[other],)
    return allowed


def _windows_of(model: ModelConfig, family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the values of the keys of windows that a family can say, for a model."""
    windows = family.windows
    if windows is None:
        return {"window": (0,)}
    allowed: dict[str, tuple[Any, ...]] = {}
    has_own_base = family.rotary is not None and family.rotary.window_base is not None
    if not has_own_base:
        allowed["window_rotary_base"] = (0.0,)
    elif not model.window:
        allowed["window"] = (windows.default,)
    elif model.rotary_scaling != "none" and not model.window_rotary_base:
        allowed["window_rotary_base"] = (model.rotary_base,)
    if model.window and not windows.has_types:
        allowed["window_pattern"] = ("1",)
    return allowed


def canonical(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of [model] with zeros and 'auto' replaced by what they stand for."""
    scale = model.attention_scale
    usual = model.head_size**-0.5
    rotates = "".join(str(int(model.layer_rotates(layer))) for layer in range(model.num_layers))
    if model.position != "rotary":
        rotates = "1"
    windowed = "".join(str(int(model.layer_window(n) > 0)) for n in range(model.num_layers))
    experts = "".join(str(int(model.layer_has_experts(n))) for n in range(model.num_layers))
    return {
        **vars(model),
        "num_kv_heads": model.kv_heads,
        "ffn_hidden_size": model.ffn_size,
        "expert_ffn_hidden_size": model.expert_ffn_size,
        "moe_layers": period_of(experts) if model.num_experts else "1",
        "head_dim": model.head_size,
        "qkv_bias": ON_OFF[model.has_qkv_bias],
        "out_bias": ON_OFF[model.has_out_bias],
        "attention_scale": 0.0 if scale == usual else scale,
        "rotary_pattern": period_of(rotates),
        "window_pattern": period_of(windowed) if model.window else "1",
        "norm_position": _norm_position(model),
        "norm_eps": model.norm_epsilon,
        "max_positions": model.num_positions,
    }


def _norm_position(model: ModelConfig) -> str:
    if model.norm_position != "auto":
        return model.norm_position
    return "post" if model.post_norm else "pre"


def plain_of(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return config.json for a model of that family, without keys that depend on its tokenizer
    and files."""
    ours = canonical(model)
    bert = model.kind == "bert"
    plain: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architectures[model.sentence_head if bert else ""]],
    }
    plain |= {
        family.exported.get(key.theirs, key.theirs): _write(ours, model, key) for key in family.keys
    }
    plain |= {key: works[0] for key, works in family.only.items()}
    if family.rotary:
        plain |= write_rotary(model, family)
    plain |= write_layers(model, family)
    if bert:
        plain["sentence_head"] = model.sentence_head  # transformers has one class for nsp and sop
    return plain


def _write(ours: Mapping[str, Any], model: ModelConfig, key: Key) -> Any:
    """Return the value of a key of config.json."""
    value = ours[key.ours]
    if key.words:
        return next((theirs for theirs, word in key.words.items() if word == value), value)
    if key.writes_null:
        return value or None
    if key.inverse_root:
        scale = value or model.head_size**-0.5
        return round(scale**-2)
    return value
