"""Names of a GPT's tensors and arguments in Megatron-LM, as tables.

Names are Megatron Core's; names of older and fused modules are translated to these first. Queries,
keys and values of a group of heads follow each other as in hybridpar, so all layouts are "same".
Source: megatron/core/models/gpt, megatron/core/transformer, megatron/training/checkpointing.py and
tools/checkpoint of NVIDIA Megatron-LM, and its megatron/legacy/model of before 2026 (names and
layouts only).
"""

from __future__ import annotations

import re

from hybridpar.checkpoint.huggingface.families import ON_OFF, Family, Key, Tensors

_LAYER = "decoder.layers.{layer}"


def _one(name: str) -> Tensors:
    return Tensors((name,))


GPT = Family(
    "megatron",
    {},
    "",
    model={"kind": "gpt"},
    tensors={
        "embedding.tokens": _one("embedding.word_embeddings"),
        "embedding.positions": _one("embedding.position_embeddings"),
        "layer.attention_norm": _one(f"{_LAYER}.input_layernorm"),
        "layer.attention.qkv": _one(f"{_LAYER}.self_attention.linear_qkv"),
        "layer.attention.q_norm": _one(f"{_LAYER}.self_attention.q_layernorm"),
        "layer.attention.k_norm": _one(f"{_LAYER}.self_attention.k_layernorm"),
        "layer.attention.out": _one(f"{_LAYER}.self_attention.linear_proj"),
        "layer.mlp_norm": _one(f"{_LAYER}.pre_mlp_layernorm"),
        "layer.mlp.up": _one(f"{_LAYER}.mlp.linear_fc1"),
        "layer.mlp.down": _one(f"{_LAYER}.mlp.linear_fc2"),
        "head.norm": _one("decoder.final_layernorm"),
        "head.language_model.projection": _one("output_layer"),
    },
    keys=(
        Key("num_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_query_groups", "num_kv_heads", None),
        Key("ffn_hidden_size", "ffn_hidden_size", None),
        Key("max_position_embeddings", "max_positions"),
        Key("vocab_size", "vocab_size"),
        Key("tie_word_embeddings", "tie_embeddings"),
        Key("kv_channels", "head_dim", None),
        Key("add_bias_linear", "bias", True),
        Key("add_bias_linear", "out_bias", True, ON_OFF),
        Key("add_qkv_bias", "qkv_bias", False, ON_OFF),
        Key("qk_layernorm", "qk_norm", False, {False: "none", True: "head"}),
        Key("softmax_scale", "attention_scale", None),
        Key("layernorm_zero_centered_gamma", "norm_zero_centered", False),
        Key("apply_layernorm_1p", "norm_zero_centered", False),
        Key(
            "normalization", "norm", "LayerNorm", {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
        ),
        Key("norm_epsilon", "norm_eps", 1e-5),
        Key("layernorm_epsilon", "norm_eps", 1e-5),
        Key(
            "position_embedding_type",
            "position",
            "learned_absolute",
            {"learned_absolute": "learned", "rope": "rotary"},
        ),
        Key("rotary_base", "rotary_base", 10000.0),
        Key("rotary_percent", "rotary_fraction", 1.0),
        Key(
            "activation",
            "activation",
            "gelu",
            {"gelu": "gelu", "gelu_exact": "gelu_exact", "swiglu": "swiglu"},
        ),
        Key("hidden_dropout", "dropout", 0.1),
        Key("attention_dropout", "attention_dropout", 0.1),
        Key("init_method_std", "init_std", 0.02),
    ),
    only={
        **dict.fromkeys(
            (
                "qk_l2_norm",
                "rotary_interleaved",
                "multi_latent_attention",
                "apply_residual_connection_post_layernorm",
                "squared_relu",
                "quick_geglu",
                "attention_output_gate",
                "use_mup",
                "enable_mhc_connections",
                "is_hybrid_model",
                "heterogeneous_block_specs",
                "retro_add_retriever",
                "use_grouped_gemm_for_dense_mlp",
                "enable_gpt_oss",
                "modelopt_enabled",
                "export_offline_model",
                "export_qk_l2_norm",
                "flextron",
            ),
            (False, None),
        ),
        **dict.fromkeys(
            (
                "num_experts",
                "num_moe_experts",
                "mtp_num_layers",
                "hybrid_layer_pattern",
                "hybrid_override_pattern",
                "heterogeneous_layers_config_path",
                "heterogeneous_layers_config_encoded_json",
                "experimental_attention_variant",
                "linear_attention_freq",
                "activation_func_clamp_value",
                "spec",
                "yaml_cfg",
                "decoder_num_layers",
            ),
            (None,),
        ),
        **dict.fromkeys(
            (
                "glu_linear_offset",
                "hybrid_attention_ratio",
                "hybrid_mlp_ratio",
                "export_num_medusa_heads",
                "export_num_eagle_layers",
                "export_num_mtp",
            ),
            (0, None),
        ),
        **dict.fromkeys(
            ("export_quant_cfg", "export_real_quant_cfg", "ammo_quant_cfg"), (None, "None")
        ),
        "rope_type": (None, "rope"),
        "softmax_type": ("vanilla",),
        "transformer_impl": ("transformer_engine", "local", "inference_optimized"),
    },
    computed=(r".*\._extra_state", r"rotary_pos_emb\.inv_freq"),
    settings="args",
)
RENAMED = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^(module\.)+", ""),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    )
)
"""Older names, and names of layers with a norm inside, with their names in the table above;
applied in this order."""

OLD = re.compile(r"\.(query_key_value|dense_h_to_4h)\.")
"""Older names that only models from before Megatron Core have."""

SPLIT = (
    (re.compile(r"(embedding\.word_embeddings|output_layer)\.weight"), 0),
    (re.compile(r".*\.linear_(qkv|fc1)\.(weight|bias)"), 0),
    (re.compile(r".*\.linear_(proj|fc2)\.weight"), 1),
)
"""The dimension that tensor parallelism splits, by name; all other tensors are equal on the tp
ranks."""

INERT = (
    r"argparse\.Namespace|types\.SimpleNamespace|_io\.BytesIO|signal\.Signals|pathlib\.\w*Path"
    r"|(megatron|numpy|transformer_engine|apex)(\.\w+)+"
)
"""Names that Megatron's files hold beside tensors: arguments, enumerations, states of random
generators."""
