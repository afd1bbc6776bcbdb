"""Layers that differ in config.json, and the patterns of [model]: windows, rotary positions, experts.

Transformers names each layer's kind (layer_types), or derives it from other keys. A pattern of
[model] is a digit per layer, of the shortest period.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.checkpoint.huggingface.families import Family
from hybridpar.checkpoint.huggingface.rope import FULL, WINDOWED
from hybridpar.config import ModelConfig
from hybridpar.errors import Problem

Plain = Mapping[str, Any]
NO_ROPE = "no_rope_layers"
INTERVAL = "no_rope_layer_interval"
SPARSE_STEP = "decoder_sparse_step"
MLP_LAYERS = "mlp_only_layers"
WINDOW_KEYS = frozenset(
    {
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }
)


def period_of(digits: str) -> str:
    """Return the shortest text that `digits` begins to repeat."""
    for length in range(1, len(digits)):
        if all(digits[i] == digits[i % length] for i in range(len(digits))):
            return digits[:length]
    return digits


def read_rotary_layers(plain: Plain, values: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Set rotary_pattern, for a family some of whose layers have no rotary positions."""
    layers = values.get("num_layers")
    if not layers:
        return
    given = plain.get(NO_ROPE)
    if given is None:
        interval = plain.get(INTERVAL, 4)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            yield _problem(family, INTERVAL, interval, "must be an integer above 0", "4")
            return
        digits = "".join(str(int((layer + 1) % interval != 0)) for layer in range(layers))
    else:
        is_right = isinstance(given, list) and all(one in (0, 1) for one in given)
        if not is_right or len(given) < layers:
            rule = f"must be a list of 0 and 1, one for each of the {layers} layers (1: rotary)"
            yield _problem(family, NO_ROPE, given, rule)
            return
        digits = "".join(str(int(one)) for one in given[:layers])
    values["rotary_pattern"] = period_of(digits)


def read_expert_layers(plain: Plain, values: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Set moe_layers, for a family some of whose layers have one MLP in place of experts: all but
    every decoder_sparse_step'th, and those that mlp_only_layers names."""
    layers = values.get("num_layers")
    if not layers:
        return
    step = plain.get(SPARSE_STEP, 1)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        yield _problem(family, SPARSE_STEP, step, "must be an integer above 0", "1")
        return
    dense = plain.get(MLP_LAYERS)
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(one) is not int for one in dense):
        yield _problem(family, MLP_LAYERS, dense, "must be a list of numbers of layers", "[]")
        return
    has_experts = [n not in dense and (n + 1) % step == 0 for n in range(layers)]
    if not any(has_experts):
        rule = f"must leave one of the {layers} layers its experts"
        key = SPARSE_STEP if step > layers else MLP_LAYERS
        yield _problem(family, key, step if step > layers else dense, rule)
        return
    values["moe_layers"] = period_of("".join(str(int(one)) for one in has_experts))


def read_windows(plain: Plain, values: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Set window and window_pattern."""
    windows = family.windows
    assert windows is not None
    layers = values.get("num_layers")
    if layers is None:
        return
    problems: list[Problem] = []
    digits = _windowed_layers(plain, values, family, problems)
    is_on = not windows.has_switch
    if windows.has_switch:
        switch = plain.get("use_sliding_window", False)
        if not isinstance(switch, bool):
            rule = "must be true or false"
            problems.append(_problem(family, "use_sliding_window", switch, rule, "false"))
        is_on = switch is True
    window = plain.get("sliding_window", windows.default)
    if window is None and family.rotary and family.rotary.window_base is not None:
        rule = "must be an integer above 0: its layers have positions of their own"
        problems.append(_problem(family, "sliding_window", window, rule, str(windows.default)))
    elif window is not None and is_on and "1" in digits:
        if not isinstance(window, int) or isinstance(window, bool) or not 0 < window <= 2**24:
            rule = "must be an integer above 0, or null for a model without windows"
            problems.append(_problem(family, "sliding_window", window, rule, "null"))
        values["window"] = window
        values["window_pattern"] = period_of(digits)
    yield from problems


def _windowed_layers(
    plain: Plain, values: Mapping[str, Any], family: Family, problems: list[Problem]
) -> str:
    """Return a digit per layer, 1 if it has the window; an empty text for keys that are wrong."""
    windows = family.windows
    assert windows is not None
    layers = values["num_layers"]
    types = plain.get("layer_types")
    if types is not None and not windows.has_types:
        kind = FULL if plain.get("sliding_window", windows.default) is None else WINDOWED
        if types != [kind] * layers:
            rule = f"not supported: all layers of {family.model_type} are of one kind"
            problems.append(_problem(family, "layer_types", types, rule, "null"))
    elif types is not None:
        is_list = isinstance(types, list) and len(types) == layers
        if is_list and all(one in (FULL, WINDOWED) for one in types):
            return "".join(str(int(one == WINDOWED)) for one in types)
        rule = f"must be a list of {FULL} and {WINDOWED}, one for each of the {layers} layers"
        problems.append(_problem(family, "layer_types", types, rule))
        return ""
    if windows.pattern == "all":
        return "1" * layers
    if windows.pattern == "without rotary":
        rotates = values.get("rotary_pattern", "1")
        return "".join(str(1 - int(rotates[n % len(rotates)])) for n in range(layers))
    key = "max_window_layers" if windows.pattern == "last" else "sliding_window_pattern"
    number = plain.get(key, windows.default_pattern)
    least = 0 if windows.pattern == "last" else 1
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        problems.append(_problem(family, key, number, f"must be an integer of at least {least}"))
        return ""
    if windows.pattern == "last":
        return "".join(str(int(n >= number)) for n in range(layers))
    return "".join(str(int((n + 1) % number != 0)) for n in range(layers))


def write_layers(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of config.json about layers that differ."""
    plain: dict[str, Any] = {}
    layers = range(model.num_layers)
    if family.has_rotary_layers:
        plain[NO_ROPE] = [int(model.layer_rotates(layer)) for layer in layers]
    if family.has_dense_layers:
        plain[SPARSE_STEP] = 1
        plain[MLP_LAYERS] = [layer for layer in layers if not model.layer_has_experts(layer)]
    windows = family.windows
    if windows is None:
        return plain
    has_window = [model.layer_window(layer) > 0 for layer in layers]
    plain["sliding_window"] = model.window or None
    if windows.has_switch:
        plain["use_sliding_window"] = model.window > 0
    if windows.has_types:
        plain["layer_types"] = [WINDOWED if one else FULL for one in has_window]
    if windows.pattern == "last":
        full = has_window.index(True) if True in has_window else model.num_layers
        plain["max_window_layers"] = full
    return plain


def _problem(family: Family, key: str, value: object, rule: str, suggestion: str = "") -> Problem:
    return Problem(f"{family.settings}: {key}", value, rule, suggestion)
