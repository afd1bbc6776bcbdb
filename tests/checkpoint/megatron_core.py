"""Megatron Core's own GPT for Megatron-LM's arguments, with random weights, and its checkpoint.

Written from what Megatron-LM does with its arguments; nothing of hybridpar takes part.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

DEFAULTS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "megatron_arguments.json").read_text()
)
"""Every argument of Megatron-LM that a model's checkpoint holds, of versions from 2023 to 2026, as
it is if nothing is asked for but a size."""

SIZE = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 12,
    "ffn_hidden_size": 92,
    "max_position_embeddings": 20,
    "padded_vocab_size": 101,
    "vocab_size": 101,
    "tokenizer_type": "HuggingFaceTokenizer",
}


CHOICES: dict[str, list[Any]] = {
    "num_layers": [1, 2, 3],
    "num_attention_heads": [2, 4],
    "ffn_hidden_size": [64, 92],
    "swiglu": [True, False],
    "normalization": ["LayerNorm", "RMSNorm"],
    "add_bias_linear": [True, False],
    "bias_gelu_fusion": [True, False],
    "bias_swiglu_fusion": [True, False],
    "group_query_attention": [True, False],
    "num_query_groups": [1, 2],
    "untie_embeddings_and_output_weights": [True, False],
    "position_embedding_type": ["learned_absolute", "rope"],
    "use_rotary_position_embeddings": [True, False, False],
    "rotary_base": [10000, 500],
    "openai_gelu": [True, False],
    "hidden_dropout": [0.0, 0.1],
    "attention_dropout": [0.0, 0.1],
    "init_method_std": [0.02, 0.006],
    "rotary_percent": [1.0, 0.5],
}
"""Arguments that hybridpar has, beside the sizes."""

HARMLESS: dict[str, list[Any]] = {
    "apply_query_key_layer_scaling": [True],
    "attention_softmax_in_fp32": [True],
    "fp32_residual_connection": [True],
    "clone_scatter_output_in_embedding": [False],
    "calculate_per_token_loss": [True],
    "test_mode": [True],
    "moe_router_topk": [3],
    "mlp_chunks_for_prefill": [2],
    "embedding_init_method_std": [0.5],
    "qk_clip_alpha": [0.3],
    "window_attn_skip_freq": [2],
    "rope_scaling_factor": [4.0],
    "seed": [7],
    "lr": [0.5],
    "fp8": ["hybrid"],
    "bf16": [True],
    "recompute_granularity": ["full"],
    "sequence_parallel": [True],
    "log_interval": [3],
    "data_path": [["a", "b"]],
    "optimizer": ["muon"],
    "moe_aux_loss_coeff": [0.1],
    "mamba_state_dim": [64],
    "retro_num_neighbors": [5],
    "vision_backbone_type": ["swin"],
    "reset_attention_mask": [True],
    "inference_max_requests": [3],
    "wandb_project": ["x"],
    "use_flash_attn": [True],
    "a_flag_of_a_fork": [False, None],
}
"""Arguments that change no logits."""

REFUSED: dict[str, list[Any]] = {
    "qk_l2_norm": [True],
    "glu_linear_offset": [1.0, -0.5],
    "rotary_percent": [0.0, 1.5],
    "rotary_interleaved": [True],
    "squared_relu": [True],
    "quick_geglu": [True],
    "window_size": [(4, 3)],
    "softmax_type": ["off-by-one", "learnable"],
    "attention_output_gate": [True],
    "activation_func_clamp_value": [1.0],
    "num_experts": [4],
    "mtp_num_layers": [1],
    "apply_residual_connection_post_layernorm": [True],
    "multi_latent_attention": [True],
    "use_mup": [True],
    "normalization": ["L2Norm"],
    "experimental_attention_variant": ["gdn"],
    "spec": ["a.b"],
    "heterogeneous_layers_config_path": ["x.json"],
    "hybrid_override_pattern": ["M*"],
    "logit_softcap": [30.0],
    "embedding_multiplier": [12],
    "attention_scale": ["mup"],
    "use_alibi": [True],
    "linear_attention_freq": [2],
}
"""Arguments that it lacks, or does not know: the last ones are forks'."""


def random_arguments(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that hybridpar has, and, for one set in two, some that it has not."""
    rng = random.Random(seed)
    args = DEFAULTS | SIZE | {name: rng.choice(values) for name, values in CHOICES.items()}
    args |= {
        name: rng.choice(HARMLESS[name])
        for name in rng.sample(sorted(HARMLESS), rng.randrange(len(HARMLESS)))
    }
    args["kv_channels"] = rng.choice([None, args["hidden_size"] // args["num_attention_heads"], 10])
    args["add_qkv_bias"] = rng.random() < 0.5
    can_norm = args["normalization"] == "RMSNorm" and not args.get("test_mode")
    args["qk_layernorm"] = can_norm and rng.random() < 0.5
    args["softmax_scale"] = rng.choice([None, 0.2])
    args["no_rope_freq"] = rng.choice([None, args["num_layers"]])
    is_rotary = args["use_rotary_position_embeddings"] or args["position_embedding_type"] == "rope"
    args["use_rope_scaling"] = is_rotary and rng.random() < 0.3
    if is_rotary and not args["use_rope_scaling"]:
        args["rotary_seq_len_interpolation_factor"] = rng.choice([None, 2])
    epsilon = rng.choice([1e-5, 1e-3])
    del args["norm_epsilon"], args["layernorm_epsilon"]
    args[rng.choice(["norm_epsilon", "layernorm_epsilon"])] = epsilon
    wrong = {
        name: rng.choice(REFUSED[name])
        for name in rng.sample(sorted(REFUSED), rng.choice([0, 0, 1, 3]))
    }
    return args, wrong


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron Core's state for a job of one process on a CPU; nothing is compiled."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        with (
            mock.patch("torch.cuda.current_device", return_value="cpu"),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def core_model(args: Mapping[str, Any]) -> Any:
    """The model, in float32, with weights some 0.2 in size."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = core_config(args)
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=args.get("qk_l2_norm", False),
    )
    model = GPTModel(
        config,
        spec,
        args["padded_vocab_size"],
        args["max_position_embeddings"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type="rope"
        if args["use_rotary_position_embeddings"]
        else args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def core_config(args: Mapping[str, Any]) -> Any:
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = args["swiglu"] or args["quick_geglu"]
    activation = (
        F.silu
        if args["swiglu"]
        else quick_gelu
        if args["quick_geglu"]
        else squared_relu
        if args["squared_relu"]
        else F.gelu
    )
    gelu_fused = activation is F.gelu and args["bias_gelu_fusion"] and args["add_bias_linear"]
    as_they_are = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "normalization",
        "add_bias_linear",
        "add_qkv_bias",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "rotary_interleaved",
        "qk_layernorm",
        "qk_l2_norm",
        "glu_linear_offset",
        "activation_func_clamp_value",
        "softmax_type",
        "window_size",
        "attention_output_gate",
        "no_rope_freq",
        "softmax_scale",
        "fp32_residual_connection",
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "apply_residual_connection_post_layernorm",
        "clone_scatter_output_in_embedding",
        "test_mode",
        "moe_router_topk",
        "mlp_chunks_for_prefill",
        "qk_clip_alpha",
        "calculate_per_token_loss",
        "window_attn_skip_freq",
        "embedding_init_method_std",
        "multi_latent_attention",
    )
    return TransformerConfig(
        **{name: args[name] for name in as_they_are if name in args},
        use_cpu_initialization=True,
        activation_func=activation,
        gated_linear_unit=gated,
        bias_activation_fusion=gelu_fused,
        layernorm_epsilon=args["norm_epsilon"]
        if "norm_epsilon" in args
        else args["layernorm_epsilon"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else None,
    )


def core_logits(model: Any, tokens: Tensor) -> Tensor:
    """Shapes: [b, s] -> [b, s, v]."""
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length).expand_as(tokens), later[None, None])


def save_core(root: Path, model: Any, args: Mapping[str, Any]) -> Path:
    """Save a model on one rank like Megatron-LM."""
    folder = root / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(
        {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": model.state_dict_for_save_checkpoint(),
        },
        folder / "model_optim_rng.pt",
    )
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root
