"""Compare a checkpoint with Megatron Core's own model on the same tokens, in float64 on the CPU.

That model is built from all arguments that Megatron Core has a field for, as Megatron-LM does, not
just from the ones that the import knows. So what the import ignores by mistake shows in the logits.
Source: core_transformer_config_from_args and gpt_builder of NVIDIA Megatron-LM (which argument
becomes what).
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from hybridpar.checkpoint.huggingface.verify import (
    Comparison,
    compare_logits,
    our_logits,
    random_batch,
)
from hybridpar.checkpoint.load import load_full
from hybridpar.checkpoint.megatron.files import MegatronFiles
from hybridpar.checkpoint.stages import whole_model
from hybridpar.errors import CheckpointError, config_error

_HERE: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "params_dtype": torch.float64,
    "transformer_impl": "local",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "memory_efficient_layer_norm": False,
    "fused_single_qkv_rope": False,
    "cuda_graph_impl": "none",
    "fp32_residual_connection": False,
}
"""Fields that say where and in what precision the model is computed."""

_ELSEWHERE = frozenset(
    {
        "attention_backend",
        "cp_comm_type",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
        "fp8",
        "fp8_param",
        "fp4",
        "fp4_param",
        "first_last_layers_bf16",
        "enable_cuda_graph",
        "external_cuda_graph",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "offload_modules",
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "use_kitchen",
        "quant_recipe",
        "account_for_loss_in_pipeline_split",
        "fine_grained_activation_offloading",
        "disable_bf16_reduced_precision_matmul",
    }
)
"""Further such fields, which are left at their defaults."""


def compare_megatron(checkpoint: Path, folder: Path) -> Comparison:
    """Compare all logits on random tokens with the model that Megatron-LM saved in `folder`.

    Raises:
        ConfigError: megatron-core is not installed.
        CheckpointError: It cannot compute the model.
    """
    config, weights = load_full(checkpoint)
    model = config.transformer
    files = MegatronFiles(folder)
    files.cut_vocabulary(model.vocab_size)
    batch = random_batch(model)
    theirs = core_logits(files, batch["tokens"])
    ours = our_logits(model, whole_model(model, weights, torch.float64), batch)
    return compare_logits(ours, {"words": theirs}, batch["padding_mask"], folder)


def core_logits(files: MegatronFiles, tokens: Tensor) -> Tensor:
    """Return the logits that Megatron Core gives these tokens. Shapes: [b, s] -> [b, s, v].
    Raises: as `compare_megatron`."""
    with _one_process():
        try:
            model = _build(files)
            loaded = model.load_state_dict(
                {name: files.read(name) for name in files.shapes}, strict=False
            )
            if missing := [
                name for name in loaded.missing_keys if not name.endswith("_extra_state")
            ]:
                raise CheckpointError(
                    f"{files.folder}: Megatron Core misses {', '.join(missing[:8])}"
                )
            length = tokens.shape[1]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            with torch.no_grad():
                return model(tokens, torch.arange(length).expand_as(tokens), later[None, None])
        except CheckpointError:
            raise
        except (
            Exception
        ) as error:  # any error of Megatron's code, whose settings may not be available on a CPU
            raise CheckpointError(
                f"{files.folder}: Megatron Core cannot compute it here: {error!r}"
            ) from None


def _build(files: MegatronFiles) -> Any:
    """Return Megatron Core's model, in float64, without weights."""
    gpt = importlib.import_module("megatron.core.models.gpt")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    args = files.args
    config = _config(files)
    is_rotary = args.get("use_rotary_position_embeddings")
    model = gpt.GPTModel(
        config,
        specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            qk_l2_norm=config.qk_l2_norm,
            normalization=config.normalization,
        ),
        vocab_size=files.shapes["embedding.word_embeddings.weight"][0],
        max_sequence_length=args["max_position_embeddings"],
        share_embeddings_and_output_weights=not args.get("untie_embeddings_and_output_weights"),
        position_embedding_type="rope"
        if is_rotary
        else args.get("position_embedding_type", "learned_absolute"),
        rotary_percent=args.get("rotary_percent", 1.0),
        rotary_base=args.get("rotary_base", 10000),
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
    )
    return model.double().eval()


def _config(files: MegatronFiles) -> Any:
    """Return the arguments as a TransformerConfig."""
    core = importlib.import_module("megatron.core")
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    fields = {field.name for field in dataclasses.fields(configs.TransformerConfig)}
    parallel = {field.name for field in dataclasses.fields(core.ModelParallelConfig)}
    args = files.args
    bias = args.get("add_bias_linear", not args.get("disable_bias_linear", False))
    experts = {name for name in fields if name.startswith("moe_")}  # there is no GPU
    values = {
        name: args[name]
        for name in fields - parallel - experts - _ELSEWHERE
        if args.get(name) is not None
    }
    values |= {name: value for name, value in _HERE.items() if name in fields}
    values |= {
        "add_bias_linear": bias,
        "bias_activation_fusion": bool(args.get("bias_gelu_fusion")) and bias,
        "num_query_groups": args.get("num_query_groups")
        if args.get("group_query_attention")
        else None,
    }
    older = {
        "norm_epsilon": "layernorm_epsilon",
        "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    }
    values |= {name: args[old] for old, name in older.items() if args.get(old) is not None}
    if args.get("swiglu"):
        values |= {
            "activation_func": functional.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": False,
        }
    elif args.get("openai_gelu") and not files.is_core:
        values |= {
            "activation_func": partial(functional.gelu, approximate="tanh"),
            "bias_activation_fusion": False,
        }
    return configs.TransformerConfig(**values)


@contextmanager
def _one_process() -> Iterator[None]:
    """Set up Megatron Core as a job of one process on the CPU, which it takes for a GPU, without
    compiling anything.

    Raises:
        ConfigError: It cannot be imported.
    """
    current = torch.cuda.current_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = importlib.import_module("megatron.core.parallel_state")
            generators = importlib.import_module("megatron.core.tensor_parallel.random")
        except ImportError as error:
            raise config_error(
                "verify",
                True,
                f"requires megatron-core, which cannot be imported ({error})",
                "pip install megatron-core",
            ) from None
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
            state.initialize_model_parallel()
            generators.initialize_rng_tracker(
                inference_rng_tracker=True, force_reset=True
            )  # a generator that needs no GPU
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            torch.cuda.current_device = current
            state.destroy_model_parallel()
            distributed.destroy_process_group()
