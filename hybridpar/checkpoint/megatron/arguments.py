"""Translate Megatron's arguments, as in its checkpoints, by the table in family.py.

Every argument must be accounted for: it is translated, or has a supported value in family.py, or is
in ignored.py. Any other name, such as one of a fork or of a later version, must be off: None, False
or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.checkpoint.huggingface.configuration import model_of
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
    }
)
_TRANSLATED = _FLAGS | {key.theirs for key in GPT.keys} | {"kv_channels"}
_LEGACY_ROTARY_BASE = 10000
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
        "add_qkv_bias_alone": bool(args.get("add_qkv_bias")) and not bias,
        "norm_epsilon": epsilon[0],
        "layernorm_epsilon": epsilon[-1],
    }
    if args.get("use_rotary_position_embeddings"):
        plain["position_embedding_type"] = "rope"  # the older name
    problems = [*_not_off(args), *_does_not_fit(args, plain, is_core=is_core)]
    try:
        model, _ = model_of(plain, GPT)
    except ConfigError as error:
        raise ConfigError(*error.problems, *problems) from None
    if problems:
        raise ConfigError(*problems)
    return model


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
    hidden, heads, dim = (
        args.get(name) for name in ("hidden_size", "num_attention_heads", "kv_channels")
    )
    if dim is not None and not (
        isinstance(dim, int) and isinstance(heads, int) and dim * heads == hidden
    ):
        yield _problem(
            "kv_channels",
            dim,
            f"must be hidden_size / num_attention_heads = {hidden} / {heads} here",
        )
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
