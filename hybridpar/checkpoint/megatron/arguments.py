"""Megatron's arguments, as its checkpoints hold them, in the words of the table in family.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridpar.checkpoint.huggingface.configuration import model_of
from hybridpar.checkpoint.megatron.family import GPT
from hybridpar.config import ModelConfig
from hybridpar.errors import config_error

_GPT2_VOCABULARY = 50257


def model_of_arguments(args: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """The model that was trained with these arguments, with so many rows of the embedding.

    Raises: ConfigError naming every argument that is missing, wrong, or asks for what we cannot compute.
    """
    bias = args.get("add_bias_linear", not args.get("disable_bias_linear", False))
    plain = {key.theirs: args[key.theirs] for key in GPT.keys if args.get(key.theirs) is not None}
    plain |= {key: args[key] for key in GPT.only if key in args}
    plain |= {
        "vocab_size": vocab_size, "add_bias_linear": bias, "activation": _activation(args, bias=bias),
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "num_query_groups": args.get("num_query_groups") if args.get("group_query_attention") else None,
        "add_qkv_bias_alone": bool(args.get("add_qkv_bias")) and not bias,
        "norm_epsilon": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))}
    if args.get("use_rotary_position_embeddings"):
        plain["position_embedding_type"] = "rope"  # the older way to say it
    model, _ = model_of(plain, GPT)
    if (dim := args.get("kv_channels")) is not None and dim * model.num_heads != model.hidden_size:
        raise config_error("args: kv_channels", dim, "must be hidden_size / num_attention_heads = "
                           f"{model.hidden_size} / {model.num_heads} here")
    if model.position == "learned" and args.get("add_position_embedding") is False:
        raise config_error("args: add_position_embedding", False, "hybridpar has no model without positions", "True")
    return model


def _activation(args: Mapping[str, Any], *, bias: bool) -> str:
    """Megatron computes its fused gelu and openai_gelu by tanh, its plain one by the error function."""
    if args.get("swiglu"):
        return "swiglu"
    fused = args.get("bias_gelu_fusion", True) and bias
    return "gelu" if fused or args.get("openai_gelu") else "gelu_exact"


def true_vocabulary(args: Mapping[str, Any], rows: int, asked: int | None) -> tuple[int, str]:
    """How many rows of the embedding are tokens, and what to say of that.

    Megatron pads the vocabulary to a multiple of make_vocab_size_divisible_by * tensor_model_parallel_size, and does
    not always write down how large it was. Raises: ConfigError if `asked` is more than there are.
    """
    if asked is not None:
        if not 0 < asked <= rows:
            raise config_error("vocab_size", asked, f"the embedding has {rows} rows", str(rows))
        return asked, ""
    size = _GPT2_VOCABULARY if args.get("tokenizer_type") == "GPT2BPETokenizer" else args.get("vocab_size")
    if isinstance(size, int) and 0 < size <= rows:
        size += args.get("tokenizer_type") == "NullTokenizer"  # older ones add an end of document to it
        return min(size, rows), ""
    return rows, f"all {rows} rows of the embedding are kept; if some are padding, say --vocab_size"
