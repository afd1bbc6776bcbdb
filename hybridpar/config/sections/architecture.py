"""Rules between the keys of [model] that describe attention, norms and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections.model import ModelConfig

EXTENDED = ("llama3", "yarn", "longrope")
"""Rotary scalings that depend on the length of texts before the extension."""
EXPERT_FIELDS = (
    "router_topk",
    "router_score",
    "router_normalize",
    "router_scale",
    "router_balance_loss",
    "router_z_loss",
    "router_bias_rate",
    "expert_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "moe_layers",
)
"""Keys that only a model with experts uses."""


def attention_conflicts(model: ModelConfig) -> Iterator[Problem]:
    """Yield settings of attention that do not go together."""
    heads = model.num_heads
    hidden = model.hidden_size
    if hidden % heads and not model.head_dim:
        yield Problem(
            "model.num_heads",
            heads,
            f"must divide model.hidden_size = {hidden}",
            str(_nearest_divisor(hidden, heads)),
        )
    elif model.position == "rotary" and model.rotary_fraction == 1 and model.head_size % 2:
        yield _odd_head(model)
    else:
        yield from _rotary(model)
    yield from _pattern(model, "window_pattern")
    if model.window and model.kind != "gpt":
        rule = 'requires model.kind = "gpt": a window ends at the token itself'
        yield Problem("model.window", model.window, rule, "0")
    if model.window_rotary_base and not (model.window and model.position == "rotary"):
        rule = 'requires model.window above 0 and model.position = "rotary"'
        yield Problem("model.window_rotary_base", model.window_rotary_base, rule, "0.0")
    if heads % model.kv_heads:
        yield Problem(
            "model.num_kv_heads",
            model.num_kv_heads,
            f"must divide model.num_heads = {heads}",
            str(_nearest_divisor(heads, model.kv_heads)),
        )


def _odd_head(model: ModelConfig) -> Problem:
    if model.head_dim:
        rule = "must be even with rotary embeddings, which turn pairs of features"
        return Problem("model.head_dim", model.head_dim, rule, str(model.head_dim + 1))
    rule = f"requires an even head size; model.hidden_size / model.num_heads is {model.head_size}"
    return Problem("model.position", "rotary", rule, '"learned"')


def _pattern(model: ModelConfig, name: str) -> Iterator[Problem]:
    """Yield a pattern of layers that is none."""
    pattern = getattr(model, name)
    if not pattern or set(pattern) - set("01"):
        rule = "must be digits 0 and 1, one per layer, which repeat to model.num_layers"
        yield Problem(f"model.{name}", pattern, rule, '"1"')
    elif len(pattern) > model.num_layers:
        rule = f"must have at most model.num_layers = {model.num_layers} digits"
        yield Problem(f"model.{name}", pattern, rule, f'"{pattern[: model.num_layers]}"')


def _rotary(model: ModelConfig) -> Iterator[Problem]:
    """Yield settings of rotary embeddings that do not go together."""
    kind = model.rotary_scaling
    yield from _pattern(model, "rotary_pattern")
    if kind == "none":
        return
    if model.position != "rotary":
        rule = 'requires model.position = "rotary", whose frequencies it changes'
        yield Problem("model.rotary_scaling", kind, rule, '"none"')
        return
    if kind in EXTENDED and not model.rotary_original_positions:
        rule = f"must be above 0 with model.rotary_scaling = {kind}: the longest text before it"
        yield Problem("model.rotary_original_positions", 0, rule, "8192")
    if kind == "llama3" and model.rotary_low_factor >= model.rotary_high_factor:
        rule = f"must be above model.rotary_low_factor = {model.rotary_low_factor}"
        yield Problem("model.rotary_high_factor", model.rotary_high_factor, rule, "4.0")
    if kind == "yarn" and model.rotary_beta_slow >= model.rotary_beta_fast:
        rule = f"must be above model.rotary_beta_slow = {model.rotary_beta_slow}"
        yield Problem("model.rotary_beta_fast", model.rotary_beta_fast, rule, "32.0")
    if kind == "longrope":
        pairs = model.rotary_features // 2
        for name in ("rotary_short_factors", "rotary_long_factors"):
            factors = getattr(model, name)
            if len(factors) != pairs:
                rule = (
                    f"must have {pairs} numbers with longrope, one for each pair of rotated "
                    f"features; has {len(factors)}"
                )
                yield Problem(f"model.{name}", list(factors), rule, f"{[1.0] * pairs}")


def norm_conflicts(model: ModelConfig) -> Iterator[Problem]:
    """Yield settings of norms that do not go together."""
    pre = model.norm_position == "pre" or (model.norm_position == "auto" and model.kind == "gpt")
    if model.parallel_residual and not pre:
        yield Problem(
            "model.parallel_residual",
            True,
            f"requires pre-norm layers; model.norm_position is {model.norm_position} "
            f"({model.kind})",
            'model.norm_position = "pre"',
        )
    if model.norm == "rms_norm":
        return
    if model.norm_zero_centered:
        rule = f'requires model.norm = "rms_norm"; model.norm is "{model.norm}"'
        yield Problem("model.norm_zero_centered", True, rule, "false")
    if model.qk_norm != "none":
        rule = f'requires model.norm = "rms_norm"; model.norm is "{model.norm}"'
        yield Problem("model.qk_norm", model.qk_norm, rule, '"none"')


def expert_conflicts(model: ModelConfig) -> Iterator[Problem]:
    """Yield settings of experts that do not go together."""
    pattern = model.moe_layers
    yield from _pattern(model, "moe_layers")
    if not model.num_experts:
        return
    if model.router_topk > model.num_experts:
        rule = f"must be at most model.num_experts = {model.num_experts}"
        yield Problem("model.router_topk", model.router_topk, rule, str(model.num_experts))
    if pattern and not set(pattern) - {"0"}:
        rule = f"must have a 1: no layer has the model.num_experts = {model.num_experts} experts"
        yield Problem("model.moe_layers", pattern, rule, '"1"')
    if model.lora_rank:
        rule = "not supported with model.num_experts above 0: experts have no adapters"
        yield Problem("model.lora_rank", model.lora_rank, rule, "0")


def _nearest_divisor(whole: int, number: int) -> int:
    """Return the divisor of `whole` nearest to `number`."""
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - number))
