"""Translate Megatron's arguments, as in its checkpoints, by the table in family.py.

Every argument must be accounted for: it is translated, or has a supported value in family.py, or is
in ignored.py. Any other name, such as one of a fork or of a later version, must be off: None, False
or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridpar.checkpoint.huggingface.configuration import model_of
from hybridpar.checkpoint.huggingface.layers import period_of
from hybridpar.checkpoint.huggingface.rope import is_number
from hybridpar.checkpoint.megatron.family import GPT
from hybridpar.checkpoint.megatron.ignored import is_ignored
from hybridpar.config import ModelConfig
from hybridpar.errors import ConfigError, Problem, config_error

_GPT2_VOCABULARY = 50257
_FLAGS = frozenset(
    {
        "add_bias_linear",
        "disable_bias_linear",
        "add_qkv_bias",
        "swiglu",
        "bias_gelu_fusion",
        "openai_gelu",
        "onnx_safe",
        "group_query_attention",
        "use_rotary_position_embeddings",
        "add_position_embedding",
        "untie_embeddings_and_output_weights",
        "qk_layernorm",
        "layernorm_zero_centered_gamma",
        "apply_layernorm_1p",
        "use_rope_scaling",
    }
)
_OF_CORE = ("qk_layernorm", "use_rope_scaling", "no_rope_freq", "softmax_scale", "window_size")
"""Arguments that models of before Megatron Core did not have."""
_INTERPOLATION = "rotary_seq_len_interpolation_factor"
_TRANSLATED = (
    _FLAGS | {key.theirs for key in GPT.keys} | {_INTERPOLATION, "no_rope_freq", "window_size"}
)
_LEGACY_ROTARY_BASE = 10000
_ORIGINAL_POSITIONS = 8192
"""Longest text before use_rope_scaling, in Megatron Core's code."""
_TE_ACTIVATIONS = "use_te_activation_func", "use_transformer_engine_op_fuser"


def model_of_arguments(args: Mapping[str, Any], vocab_size: int, *, is_core: bool) -> ModelConfig:
    """Return the model that was trained with these arguments, with `vocab_size` rows of the
    embedding.

    Args:
        is_core: The model was Megatron Core's; older ones compute differently in places.

    Raises:
        ConfigError: Names every argument that is missing, wrong, unknown or not supported.
    """
    bias = args.get("add_bias_linear", not args.get("disable_bias_linear", False))
    plain = {key.theirs: args[key.theirs] for key in GPT.keys if args.get(key.theirs) is not None}
    plain |= {key: args[key] for key in GPT.only if key in args}
    epsilon = [
        args[name] for name in ("norm_epsilon", "layernorm_epsilon") if args.get(name) is not None
    ] or [1e-5]
    plain |= {
        "vocab_size": vocab_size,
        "add_bias_linear": bias,
        "activation": _activation(args, bias=bias, is_core=is_core) or "gelu",
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "num_query_groups": args.get("num_query_groups")
        if args.get("group_query_attention")
        else None,
        "add_qkv_bias": bool(args.get("add_qkv_bias")) or bias,
        "norm_epsilon": epsilon[0],
        "layernorm_epsilon": epsilon[-1],
    }
    if args.get("use_rotary_position_embeddings"):
        plain["position_embedding_type"] = "rope"  # the older name
    zero_centered = bool(
        args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")
    )
    plain |= dict.fromkeys(("layernorm_zero_centered_gamma", "apply_layernorm_1p"), zero_centered)
    problems = [*_not_off(args), *_does_not_fit(args, plain, is_core=is_core)]
    positions: dict[str, Any] = {}
    if plain.get("position_embedding_type") == "rope":
        problems += _rotary(args, positions)
    problems += _windows(args, positions)
    try:
        model, _ = model_of(plain, GPT)
    except ConfigError as error:
        raise ConfigError(*error.problems, *problems) from None
    if problems:
        raise ConfigError(*problems)
    return replace(model, **positions)


def _rotary(args: Mapping[str, Any], values: dict[str, Any]) -> Iterator[Problem]:
    """Set keys rotary_* of [model], and yield what is wrong with their arguments."""
    interpolation = args.get(_INTERPOLATION)
    if interpolation not in (None, 1):
        if not is_number(interpolation) or interpolation <= 0 or args.get("use_rope_scaling"):
            rule = "must be a finite number above 0, and 1 with use_rope_scaling"
            yield _problem(_INTERPOLATION, interpolation, rule, "1")
            return
        values |= {"rotary_scaling": "linear", "rotary_factor": float(interpolation)}
    if args.get("use_rope_scaling"):
        factor = args.get("rope_scaling_factor", 8.0)
        if not is_number(factor) or factor <= 0:
            yield _problem("rope_scaling_factor", factor, "must be a finite number above 0", "8.0")
            return
        values |= {
            "rotary_scaling": "llama3",
            "rotary_factor": float(factor),
            "rotary_original_positions": _ORIGINAL_POSITIONS,
        }
    skipped = args.get("no_rope_freq")
    if not skipped:
        return
    layers = args.get("num_layers")
    if isinstance(skipped, int) and not isinstance(skipped, bool):
        values["rotary_pattern"] = period_of("1" * (skipped - 1) + "0")
    elif isinstance(skipped, list) and len(skipped) == layers and {*skipped} <= {0, 1}:
        values["rotary_pattern"] = period_of("".join(str(1 - int(one)) for one in skipped))
    else:
        rule = f"must be an integer, or a list of 0 and 1 (1: no rotary) for {layers} layers"
        yield _problem("no_rope_freq", skipped, rule, "None")


def _windows(args: Mapping[str, Any], values: dict[str, Any]) -> Iterator[Problem]:
    """Set keys of windows of [model], and yield what is wrong with their arguments."""
    size = args.get("window_size")
    if size is None:
        return
    is_pair = isinstance(size, tuple | list) and len(size) == 2
    if not is_pair or not all(type(one) is int for one in size) or size[0] < 0 or size[1] != 0:
        rule = "must be (tokens before, 0), as nothing sees later tokens"
        yield _problem("window_size", size, rule, "None")
        return
    values["window"] = size[0] + 1
    layers = args.get("num_layers")
    skipped = args.get("window_attn_skip_freq")
    if isinstance(skipped, list) and len(skipped) == layers and {*skipped} <= {0, 1}:
        values["window_pattern"] = period_of("".join(str(int(one)) for one in skipped))
    elif type(skipped) is int and skipped > 0 and isinstance(layers, int):
        digits = (str(int((layer + 1) % skipped != 0)) for layer in range(layers))
        values["window_pattern"] = period_of("".join(digits))
    elif skipped is not None:
        rule = f"must be an integer above 0, or a list of 0 and 1 (1: window) for {layers} layers"
        yield _problem("window_attn_skip_freq", skipped, rule, "None")


def _problem(name: str, value: object, rule: str, suggestion: str = "") -> Problem:
    return Problem(f"{GPT.settings}: {name}", value, rule, suggestion)


def _not_off(args: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield arguments that are not accounted for and not off."""
    for name, value in args.items():
        if name in _TRANSLATED or name in GPT.only or name in _TE_ACTIVATIONS or is_ignored(name):
            continue
        if not (value is None or value is False or value in ("", [], (), {})):
            yield _problem(
                name,
                value,
                "hybridpar does not know this argument, which may change what the model "
                "computes; if it does not, leave it out of an args.json beside the ranks, which is "
                "read "
                "in place of the arguments in the files",
                "None",
            )


def _does_not_fit(
    args: Mapping[str, Any], plain: Mapping[str, Any], *, is_core: bool
) -> Iterator[Problem]:
    """Yield arguments whose value is right by itself, but conflicts with others."""
    for name in sorted(_FLAGS):
        if not isinstance(args.get(name), (bool, type(None))):
            yield _problem(name, args[name], "must be true or false")
    if not _activation(args, bias=plain["add_bias_linear"], is_core=is_core):
        yield _problem("bias_gelu_fusion", None, "is missing; it says which gelu it was", "True")
    for name in _TE_ACTIVATIONS:
        if args.get(name) and plain["activation"] != "swiglu":
            yield _problem(
                name, args[name], "hybridpar does not know Transformer Engine's gelu", "False"
            )
    if plain.get("normalization", "LayerNorm") == "LayerNorm":
        for name in ("qk_layernorm", "layernorm_zero_centered_gamma", "apply_layernorm_1p"):
            if args.get(name):
                rule = "not supported with normalization LayerNorm, only with RMSNorm"
                yield _problem(name, args[name], rule, "False")
    for name in _OF_CORE if not is_core else ():
        if args.get(name):
            yield _problem(name, args[name], "models of before Megatron Core have no such feature")
    is_rotary = plain.get("position_embedding_type") == "rope"
    if is_rotary and not is_core and args.get("rotary_base") not in (None, _LEGACY_ROTARY_BASE):
        yield _problem(
            "rotary_base",
            args["rotary_base"],
            "models of before Megatron Core turn by 10000 whatever it says",
            str(_LEGACY_ROTARY_BASE),
        )
    if not is_rotary and args.get("add_position_embedding") is False:
        yield _problem(
            "add_position_embedding", False, "hybridpar has no model without positions", "True"
        )


def _activation(args: Mapping[str, Any], *, bias: bool, is_core: bool) -> str | None:
    """Return the activation; None if the arguments do not say it.

    Megatron computes the gelu that it fuses with a bias, and openai_gelu, by tanh, its plain gelu
    by the error function. Megatron Core ignores openai_gelu.
    """
    if args.get("swiglu"):
        return "swiglu"
    if args.get("openai_gelu") and not is_core:
        return "gelu"
    if bias and args.get("bias_gelu_fusion") is None:
        return None
    return "gelu" if bias and args["bias_gelu_fusion"] else "gelu_exact"


def true_vocabulary(args: Mapping[str, Any], rows: int, asked: int | None) -> tuple[int, str]:
    """Return how many rows of the embedding are tokens, and a note about it.

    Megatron pads the vocabulary to a multiple of make_vocab_size_divisible_by *
    tensor_model_parallel_size, and does not always save its true size.

    Raises:
        ConfigError: `asked` is more than there are.
    """
    if asked is not None:
        if not 0 < asked <= rows:
            raise config_error(
                "vocab_size",
                asked,
                f"must be at most {rows}, the number of rows of the embedding",
                str(rows),
            )
        return asked, ""
    size = (
        _GPT2_VOCABULARY
        if args.get("tokenizer_type") == "GPT2BPETokenizer"
        else args.get("vocab_size")
    )
    if isinstance(size, int) and 0 < size <= rows:
        size += (
            args.get("tokenizer_type") == "NullTokenizer"
        )  # older versions add an end-of-document token
        return min(size, rows), ""
    return (
        rows,
        f"all {rows} rows of the embedding are kept; if some are padding, give the real number "
        f"with --vocab_size",
    )
