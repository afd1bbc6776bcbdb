"""A config.json means what it means to transformers' own classes, also by its absent keys, and by
two names of one thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.exchange import OURS, edit_config, folder_of, make_theirs, save_ours

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import compare, export_folder, import_folder
from hybridpar.checkpoint.huggingface.configuration import canonical, choose_family, model_of
from hybridpar.checkpoint.huggingface.families import FAMILIES, REQUIRED, Family
from hybridpar.cli import main
from hybridpar.config import ModelConfig
from hybridpar.errors import ConfigError

CLASSES = {
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "gpt_neox": "GPTNeoXConfig",
    "bert": "BertConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
    "smollm3": "SmolLM3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
}


def their_config(kind: str, **settings: Any) -> Any:
    return getattr(pytest.importorskip("transformers"), CLASSES[kind])(**settings)


def rotary_of(config: Any) -> tuple[float, float]:
    """Base and share of the features, where any version of transformers keeps them."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    base = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return base, rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))


def windows_of(config: Any) -> list[int | None]:
    """The window of each layer, as their modules take it."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    types = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers
    types = ["sliding_attention"] * layers if types is None else types
    return [window if kind == "sliding_attention" else None for kind in types]


def kind_has_two_bases(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "rope_parameters", None) or {})


def assert_means(model: ModelConfig, config: Any, family: Family) -> None:
    """The model is what a configuration of transformers says."""
    ours = canonical(model)
    for key in family.keys:
        theirs = getattr(config, key.theirs, None)
        if theirs is None:  # another key's value, or a cap that is off
            assert ours[key.ours] == 0 or not key.writes_null
            continue
        if key.inverse_root:
            theirs = 0.0 if theirs == model.head_size else theirs**-0.5
        assert ours[key.ours] == (key.words[theirs] if key.words else theirs), key.theirs
    if family.rotary:
        assert (model.rotary_base, model.rotary_fraction) == rotary_of(config)
        head_dim = getattr(config, "head_dim", None)
        assert head_dim in (None, model.head_size)
    if family.has_rotary_layers:
        rotates = [model.layer_rotates(layer) for layer in range(model.num_layers)]
        assert rotates == [bool(one) for one in config.no_rope_layers]
    windows = [model.layer_window(layer) or None for layer in range(model.num_layers)]
    assert windows == windows_of(config)
    if kind_has_two_bases(config):
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        assert model.window_rotary_base == local


def test_all_families_are_here() -> None:
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_an_empty_configuration_is_the_default_of_their_class(kind: str) -> None:
    family, config = FAMILIES[kind], their_config(kind)
    assert all(key.default is not REQUIRED for key in family.keys)
    model, unknown = model_of({"model_type": kind}, family)
    assert unknown == []
    assert_means(model, config, family)
    for key, works in family.only.items():
        assert getattr(config, key, works[0]) == works[0], key
    assert family.aliases == type(config).attribute_map
    assert (family.windows is not None) == hasattr(their_config(kind), "sliding_window")


ODD = {
    "gpt2": {
        "n_layer": 3,
        "n_embd": 96,
        "n_head": 6,
        "n_inner": 50,
        "n_positions": 30,
        "vocab_size": 77,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu",
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "attn_pdrop": 0.3,
        "initializer_range": 0.1,
    },
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 50,
        "max_position_embeddings": 30,
        "vocab_size": 77,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.2,
        "initializer_range": 0.1,
        "rope_theta": 77.0,
    },
    "gpt_neox": {
        "num_hidden_layers": 3,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 50,
        "max_position_embeddings": 30,
        "vocab_size": 77,
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-3,
        "hidden_act": "gelu_new",
        "use_parallel_residual": False,
        "hidden_dropout": 0.2,
        "attention_dropout": 0.3,
        "initializer_range": 0.1,
        "rotary_emb_base": 77.0,
        "rotary_pct": 0.5,
    },
    "bert": {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "intermediate_size": 50,
        "max_position_embeddings": 30,
        "vocab_size": 77,
        "tie_word_embeddings": False,
        "layer_norm_eps": 1e-3,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "initializer_range": 0.1,
    },
}
ODD["mistral"] = {key: value for key, value in ODD["llama"].items() if "bias" not in key} | {
    "sliding_window": 30
}
_LIKE_LLAMA = {key: value for key, value in ODD["mistral"].items() if key != "sliding_window"}
ODD |= {
    "qwen2": _LIKE_LLAMA | {"use_sliding_window": False},
    "qwen3": _LIKE_LLAMA | {"head_dim": 40, "attention_bias": True},
    "olmo2": _LIKE_LLAMA | {"attention_bias": True},
    "phi3": _LIKE_LLAMA
    | {
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 20,
    },
    "smollm3": _LIKE_LLAMA
    | {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True},
}
_LIKE_GEMMA = _LIKE_LLAMA | {
    "head_dim": 40,
    "query_pre_attn_scalar": 100,
    "attn_logit_softcapping": 7.0,
    "final_logit_softcapping": 5.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": True,
    "sliding_window": 9,
}
ODD |= {
    "gemma2": _LIKE_GEMMA,
    "gemma3_text": {
        key: value for key, value in _LIKE_GEMMA.items() if key != "attn_logit_softcapping"
    }
    | {"rope_local_base_freq": 55.0},
}
ONE_ABSENT = [(kind, key) for kind, settings in ODD.items() for key in settings]


@pytest.mark.parametrize(("kind", "absent"), ONE_ABSENT, ids=str)
def test_any_absent_key_means_what_their_class_means(kind: str, absent: str) -> None:
    given = {key: value for key, value in ODD[kind].items() if key != absent}
    if absent == "resid_pdrop":
        given.pop("embd_pdrop")  # two keys of theirs are one of ours
    if absent == "embd_pdrop":
        given.pop("resid_pdrop")
    config = their_config(kind, **given)
    assert_means(model_of({"model_type": kind, **given}, FAMILIES[kind])[0], config, FAMILIES[kind])


def test_a_mistral_without_a_window_key_has_one(tmp_path: Path) -> None:
    settings = {**ODD["mistral"], "max_position_embeddings": 4097, "tie_word_embeddings": False}
    folder = make_theirs(tmp_path / "theirs", "mistral", **{**settings, "sliding_window": None})
    made = import_folder(folder, tmp_path / "ours")
    assert checkpoint.read_manifest(made.checkpoint).config.model.window == 0
    edit_config(folder, sliding_window="REMOVE")
    made = import_folder(folder, tmp_path / "windowed")
    assert compare(made.checkpoint, folder).ok
    model = checkpoint.read_manifest(made.checkpoint).config.model
    assert (model.window, model.max_positions) == (4096, 4097)


def test_kv_heads_of_a_mistral_are_eight_where_none_are_named() -> None:
    given = {
        "model_type": "mistral",
        "sliding_window": None,
        "hidden_size": 64,
        "num_attention_heads": 16,
    }
    assert model_of(given, FAMILIES["mistral"])[0].kv_heads == 8
    assert model_of({**given, "num_key_value_heads": None}, FAMILIES["mistral"])[0].kv_heads == 16
    assert model_of({**given, "model_type": "llama"}, FAMILIES["llama"])[0].kv_heads == 16


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "llama",
            {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_theta = 500\.0: contradicts rope_parameters\.rope_theta = 10000\.0: both say "
            r"the same thing",
        ),
        (
            "llama",
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default", "rope_theta": 1e4}},
            r"rope_theta = 500\.0: contradicts rope_scaling\.rope_theta = 10000\.0",
        ),
        (
            "llama",
            {
                "rope_theta": "REMOVE",
                "rope_scaling": {"type": "default", "rope_theta": 5.0},
                "rope_parameters": {"rope_theta": 7.0},
            },
            r"rope_scaling\.rope_theta = 5\.0: contradicts rope_parameters\.rope_theta = 7\.0",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "type": "linear"}},
            r"rope_parameters\.rope_type = 'default': contradicts rope_parameters\.type = 'linear'",
        ),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "linear"},
            },
            r"rope_scaling\.factor = None: missing; rope_type linear needs it",
        ),
        (
            "llama",
            {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 1\.0: contradicts rope_parameters\.partial_rotary_factor = "
            r"0\.5",
        ),
        (
            "gpt_neox",
            {"rope_parameters": {"rope_theta": 500.0}},
            r"rotary_emb_base = 10000\.0: contradicts rope_parameters\.rope_theta = 500\.0",
        ),
        (
            "gpt_neox",
            {"rope_theta": 500.0},
            r"rotary_emb_base = 10000\.0: contradicts rope_theta = 500\.0",
        ),
        (
            "gpt_neox",
            {"rotary_emb_base": "REMOVE", "rope_theta": 500.0},
            r"rotary_emb_base = 10000\.0: contradicts rope_theta = 500\.0",
        ),
        (
            "gpt_neox",
            {"partial_rotary_factor": 0.5},
            r"rotary_pct = 0\.25: contradicts partial_rotary_factor = 0\.5",
        ),
        ("gpt2", {"hidden_size": 96}, r"hidden_size = 96: contradicts n_embd = 48"),
        ("gpt2", {"num_attention_heads": 6}, r"num_attention_heads = 6: contradicts n_head = 3"),
        (
            "gpt2",
            {"max_position_embeddings": 10},
            r"max_position_embeddings = 10: contradicts n_positions = 20",
        ),
    ],
)
def test_two_names_with_two_values_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: str
) -> None:
    folder = folder_of(tmp_path, kind)
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=says):
        import_folder(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "llama",
            {"rope_theta": 500, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ),
        (
            "llama",
            {
                "rope_theta": "REMOVE",
                "rope_parameters": {"rope_theta": 500.0},
                "rope_scaling": None,
            },
        ),
        ("gpt_neox", {"rotary_emb_base": 500, "rope_theta": 500.0, "partial_rotary_factor": 0.25}),
        (
            "gpt_neox",
            {
                "rotary_emb_base": "REMOVE",
                "rotary_pct": "REMOVE",
                "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
            },
        ),
    ],
)
def test_two_names_with_one_value_are_read(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, kind)
    edit_config(folder, **changes)
    made = import_folder(folder, tmp_path / "ours")
    model = checkpoint.read_manifest(made.checkpoint).config.model
    assert (model.rotary_base, model.rotary_fraction) == (500.0, OURS[kind].rotary_fraction)


def test_other_names_of_gpt2_keys_are_read(tmp_path: Path) -> None:
    """Absent keys mean what they mean to transformers; 3 heads would be its default of 12, on
    tensors of equal shapes."""
    folder = folder_of(tmp_path, "gpt2")
    names = {
        "n_layer": "num_hidden_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    plain = json.loads((folder / "config.json").read_text())
    edit_config(
        folder,
        **dict.fromkeys(names, "REMOVE"),
        **{alias: plain[key] for key, alias in names.items()},
    )
    assert main(["import", str(folder), str(tmp_path / "ours"), "--verify"]) == 0


@pytest.mark.parametrize("kind", OURS)
def test_an_export_names_every_key(tmp_path: Path, kind: str) -> None:
    """So transformers reads the same model whatever its defaults are, also those of another
    version."""
    model = replace(
        OURS[kind],
        dropout=0.25,
        attention_dropout=0.125,
        init_std=0.03,
        norm_eps=3e-4,
        rotary_base=77.0,
    )
    if kind == "llama":
        model = replace(model, dropout=0.0)
    made = export_folder(save_ours(tmp_path / "made", model), tmp_path / "theirs")
    plain = json.loads((made.folder / "config.json").read_text())
    family = FAMILIES[kind]
    assert {key.theirs for key in family.keys} | set(family.only) <= plain.keys()
    loaded = pytest.importorskip("transformers").AutoConfig.from_pretrained(
        made.folder, local_files_only=True
    )
    assert_means(model, loaded, family)
    for key, works in family.only.items():
        assert getattr(loaded, key, works[0]) == works[0]


ROUTED = ModelConfig(
    num_layers=4,
    hidden_size=48,
    num_heads=4,
    position="rotary",
    norm="rms_norm",
    activation="swiglu",
    bias=False,
    num_experts=5,
)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "mixtral"),
        ({"moe_layers": "0110"}, "qwen3_moe"),
        ({"router_normalize": False, "qk_norm": "head"}, "qwen3_moe"),
        ({"router_normalize": False, "qk_norm": "full"}, "olmoe"),
        ({"num_experts": 0}, "llama"),
    ],
)
def test_the_family_of_a_model_with_experts(changes: dict[str, Any], kind: str) -> None:
    model = replace(ROUTED, **changes)
    if kind == "qwen3_moe":
        model = replace(model, qk_norm="head")
    assert choose_family(model).model_type == kind


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"router_score": "sigmoid"}, "router_score"),
        ({"router_bias_rate": 0.001}, "router_bias_rate"),
        ({"shared_expert_ffn_hidden_size": 8}, "shared_expert_ffn_hidden_size"),
        ({"moe_layers": "01"}, "moe_layers"),
    ],
)
def test_experts_that_no_family_has_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field} = .* its nearest model is mixtral"):
        choose_family(replace(ROUTED, **changes))


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({}, "1"),
        ({"decoder_sparse_step": 2}, "01"),
        ({"mlp_only_layers": [0]}, "011111"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2, 17]}, "000001"),
    ],
)
def test_layers_with_experts(given: dict[str, Any], pattern: str) -> None:
    family = FAMILIES["qwen3_moe"]
    plain = {"model_type": "qwen3_moe", "num_hidden_layers": 6, **given}
    model, unknown = model_of(plain, family)
    assert model.moe_layers == pattern
    assert not unknown
    config = their_config("qwen3_moe", num_hidden_layers=6, **given)
    theirs = [
        n not in config.mlp_only_layers and (n + 1) % config.decoder_sparse_step == 0
        for n in range(6)
    ]
    assert [model.layer_has_experts(n) for n in range(6)] == theirs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be an integer above 0"),
        ({"decoder_sparse_step": 9}, "decoder_sparse_step = 9: must leave one of the 6 layers"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers = '0': must be a list of numbers of layers"),
        ({"mlp_only_layers": [*range(6)]}, "mlp_only_layers = .*: must leave one of the 6 layers"),
        ({"num_experts": 0}, "num_local_experts = 0: must be above 0"),
        ({"num_experts": 4, "num_local_experts": 5}, "num_experts = 4: contradicts num_local_exp"),
        ({"norm_topk_prob": 3}, "norm_topk_prob = 3"),
    ],
)
def test_wrong_keys_of_experts_are_named(given: dict[str, Any], says: str) -> None:
    plain = {"model_type": "qwen3_moe", "num_hidden_layers": 6, **given}
    with pytest.raises(ConfigError, match=says):
        model_of(plain, FAMILIES["qwen3_moe"])


def test_clipped_queries_of_an_olmoe_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_qkv = 8\.0: hybridpar has no such feature"):
        model_of({"model_type": "olmoe", "clip_qkv": 8.0}, FAMILIES["olmoe"])
