"""Arguments of Megatron-LM that are translated, passed over and refused, without Megatron Core."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint.megatron_core import CHOICES, DEFAULTS, HARMLESS, REFUSED, SIZE

from hybridpar.checkpoint.megatron.arguments import model_of_arguments
from hybridpar.checkpoint.megatron.family import GPT
from hybridpar.checkpoint.megatron.ignored import is_ignored
from hybridpar.errors import ConfigError

PLAIN: dict[str, Any] = {
    "kind": "gpt",
    "num_layers": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 0,
    "ffn_hidden_size": 92,
    "seq_length": 20,
    "vocab_size": 101,
    "tie_embeddings": True,
    "position": "learned",
    "rotary_base": 10000.0,
    "norm": "layer_norm",
    "norm_eps": 1e-5,
    "norm_position": "auto",
    "activation": "gelu",
    "bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "rotary_fraction": 1.0,
    "rotary_scaling": "none",
    "rotary_factor": 1.0,
    "rotary_original_positions": 0,
    "rotary_pattern": "1",
    "head_dim": 0,
    "qkv_bias": "auto",
    "out_bias": "auto",
    "qk_norm": "none",
    "norm_zero_centered": False,
    "attention_scale": 0.0,
    "window": 0,
    "window_pattern": "1",
}


def keys_of(args: dict[str, Any], *, is_core: bool = True) -> dict[str, Any]:
    found = vars(model_of_arguments(args, 101, is_core=is_core))
    return {key: found[key] for key in PLAIN}


def model(is_core: bool = True, without: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    args = {name: value for name, value in (DEFAULTS | SIZE | more).items() if name not in without}
    return keys_of(args, is_core=is_core)


def refused(is_core: bool = True, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        model(is_core, **more)
    return [problem.field for problem in refusal.value.problems]


def test_all_arguments_of_all_versions_are_known_as_they_are_by_default() -> None:
    assert len(DEFAULTS) > 900
    assert model() == PLAIN
    assert keys_of(SIZE | {"bias_gelu_fusion": True}) == PLAIN  # as old versions have it


def test_the_value_of_what_is_ignored_does_not_matter() -> None:
    others = {"tokenizer_type", "padded_vocab_size", "bias_swiglu_fusion", *GPT.only}
    assert not {name for name in {*CHOICES, *SIZE, *REFUSED} - others if is_ignored(name)}
    assert {name for name in HARMLESS if not is_ignored(name)} == {"a_flag_of_a_fork"}
    assert (
        model(**{name: 12345 for name in DEFAULTS if is_ignored(name) and name not in GPT.only})
        == PLAIN
    )


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_missing_features_are_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}) == [f"args: {name}"]


@pytest.mark.parametrize("value", [True, 0, 1, 0.0, "x", [0]])
def test_unknown_arguments_must_be_off(value: Any) -> None:
    assert refused(another=value) == ["args: another"]
    for off in (None, False, "", [], (), {}):
        assert model(another=off) == PLAIN


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        (
            {"use_rotary_position_embeddings": True, "rotary_base": 500},
            {"position": "rotary", "rotary_base": 500.0},
        ),
        (
            {"position_embedding_type": "rope", "add_position_embedding": False},
            {"position": "rotary"},
        ),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.5},
            {"position": "rotary", "rotary_fraction": 0.5},
        ),
        ({"swiglu": True, "use_te_activation_func": True}, {"activation": "swiglu"}),
        (
            {"add_bias_linear": False, "add_qkv_bias": False},
            {"bias": False, "activation": "gelu_exact"},
        ),
        ({"group_query_attention": True, "num_query_groups": 2}, {"num_kv_heads": 2}),
        ({"num_query_groups": 2}, {}),
        (
            {"normalization": "RMSNorm", "norm_epsilon": 1e-3, "layernorm_epsilon": 1e-3},
            {"norm": "rms_norm", "norm_eps": 1e-3},
        ),
        ({"untie_embeddings_and_output_weights": True}, {"tie_embeddings": False}),
        ({"add_qkv_bias": True}, {}),
        (
            {"add_bias_linear": False, "add_qkv_bias": True},
            {"bias": False, "qkv_bias": "on", "activation": "gelu_exact"},
        ),
        ({"kv_channels": 8}, {"head_dim": 8}),
        (
            {"normalization": "RMSNorm", "qk_layernorm": True, "apply_layernorm_1p": True},
            {"norm": "rms_norm", "qk_norm": "head", "norm_zero_centered": True},
        ),
        (
            {
                "position_embedding_type": "rope",
                "use_rope_scaling": True,
                "rope_scaling_factor": 32,
                "no_rope_freq": 2,
            },
            {
                "position": "rotary",
                "rotary_scaling": "llama3",
                "rotary_factor": 32.0,
                "rotary_original_positions": 8192,
                "rotary_pattern": "10",
            },
        ),
        (
            {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
            {"position": "rotary", "rotary_scaling": "linear", "rotary_factor": 4.0},
        ),
        ({"softmax_scale": 0.5}, {"attention_scale": 0.5}),
        ({"window_size": (4, 0)}, {"window": 5}),
        (
            {"window_size": [4, 0], "window_attn_skip_freq": 2},
            {"window": 5, "window_pattern": "10"},
        ),
    ],
)
def test_translated_arguments(more: dict[str, Any], ours: dict[str, Any]) -> None:
    assert model(**more) == PLAIN | ours


@pytest.mark.parametrize("name", ["norm_epsilon", "layernorm_epsilon"])
def test_either_name_of_the_epsilon(name: str) -> None:
    other = {"norm_epsilon": "layernorm_epsilon", "layernorm_epsilon": "norm_epsilon"}[name]
    assert model(without=(other,), **{name: 1e-3}) == PLAIN | {"norm_eps": 1e-3}
    assert refused(**{name: 1e-3, other: 1e-5}) == ["args: layernorm_epsilon"]


@pytest.mark.parametrize(
    ("is_core", "more", "named"),
    [
        (True, {"bias_gelu_fusion": None}, "bias_gelu_fusion"),
        (True, {"use_te_activation_func": True}, "use_te_activation_func"),
        (True, {"swiglu": "False"}, "swiglu"),
        (True, {"add_bias_linear": 1}, "add_bias_linear"),
        (False, {"position_embedding_type": "rope", "rotary_base": 500}, "rotary_base"),
        (True, {"kv_channels": "12"}, "kv_channels"),
        (True, {"add_position_embedding": False}, "add_position_embedding"),
        (True, {"export_num_medusa_heads": 2}, "export_num_medusa_heads"),
        (True, {"rope_type": "yarn"}, "rope_type"),
        (False, {"use_rope_scaling": True, "position_embedding_type": "rope"}, "use_rope_scaling"),
        (True, {"qk_layernorm": True}, "qk_layernorm"),
        (True, {"window_size": (4, 1)}, "window_size"),
        (True, {"window_size": (4, 0), "window_attn_skip_freq": [1]}, "window_attn_skip_freq"),
    ],
)
def test_conflicting_arguments_and_bad_values(
    is_core: bool, more: dict[str, Any], named: str
) -> None:
    assert f"args: {named}" in refused(is_core, **more)


def test_all_are_named_at_once() -> None:
    assert set(refused(qk_l2_norm=True, another=3, kv_channels="8", swiglu="yes")) == {
        "args: qk_l2_norm",
        "args: another",
        "args: kv_channels",
        "args: swiglu",
    }
