"""Names of the model families of Hugging Face transformers, as tables; nothing here computes.

A family lists the tensors that make up each module of hybridpar's model, the keys of config.json
that match keys of [model], the keys that may only have certain values, and what else its files may
hold. A key that config.json lacks has the default of the constructor of transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

REQUIRED = object()
"""Default of a key that must be present."""


@dataclass(frozen=True)
class Tensors:
    """Tensors that make up a module: names without .weight or .bias, and their layout (layouts.py).

    `{layer}` and `{expert}` stand for the number of a layer and of an expert of it, from 0.
    """

    names: tuple[str, ...]
    layout: str = "same"


@dataclass(frozen=True)
class Key:
    """A key of config.json that matches a key of [model].

    `words`: hybridpar's values for theirs, the first for export. `default`: the value of an absent
    key. `is_nullable`: null is allowed, and is 0 in [model], where it stands for another key's
    value; a key whose default is None is nullable anyway. `writes_null`: 0 in [model] is written as
    null. `inverse_root`: our value is 1 / sqrt(theirs). Two of their keys may match one of ours, or
    one of theirs two of ours; they must then agree.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    words: Mapping[Any, str] = field(default_factory=dict)
    is_nullable: bool = False
    writes_null: bool = False
    inverse_root: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a family.

    `base`, `fraction`: keys of config.json if rope_parameters does not have them: the base, and the
    share of a head's features. `scalings`: values of rope_type besides default. `renamed`: older
    names of these. `window_base`: the default base of layers with windows, if they have one of
    their own. `original_positions`: the default of that key, if the family has it beside
    rope_scaling.
    """

    base: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    default_base: float = 10000.0
    default_fraction: float = 1.0
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    renamed: Mapping[str, str] = field(default_factory=dict)
    window_base: float | None = None
    original_positions: int | None = None


@dataclass(frozen=True)
class Windows:
    """Sliding windows of a family.

    `default`: the default of sliding_window. `has_switch`: they are off unless use_sliding_window.
    `has_types`: layer_types names the layers that have one. `pattern`: the layers that have one
    where layer_types is absent: all of them, those from max_window_layers on, those without rotary
    positions, or all but every sliding_window_pattern'th. `default_pattern`: the default of the
    latter, or of max_window_layers.
    """

    default: int | None
    has_switch: bool = False
    has_types: bool = False
    pattern: Literal["all", "last", "without rotary", "most"] = "all"
    default_pattern: int = 0


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    `architectures`: the class to export for, by model.sentence_head ("" if that has no meaning).
    `model`: keys of [model] that all models of the family share. `tensors`: by module, or by
    parameter where that differs; the parts are embedding, layer and head. `copies`: tensors that
    may be in the files a second time, by the name of the first. `heads`: modules that files of a
    bare model lack, all of a group at once; they are then initialized. `only`: keys of config.json
    with the values that are supported; the first is the default. `computed`: patterns of names in
    the files that are not parameters. `renamed`: endings in older or newer files, and their names
    in `tensors`. `rotary`: where rotary settings are, if the family has them. `aliases`: other
    names of keys, which transformers reads too (the class's attribute_map). `windows`: its sliding
    windows, if it has them. `has_rotary_layers`: some layers have no rotary positions
    (no_rope_layers). `has_dense_layers`: some layers have an MLP in place of experts
    (decoder_sparse_step, mlp_only_layers). `scales_embeddings`: embeddings are multiplied by
    sqrt(hidden_size).
    `exported`: the alias of a key that export writes, for readers that do not know the key.
    `settings`: the file of its keys, for messages.
    """

    model_type: str
    architectures: Mapping[str, str]
    prefix: str
    model: Mapping[str, Any]
    tensors: Mapping[str, Tensors]
    keys: tuple[Key, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[tuple[str, ...], ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    rotary: Rotary | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    windows: Windows | None = None
    has_rotary_layers: bool = False
    has_dense_layers: bool = False
    scales_embeddings: bool = False
    exported: Mapping[str, str] = field(default_factory=dict)
    settings: str = "config.json"


def _one(name: str, layout: str = "same") -> Tensors:
    return Tensors((name,), layout)


EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "pruned_heads": ({}, None),
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "quantization"), (None,)),
    **dict.fromkeys(
        (
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "residual_multiplier",
        ),
        (None, 1.0, 1),
    ),
}
"""Keys whose other values are not supported, unless a key of the family has them."""

SAYS_NOTHING = frozenset(
    {
        "model_type",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "_name_or_path",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "sentence_head",
    }
)
"""Keys that do not affect what a language model computes (sentence_head: hybridpar's own, which
import reads separately)."""

PLAIN: Mapping[str, Any] = {
    "norm_zero_centered": False,
    "qk_norm": "none",
    "attention_scale": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "logit_scale": 1.0,
    "num_experts": 0,
}
"""Keys of [model] without the features that only some families have."""

ON_OFF: Mapping[Any, str] = {True: "on", False: "off"}

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "gelu_fast": "gelu"}

GPT2 = Family(
    "gpt2",
    {"": "GPT2LMHeadModel"},
    "transformer.",
    model={
        **PLAIN,
        "kind": "gpt",
        "position": "learned",
        "norm": "layer_norm",
        "norm_position": "pre",
        "bias": True,
        "qkv_bias": "on",
        "out_bias": "on",
        "parallel_residual": False,
    },
    tensors={
        "embedding.tokens": _one("transformer.wte"),
        "embedding.positions": _one("transformer.wpe"),
        "layer.attention_norm": _one("transformer.h.{layer}.ln_1"),
        "layer.attention.qkv": _one("transformer.h.{layer}.attn.c_attn", "qkv_conv1d"),
        "layer.attention.out": _one("transformer.h.{layer}.attn.c_proj", "conv1d"),
        "layer.mlp_norm": _one("transformer.h.{layer}.ln_2"),
        "layer.mlp.up": _one("transformer.h.{layer}.mlp.c_fc", "conv1d"),
        "layer.mlp.down": _one("transformer.h.{layer}.mlp.c_proj", "conv1d"),
        "head.norm": _one("transformer.ln_f"),
        "head.language_model.projection": _one("lm_head"),
    },
    keys=(
        Key("n_layer", "num_layers", 12),
        Key("n_embd", "hidden_size", 768),
        Key("n_head", "num_heads", 12),
        Key("n_inner", "ffn_hidden_size", None),
        Key("n_positions", "max_positions", 1024),
        Key("vocab_size", "vocab_size", 50257),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("activation_function", "activation", "gelu_new", GELUS),
        Key("resid_pdrop", "dropout", 0.1),
        Key("embd_pdrop", "dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("initializer_range", "init_std", 0.02),
    ),
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    computed=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    ignored=frozenset(
        {
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    ),
    aliases={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
)

LLAMA = Family(
    "llama",
    {"": "LlamaForCausalLM"},
    "model.",
    model={
        **PLAIN,
        "kind": "gpt",
        "position": "rotary",
        "norm": "rms_norm",
        "norm_position": "pre",
        "activation": "swiglu",
        "rotary_fraction": 1.0,
        "parallel_residual": False,
    },
    tensors={
        "embedding.tokens": _one("model.embed_tokens"),
        "layer.attention_norm": _one("model.layers.{layer}.input_layernorm"),
        "layer.attention.qkv": Tensors(
            tuple(f"model.layers.{{layer}}.self_attn.{part}_proj" for part in "qkv"), "qkv"
        ),
        "layer.attention.out": _one("model.layers.{layer}.self_attn.o_proj"),
        "layer.mlp_norm": _one("model.layers.{layer}.post_attention_layernorm"),
        "layer.mlp.up": Tensors(
            ("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj"), "gate_up"
        ),
        "layer.mlp.down": _one("model.layers.{layer}.mlp.down_proj"),
        "head.norm": _one("model.norm"),
        "head.language_model.projection": _one("lm_head"),
    },
    keys=(
        Key("num_hidden_layers", "num_layers", 32),
        Key("hidden_size", "hidden_size", 4096),
        Key("num_attention_heads", "num_heads", 32),
        Key("num_key_value_heads", "num_kv_heads", None),
        Key("intermediate_size", "ffn_hidden_size", 11008),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("vocab_size", "vocab_size", 32000),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        Key("head_dim", "head_dim", None),
        Key("attention_bias", "qkv_bias", False, ON_OFF),
        Key("attention_bias", "out_bias", False, ON_OFF),
        Key("mlp_bias", "bias", False),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("initializer_range", "init_std", 0.02),
    ),
    computed=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    ignored=frozenset({"pretraining_tp"}),
    rotary=Rotary(),
)

_NO_BIAS = {"bias": False, "qkv_bias": "off", "out_bias": "off"}
_BIASES = ("bias", "qkv_bias", "out_bias")


def _like_llama(
    model_type: str,
    name: str,
    model: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    keys: tuple[Key, ...] = (),
    without: tuple[str, ...] = (),
    **others: Any,
) -> Family:
    """Return a family that differs from LLaMA in some of its rows.

    Args:
        model: Keys of [model] that all its models share, besides LLaMA's.
        defaults: Its defaults that differ from LLaMA's; None makes a key nullable.
        keys: Keys that it has in place of LLaMA's for the same keys of [model], or besides them.
        without: Keys of [model] that it has no key for.
        others: Further fields of the family that differ.
    """
    replaced = {key.ours for key in keys} | {*without}
    shared = {name: value for name, value in LLAMA.model.items() if name not in replaced}
    own = tuple(
        replace(key, default=defaults.get(key.theirs, key.default), is_nullable=key.default is None)
        for key in LLAMA.keys
        if key.ours not in replaced
    )
    return replace(
        LLAMA,
        model_type=model_type,
        architectures={"": f"{name}ForCausalLM"},
        model={**shared, **model},
        keys=own + keys,
        **others,
    )


MISTRAL = _like_llama(
    "mistral",
    "Mistral",
    _NO_BIAS,
    {
        "intermediate_size": 14336,
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
    },
    without=_BIASES,
    windows=Windows(4096),
)

_OF_QWEN = {
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}
_QWEN_WINDOWS = Windows(4096, has_switch=True, has_types=True, pattern="last", default_pattern=28)

QWEN2 = _like_llama(
    "qwen2",
    "Qwen2",
    {"bias": False, "qkv_bias": "on", "out_bias": "off"},
    _OF_QWEN,
    without=_BIASES,
    windows=_QWEN_WINDOWS,
)

_QK_NORMS = {
    "layer.attention.q_norm": _one("model.layers.{layer}.self_attn.q_norm"),
    "layer.attention.k_norm": _one("model.layers.{layer}.self_attn.k_norm"),
}

QWEN3 = _like_llama(
    "qwen3",
    "Qwen3",
    {"bias": False, "qk_norm": "head"},
    {**_OF_QWEN, "head_dim": 128},
    without=("bias",),
    tensors={**LLAMA.tensors, **_QK_NORMS},
    windows=_QWEN_WINDOWS,
)

OLMO2 = _like_llama(
    "olmo2",
    "Olmo2",
    {"bias": False, "qk_norm": "full", "norm_position": "output"},
    {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    without=("bias",),
    tensors={
        **{name: of for name, of in LLAMA.tensors.items() if not name.endswith("_norm")},
        **_QK_NORMS,
        "layer.attention_output_norm": _one("model.layers.{layer}.post_attention_layernorm"),
        "layer.mlp_output_norm": _one("model.layers.{layer}.post_feedforward_layernorm"),
    },
)

PHI3 = _like_llama(
    "phi3",
    "Phi3",
    _NO_BIAS,
    {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
    },
    keys=(Key("resid_pdrop", "dropout", 0.0), Key("embd_pdrop", "dropout", 0.0)),
    without=(*_BIASES, "rotary_fraction"),
    tensors={
        **LLAMA.tensors,
        "layer.attention.qkv": _one("model.layers.{layer}.self_attn.qkv_proj", "qkv_rows"),
        "layer.mlp.up": _one("model.layers.{layer}.mlp.gate_up_proj"),
    },
    rotary=Rotary(
        scalings=("longrope",),
        renamed={"su": "longrope", "yarn": "longrope"},
        original_positions=4096,
    ),
    windows=Windows(None),
)

SMOLLM3 = _like_llama(
    "smollm3",
    "SmolLM3",
    {},
    {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    rotary=Rotary(default_base=2_000_000.0),
    windows=Windows(None, has_switch=True, has_types=True, pattern="without rotary"),
    has_rotary_layers=True,
)

_GEMMA_TENSORS = {
    **LLAMA.tensors,
    "layer.attention_output_norm": _one("model.layers.{layer}.post_attention_layernorm"),
    "layer.mlp_norm": _one("model.layers.{layer}.pre_feedforward_layernorm"),
    "layer.mlp_output_norm": _one("model.layers.{layer}.post_feedforward_layernorm"),
}
_OF_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_OF_ALL_GEMMAS = {
    "bias": False,
    "norm_position": "sandwich",
    "norm_zero_centered": True,
    "activation": "geglu",
}


_GEMMA_KEYS = (
    Key(
        "hidden_activation",
        "activation",
        "gelu_pytorch_tanh",
        {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"},
    ),
    Key("query_pre_attn_scalar", "attention_scale", 256, inverse_root=True),
)


def _cap(theirs: str, ours: str, default: float | None) -> Key:
    return Key(theirs, ours, default, is_nullable=True, writes_null=True)


GEMMA2 = _like_llama(
    "gemma2",
    "Gemma2",
    _OF_ALL_GEMMAS,
    _OF_GEMMA,
    keys=(
        *_GEMMA_KEYS,
        _cap("attn_logit_softcapping", "attention_softcap", 50.0),
        _cap("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    without=("bias",),
    tensors=_GEMMA_TENSORS,
    only={"use_bidirectional_attention": (None, False)},
    windows=Windows(4096, has_types=True, pattern="most", default_pattern=2),
    ignored=LLAMA.ignored | {"cache_implementation", "hidden_act"},
    scales_embeddings=True,
)

# Transformers knows attn_logit_softcapping in Gemma 3's configuration and computes without it.
GEMMA3 = _like_llama(
    "gemma3_text",
    "Gemma3",
    {**_OF_ALL_GEMMAS, "qk_norm": "head"},
    {**_OF_GEMMA, "max_position_embeddings": 131072, "vocab_size": 262208},
    keys=(*_GEMMA_KEYS, _cap("final_logit_softcapping", "logit_softcap", None)),
    without=("bias",),
    tensors={**_GEMMA_TENSORS, **_QK_NORMS},
    only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    rotary=Rotary(default_base=1e6, window_base=1e4),
    windows=Windows(4096, has_types=True, pattern="most", default_pattern=6),
    ignored=LLAMA.ignored | {"cache_implementation", "hidden_act"},
    scales_embeddings=True,
)

_ROUTED = {
    "router_score": "softmax",
    "router_scale": 1.0,
    "router_bias_rate": 0.0,
    "shared_expert_ffn_hidden_size": 0,
}
_EXPERTS = {
    "layer.mlp.router": _one("model.layers.{layer}.mlp.gate"),
    "layer.mlp.experts.{expert}.up": Tensors(
        (
            "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
            "model.layers.{layer}.mlp.experts.{expert}.up_proj",
        ),
        "gate_up",
    ),
    "layer.mlp.experts.{expert}.down": _one("model.layers.{layer}.mlp.experts.{expert}.down_proj"),
}
_OF_MIXTRAL = "model.layers.{layer}.block_sparse_moe"

MIXTRAL = _like_llama(
    "mixtral",
    "Mixtral",
    {**_NO_BIAS, **_ROUTED, "router_normalize": True, "moe_layers": "1"},
    {
        "intermediate_size": 14336,
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    keys=(
        Key("intermediate_size", "expert_ffn_hidden_size", 14336),
        Key("num_local_experts", "num_experts", 8),
        Key("num_experts_per_tok", "router_topk", 2),
        Key("router_aux_loss_coef", "router_balance_loss", 0.001),
    ),
    without=(*_BIASES, "num_experts", "ffn_hidden_size"),
    tensors={
        **LLAMA.tensors,
        "layer.mlp.router": _one(f"{_OF_MIXTRAL}.gate"),
        "layer.mlp.experts.{expert}.up": Tensors(
            (f"{_OF_MIXTRAL}.experts.{{expert}}.w1", f"{_OF_MIXTRAL}.experts.{{expert}}.w3"),
            "gate_up",
        ),
        "layer.mlp.experts.{expert}.down": _one(f"{_OF_MIXTRAL}.experts.{{expert}}.w2"),
    },
    ignored=LLAMA.ignored | {"output_router_logits", "router_jitter_noise"},
    rotary=Rotary(default_base=1e6),
    windows=Windows(None),
    aliases={"num_experts": "num_local_experts"},
)

QWEN3_MOE = _like_llama(
    "qwen3_moe",
    "Qwen3Moe",
    {**_ROUTED, "bias": False, "qk_norm": "head"},
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
    keys=(
        Key("moe_intermediate_size", "expert_ffn_hidden_size", 768),
        Key("num_local_experts", "num_experts", 128),
        Key("num_experts_per_tok", "router_topk", 8),
        Key("norm_topk_prob", "router_normalize", False),
        Key("router_aux_loss_coef", "router_balance_loss", 0.001),
    ),
    without=("bias", "num_experts"),
    tensors={**LLAMA.tensors, **_QK_NORMS, **_EXPERTS},
    ignored=LLAMA.ignored | {"output_router_logits"},
    windows=Windows(4096, has_switch=True),
    has_dense_layers=True,
    aliases={"num_experts": "num_local_experts"},
    exported={"num_local_experts": "num_experts"},
)

OLMOE = _like_llama(
    "olmoe",
    "Olmoe",
    {**_ROUTED, "bias": False, "qk_norm": "full", "moe_layers": "1"},
    {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50304,
    },
    keys=(
        Key("intermediate_size", "expert_ffn_hidden_size", 2048),
        Key("num_experts", "num_experts", 64),
        Key("num_experts_per_tok", "router_topk", 8),
        Key("norm_topk_prob", "router_normalize", False),
        Key("router_aux_loss_coef", "router_balance_loss", 0.01),
    ),
    without=("bias", "head_dim", "num_experts", "ffn_hidden_size"),
    tensors={**LLAMA.tensors, **_QK_NORMS, **_EXPERTS},
    only={"clip_qkv": (None,)},
    ignored=LLAMA.ignored | {"output_router_logits"},
    aliases={"num_local_experts": "num_experts"},
)

_NEOX_LAYER = "gpt_neox.layers.{layer}"

GPT_NEOX = Family(
    "gpt_neox",
    {"": "GPTNeoXForCausalLM"},
    "gpt_neox.",
    model={
        **PLAIN,
        "kind": "gpt",
        "position": "rotary",
        "norm": "layer_norm",
        "norm_position": "pre",
        "bias": True,
        "qkv_bias": "on",
        "out_bias": "on",
    },
    tensors={
        "embedding.tokens": _one("gpt_neox.embed_in"),
        "layer.attention_norm": _one(f"{_NEOX_LAYER}.input_layernorm"),
        "layer.attention.qkv": _one(f"{_NEOX_LAYER}.attention.query_key_value"),
        "layer.attention.out": _one(f"{_NEOX_LAYER}.attention.dense"),
        "layer.mlp_norm": _one(f"{_NEOX_LAYER}.post_attention_layernorm"),
        "layer.mlp.up": _one(f"{_NEOX_LAYER}.mlp.dense_h_to_4h"),
        "layer.mlp.down": _one(f"{_NEOX_LAYER}.mlp.dense_4h_to_h"),
        "head.norm": _one("gpt_neox.final_layer_norm"),
        "head.language_model.projection": _one("embed_out"),
    },
    keys=(
        Key("num_hidden_layers", "num_layers", 44),
        Key("hidden_size", "hidden_size", 6144),
        Key("num_attention_heads", "num_heads", 64),
        Key("intermediate_size", "ffn_hidden_size", 24576),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("vocab_size", "vocab_size", 50432),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("hidden_act", "activation", "gelu", GELUS),
        Key("use_parallel_residual", "parallel_residual", True),
        Key("hidden_dropout", "dropout", 0.0),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("initializer_range", "init_std", 0.02),
    ),
    only={"attention_bias": (True,)},
    computed=(
        r"gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq",
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",
    ),
    renamed={"lm_head.weight": "embed_out.weight"},
    rotary=Rotary("rotary_emb_base", "rotary_pct", default_fraction=0.25, scalings=()),
)

BERT = Family(
    "bert",
    {"nsp": "BertForPreTraining", "sop": "BertForPreTraining", "none": "BertForMaskedLM"},
    "bert.",
    model={
        **PLAIN,
        "kind": "bert",
        "position": "learned",
        "norm": "layer_norm",
        "norm_position": "post",
        "bias": True,
        "qkv_bias": "on",
        "out_bias": "on",
        "parallel_residual": False,
    },
    tensors={
        "embedding.tokens": _one("bert.embeddings.word_embeddings"),
        "embedding.positions": _one("bert.embeddings.position_embeddings"),
        "embedding.segments": _one("bert.embeddings.token_type_embeddings"),
        "embedding.norm": _one("bert.embeddings.LayerNorm"),
        "layer.attention.qkv": Tensors(
            tuple(
                f"bert.encoder.layer.{{layer}}.attention.self.{part}"
                for part in ("query", "key", "value")
            ),
            "qkv",
        ),
        "layer.attention.out": _one("bert.encoder.layer.{layer}.attention.output.dense"),
        "layer.attention_norm": _one("bert.encoder.layer.{layer}.attention.output.LayerNorm"),
        "layer.mlp.up": _one("bert.encoder.layer.{layer}.intermediate.dense"),
        "layer.mlp.down": _one("bert.encoder.layer.{layer}.output.dense"),
        "layer.mlp_norm": _one("bert.encoder.layer.{layer}.output.LayerNorm"),
        "head.transform": _one("cls.predictions.transform.dense"),
        "head.norm": _one("cls.predictions.transform.LayerNorm"),
        "head.language_model.projection.weight": _one("cls.predictions.decoder.weight"),
        "head.language_model.projection.bias": _one("cls.predictions.bias"),
        "head.pooler": _one("bert.pooler.dense"),
        "head.classifier": _one("cls.seq_relationship"),
    },
    keys=(
        Key("num_hidden_layers", "num_layers", 12),
        Key("hidden_size", "hidden_size", 768),
        Key("num_attention_heads", "num_heads", 12),
        Key("intermediate_size", "ffn_hidden_size", 3072),
        Key("max_position_embeddings", "max_positions", 512),
        Key("vocab_size", "vocab_size", 30522),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("hidden_act", "activation", "gelu", GELUS),
        Key("hidden_dropout_prob", "dropout", 0.1),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Key("initializer_range", "init_std", 0.02),
    ),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    heads=(("head.transform", "head.norm", "head.language_model.projection"), ("head.classifier",)),
    only={"type_vocab_size": (2,), "position_embedding_type": ("absolute",)},
    computed=(r"bert\.embeddings\.position_ids",),
    renamed={".gamma": ".weight", ".beta": ".bias"},
)

FAMILIES = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        OLMO2,
        PHI3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        GPT_NEOX,
        BERT,
    )
}
"""Families by model_type. Export uses the first that fits a model."""
